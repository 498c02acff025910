#include "rollout/adapters.h"

#include <gtest/gtest.h>

#include "base/error.h"

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

}  // namespace
}  // namespace plumb
