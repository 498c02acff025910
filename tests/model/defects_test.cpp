// Defects that users of other implementations have met and that no other test of this folder would show. The numbers
// T.. and B.. are those of docs/testing.md.
#include <gtest/gtest.h>

#include <cmath>

#include "base/parallel.h"
#include "model/forward.h"
#include "support/same_bits.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_model;
using testing::random_tokens;
using testing::same_bits;
using testing::tiny_config;
using K = LayerKind;

ForwardResult run(ResidentWeights& m, const std::vector<std::vector<int>>& documents, ForwardOptions o = {}) {
  o.keep = Keep::streams;
  return forward(m, plan_documents(plan_shape(m.model), documents), o);
}
ModelConfig one_layer(LayerKind kind) {
  ModelConfig c = tiny_config();
  c.num_hidden_layers = 1;
  c.num_hash_layers = 1;
  c.layer_kinds = {kind, K::window};
  return c;
}

TEST(Defects, HundredRunsHaveTheSameBits) {  // T25, B15: a race would show as other bits now and then
  auto m = random_model(tiny_config(), 1, WeightFormat::fp8);
  const std::vector<int> ids = random_tokens(m->model, 24, 1);
  set_thread_count(3);
  const Tensor first = run(*m, {ids}).hidden;
  for (int i = 1; i < 100; ++i) ASSERT_TRUE(same_bits(run(*m, {ids}).hidden, first)) << i;
}

// The backward pass recomputes each layer from its input streams: what it sees must be what the forward pass saw.
TEST(Defects, LayersRecomputedFromTheirStashHaveTheSameBits) {
  auto m = random_model(tiny_config(), 2, WeightFormat::fp8);
  const SequencePlan plan =
      plan_documents(plan_shape(m->model), {random_tokens(m->model, 37, 2), random_tokens(m->model, 20, 3)});
  for (Numerics n : {Numerics::fp32, Numerics::bf16, Numerics::released}) {
    ForwardOptions o;
    o.numerics = n;
    o.keep = Keep::streams;
    set_thread_count(3);
    const ForwardResult r = forward(*m, plan, o);
    set_thread_count(1);
    const PassContext ctx = make_context(m->model, plan, n);
    for (int l = 0; l < m->model.num_hidden_layers; ++l) {
      LayerSaved s;
      EXPECT_TRUE(same_bits(layer_forward(ctx, m->layers[l], l, r.streams[l], s), r.streams[l + 1])) << l;
    }
  }
}

TEST(Defects, ModelsInOneProcessDoNotMix) {  // T39: tables kept under a key that does not hold all they depend on
  ModelConfig other = tiny_config();
  other.compress_rope_theta = 40000;
  other.rope_theta = 500;
  other.sliding_window = 5;
  other.hca_ratio = 8;
  auto a = random_model(tiny_config(), 3), b = random_model(other, 3);
  const std::vector<int> ids = random_tokens(other, 50, 4);
  const Tensor from_a = run(*a, {ids}).hidden, from_b = run(*b, {ids}).hidden;
  EXPECT_FALSE(same_bits(from_a, from_b));
  EXPECT_TRUE(same_bits(run(*a, {ids}).hidden, from_a));
  EXPECT_TRUE(same_bits(run(*b, {ids}).hidden, from_b));
}

TEST(Defects,
     EachKindOfLayerHasOneRotaryTable) {  // T22, T23: plain for windows, compress_rope_theta and YaRN elsewhere
  for (LayerKind kind : {K::window, K::csa, K::hca}) {
    const ModelConfig c = one_layer(kind);
    ModelConfig theta = c, compress_theta = c, yarn = c;
    theta.rope_theta = 500;
    compress_theta.compress_rope_theta = 40000;
    yarn.yarn.reset();
    const std::vector<int> ids = random_tokens(c, 40, 5);
    const Tensor hidden = run(*random_model(c, 4), {ids}).hidden;
    const auto changes = [&](const ModelConfig& other) {
      return !same_bits(run(*random_model(other, 4), {ids}).hidden, hidden);
    };
    EXPECT_EQ(changes(theta), kind == K::window);
    EXPECT_EQ(changes(compress_theta), kind != K::window);
    EXPECT_EQ(changes(yarn), kind != K::window);
  }
}

// T20: with compressed entries a row depends on tokens far beyond its window, without them it does not. top-k of all,
// so that no choice hides an entry.
TEST(Defects, TextPastTheWindowIsReachedThroughEntriesOnly) {
  for (LayerKind kind : {K::window, K::csa, K::hca}) {
    ModelConfig c = one_layer(kind);
    c.index_topk = 100;
    auto m = random_model(c, 5);
    std::vector<int> ids = random_tokens(c, 50, 6);
    ForwardOptions o;
    o.numerics = Numerics::fp32;
    const Tensor before = run(*m, {ids}, o).hidden;
    ids[1] = (ids[1] + 1) % c.vocab_size;
    EXPECT_EQ(same_bits(run(*m, {ids}, o).hidden.rows(49, 50), before.rows(49, 50)), kind == K::window);
  }
}

TEST(Defects, MtpOfPackedDocumentsHasTheBitsOfEachAlone) {  // T27, T35, B4
  auto m = random_model(tiny_config(), 6, WeightFormat::fp8);
  const std::vector<std::vector<int>> documents = {random_tokens(m->model, 19, 7), random_tokens(m->model, 1, 8),
                                                   random_tokens(m->model, 34, 9)};
  const auto hidden = [&](const std::vector<std::vector<int>>& list) {
    return mtp_forward(*m, 0, plan_mtp(plan_shape(m->model), list), run(*m, list).streams.back(), {});
  };
  const Tensor packed = hidden(documents);
  ASSERT_EQ(packed.size(0), 18 + 0 + 33);  // a document of one token has no second next token
  EXPECT_TRUE(same_bits(packed.rows(0, 18), hidden({documents[0]})));
  EXPECT_TRUE(same_bits(packed.rows(18, 51), hidden({documents[2]})));
}

TEST(Defects, RoutingWeightsSumToTheScaleAndReplayGivesTheSameBits) {  // T10, T41, T42
  auto m = random_model(tiny_config(), 7);
  const std::vector<int> ids = random_tokens(m->model, 30, 10);
  Taps taps;
  ForwardOptions o, again;
  o.taps = &taps;
  const Tensor hidden = run(*m, {ids}, o).hidden;
  for (int l = 0; l < m->model.num_hidden_layers; ++l) {
    const Tensor weight = taps.values.at("route_weights." + std::to_string(l));
    const Tensor chosen = taps.values.at("routed." + std::to_string(l));
    again.replay[l] = Tensor::empty(chosen.shape(), DType::i32);
    for (int64_t i = 0; i < chosen.numel(); ++i)
      again.replay[l].ptr<int32_t>()[i] = static_cast<int32_t>(chosen.ptr<int64_t>()[i]);
    for (int64_t t = 0; t < weight.size(0); ++t)  // two FP32 quotients with one denominator
      EXPECT_NEAR(weight.f32()[2 * t] + weight.f32()[2 * t + 1], m->model.routed_scaling_factor, 1e-6);
  }
  EXPECT_TRUE(same_bits(run(*m, {ids}, again).hidden, hidden));
  int32_t& expert = again.replay[3].ptr<int32_t>()[0];
  expert = (expert + 1) % 6 == again.replay[3].ptr<int32_t>()[1] ? (expert + 2) % 6 : (expert + 1) % 6;
  EXPECT_FALSE(same_bits(run(*m, {ids}, again).hidden, hidden));
}

struct Names {
  std::vector<std::string>& parameters;
  std::vector<std::string>& buffers;
  void operator()(const std::string& name, Linear&, Tensor&) const { parameters.push_back(name); }
  void operator()(const std::string& name, Tensor&, Tensor&) const { parameters.push_back(name); }
  void buffer(const std::string& name, Tensor&) const { buffers.push_back(name); }
};

TEST(Defects, RouterBiasAndTableAreNoParameters) {  // T50: no gradient, no weight decay; a hash layer has no bias
  auto m = random_model(tiny_config(), 8);
  for (int l = 0; l < m->model.num_hidden_layers; ++l) {
    std::vector<std::string> parameters, buffers;
    LayerGrads none;
    visit_layer("", m->model.is_hash_layer(l), m->layers[l], none, Names{parameters, buffers});
    const bool hash = l < 2;
    EXPECT_EQ(buffers, std::vector<std::string>{hash ? "ffn.gate.tid2eid" : "ffn.gate.bias"});
    EXPECT_EQ(m->layers[l].router.bias.defined(), !hash);
    for (const std::string& p : parameters) EXPECT_EQ(p.find("gate.bias"), std::string::npos) << p;
  }
}

}  // namespace
}  // namespace plumb
