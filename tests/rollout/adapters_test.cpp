#include "rollout/adapters.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

TEST(AdapterRegistry, VersionsCountUpAndOldOnesAreDropped) {
  AdapterRegistry registry(2);
  const auto weights = std::make_shared<Adapter>();
  const AdapterRef first = registry.publish("a", weights);
  EXPECT_EQ(first->version, 1);
  registry.publish("b", weights);
  registry.publish("a", weights);
  EXPECT_EQ(registry.newest("a")->version, 2);
  EXPECT_EQ(registry.version("a", 1), first);
  registry.publish("a", weights);
  EXPECT_THROW(registry.version("a", 1), Error);
  EXPECT_EQ(first->adapter, weights);  // who holds it still has it
  EXPECT_EQ(registry.follow(first)->version, 3);
  ASSERT_EQ(registry.list().size(), 2u);
  EXPECT_EQ(registry.list()[1]->name, "b");
}

TEST(AdapterRegistry, ARemovedNameIsUnknownAndItsVersionsNeverReturn) {
  AdapterRegistry registry;
  const AdapterRef first = registry.publish("a", std::make_shared<Adapter>());
  EXPECT_TRUE(registry.remove("a"));
  EXPECT_FALSE(registry.remove("a"));
  EXPECT_THROW(registry.newest("a"), Error);
  EXPECT_EQ(registry.follow(first), first);
  EXPECT_EQ(registry.publish("a", std::make_shared<Adapter>())->version, 2);
  EXPECT_THROW(registry.publish("", std::make_shared<Adapter>()), Error);
}

TEST(AdapterRegistry, WhatDoesNotFitTheModelIsRefusedByName) {
  const ModelConfig c = testing::tiny_config();
  AdapterRegistry registry;
  registry.publish("a", testing::random_adapter(c, 2, 1));
  registry.require_fit(c);
  const auto refused = [&](auto&& change, const std::string& tensor) {
    const auto adapter = testing::random_adapter(c, 2, 1);
    change(*adapter);
    try {
      registry.publish("b", adapter);
      ADD_FAILURE() << tensor;
    } catch (const Error& e) {
      EXPECT_EQ(e.where(), "adapter 'b'" + tensor) << e.what();
    }
  };
  refused([](Adapter& a) { a.layers.pop_back(); }, "");
  refused([](Adapter& a) { a.layers[2].wq_b.a = Tensor::zeros({2, 25}); }, ", layers.2.attn.wq_b.a");
  refused([](Adapter& a) { a.layers[1].wkv.b = Tensor::zeros({16, 3}); }, ", layers.1.attn.wkv.b");
  refused([](Adapter& a) { a.layers[0].compressor_wkv = a.layers[1].compressor_wkv; },
          ", layers.0.attn.compressor.wkv");
  refused([](Adapter& a) { a.layers[3].experts.down.pop_back(); }, ", layers.3.ffn.experts");
  refused(
      [](Adapter& a) {
        a.layers[3].experts.gate_up[5].b = Tensor::zeros({63, 2});
      },
      ", layers.3.ffn.experts.5.gate_up.b");
  EXPECT_EQ(registry.list().size(), 1u);
  EXPECT_EQ(registry.publish("a", testing::random_adapter(c, 3, 1))->version, 2);
  ModelConfig other = c;
  other.hidden_size = 64;
  EXPECT_THROW(registry.require_fit(other), Error);
}

}  // namespace
}  // namespace plumb
