// Properties of the whole forward pass that hold on bits: packing, caching, chunking, threads, causality, adapters.
#include "model/forward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/parallel.h"
#include "base/philox.h"
#include "ops/head.h"
#include "support/same_bits.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::random_model;
using testing::random_tokens;
using testing::same_bits;
using testing::tiny_config;

constexpr Numerics kProfiles[] = {Numerics::fp32, Numerics::bf16, Numerics::released};

Tensor hidden_of(ResidentWeights& m, const std::vector<std::vector<int>>& documents, Numerics n,
                 const AdapterBatch* adapters = nullptr) {
  ForwardOptions o;
  o.numerics = n;
  o.adapters = adapters;
  return forward(m, plan_documents(plan_shape(m.model), documents), o).hidden;
}
double largest_difference(const Tensor& a, const Tensor& b) {
  double most = 0;
  for (int64_t i = 0; i < a.numel(); ++i) most = std::max<double>(most, std::fabs(a.f32()[i] - b.f32()[i]));
  return most;
}

// Feeds one sequence through a cache in chunks of the given sizes; returns the hidden rows of all tokens.
Tensor cached(ResidentWeights& m, const std::vector<int>& ids, const std::vector<int>& chunks, Numerics n) {
  const PlanShape shape = plan_shape(m.model);
  const int length = static_cast<int>(ids.size()), largest = *std::max_element(chunks.begin(), chunks.end());
  const CacheSlots slots{3, shape.window + largest, 1, 2, 5, 1};  // not at the start of the cache
  const CacheShape totals{3 + shape.window + largest, 1 + length, 2 + length};
  KvCache cache = make_cache(m.model, totals, 5 + 2 * shape.csa_ratio, 1 + shape.hca_ratio);
  ForwardOptions o;
  o.numerics = n;
  o.cache = &cache;
  Tensor all = Tensor::empty({length, m.model.hidden_size});
  int done = 0;
  for (size_t i = 0; done < length; ++i) {
    const int take = std::min(chunks[i % chunks.size()], length - done);
    SequencePlan plan =
        plan_cached_step(shape, totals, {slots}, {done}, {{ids.begin() + done, ids.begin() + done + take}}, true);
    Tensor h = forward(m, plan, o).hidden;
    std::memcpy(all.rows(done, done + take).raw(), h.raw(), h.bytes());
    done += take;
  }
  return all;
}

TEST(Forward, PackedDocumentsHaveTheBitsOfSeparateOnes) {  // B4, T35
  auto m = random_model(tiny_config(), 1, WeightFormat::fp8);
  const std::vector<std::vector<int>> documents = {random_tokens(m->model, 37, 1),
                                                   {},
                                                   random_tokens(m->model, 1, 2),
                                                   random_tokens(m->model, 50, 3),
                                                   random_tokens(m->model, 16, 4)};
  for (Numerics n : kProfiles) {
    Tensor packed = hidden_of(*m, documents, n);
    int row = 0;
    for (const auto& d : documents) {
      const int rows = static_cast<int>(d.size());
      if (rows == 0) continue;
      EXPECT_TRUE(same_bits(packed.rows(row, row + rows), hidden_of(*m, {d}, n))) << numerics_name(n) << " " << rows;
      row += rows;
    }
  }
}

TEST(Forward, ChunkedPrefillAndDecodingHaveTheBitsOfOneShot) {  // B3, T31, T36
  auto m = random_model(tiny_config(), 2, WeightFormat::fp8);
  const std::vector<int> ids = random_tokens(m->model, 75, 5);
  for (Numerics n : kProfiles) {
    const Tensor whole = hidden_of(*m, {ids}, n);
    for (const std::vector<int>& chunks :
         {std::vector<int>{1}, {3}, {4}, {7, 1, 1}, {16}, {17, 2}, {31}, {40, 1}, {75}})
      EXPECT_TRUE(same_bits(cached(*m, ids, chunks, n), whole)) << numerics_name(n) << " chunks of " << chunks[0];
  }
}

// The released ratios and window: every prompt length around the multiples of 4 and 128, then decoding.
TEST(Forward, PrefillThenDecodeAtTheReleasedRatios) {
  const ModelConfig c = testing::released_ratios_config();
  auto m = random_model(c, 3);
  const std::vector<int> ids = random_tokens(c, 262, 6);
  const Tensor whole = hidden_of(*m, {ids}, Numerics::released);
  for (int prompt : {1, 2, 3, 4, 5, 126, 127, 128, 129, 130, 131, 255, 256, 257})
    EXPECT_TRUE(same_bits(cached(*m, ids, {prompt, 1, 1, 1, 2, 262}, Numerics::released), whole)) << prompt;
}

TEST(Forward, LaterTokensNeverChangeEarlierRows) {  // B2, T28, T29
  auto m = random_model(tiny_config(), 4, WeightFormat::fp4);
  std::vector<int> ids = random_tokens(m->model, 40, 7);
  for (Numerics n : {Numerics::fp32, Numerics::released}) {
    const Tensor whole = hidden_of(*m, {ids}, n);
    for (int u = 1; u < 40; ++u) {
      std::vector<int> other = ids;
      other[u] = (ids[u] + 7) % m->model.vocab_size;
      const Tensor changed = hidden_of(*m, {other}, n);
      ASSERT_TRUE(same_bits(changed.rows(0, u), whole.rows(0, u))) << u;
      ASSERT_FALSE(same_bits(changed.rows(u, u + 1), whole.rows(u, u + 1))) << u;
    }
  }
}

TEST(Forward, AnyNumberOfThreadsAndRepeatsGiveTheSameBits) {  // B15
  auto m = random_model(tiny_config(), 5, WeightFormat::fp8);
  const std::vector<int> ids = random_tokens(m->model, 60, 8);
  set_thread_count(1);
  const Tensor one = hidden_of(*m, {ids}, Numerics::released);
  for (int threads : {2, 3, 7}) {
    set_thread_count(threads);
    EXPECT_TRUE(same_bits(hidden_of(*m, {ids}, Numerics::released), one)) << threads;
  }
}

TEST(Forward, CommonShiftOfAllPositionsChangesNothing) {  // B1, T19; up to the rounding of angles at larger positions
  auto m = random_model(tiny_config(), 6);
  SequencePlan plan = plan_documents(plan_shape(m->model), {random_tokens(m->model, 50, 9)});
  ForwardOptions o;
  o.numerics = Numerics::fp32;
  const Tensor here = forward(*m, plan, o).hidden;
  for (auto* list : {&plan.position, &plan.csa.position, &plan.hca.position})
    for (int& p : *list) p += 1024;  // an angle of 1024 rad has an FP32 step of 6e-5
  EXPECT_LT(largest_difference(forward(*m, plan, o).hidden, here), 2e-2);
  for (int& p : plan.csa.position) p += 3;  // and the test would see an entry at a wrong position
  EXPECT_GT(largest_difference(forward(*m, plan, o).hidden, here), 0.1);
}

TEST(Forward, TopkOfAllEntriesIsDenseAttention) {  // B5
  ModelConfig c = tiny_config();
  c.index_topk = 1000;
  auto m = random_model(c, 7);
  const std::vector<int> ids = random_tokens(c, 45, 10);
  const Tensor sparse = hidden_of(*m, {ids}, Numerics::fp32);
  for (LayerWeights& w : m->layers)  // index keys that say nothing: the choice among all does not matter
    if (w.kind == LayerKind::csa) w.attn.indexer.wq_b.data = Tensor::zeros(w.attn.indexer.wq_b.data.shape());
  EXPECT_TRUE(same_bits(hidden_of(*m, {ids}, Numerics::fp32), sparse));
}

TEST(Forward, PermutedExpertsGiveTheSameOutput) {  // B8
  auto m = random_model(tiny_config(), 8), p = random_model(tiny_config(), 8);
  const std::vector<int> to = {3, 0, 5, 1, 4, 2};  // expert e becomes to[e]
  for (LayerWeights& w : p->layers) {
    auto experts = w.experts;
    const Tensor gate = w.router.gate.data, bias = w.router.bias, table = w.router.tid2eid;
    w.router.gate.data = gate.clone();
    if (bias.defined()) w.router.bias = bias.clone();
    for (int e = 0; e < 6; ++e) {
      w.experts[to[e]] = experts[e];
      std::memcpy(w.router.gate.data.f32() + to[e] * gate.size(1), gate.f32() + e * gate.size(1),
                  gate.size(1) * sizeof(float));
      if (bias.defined()) w.router.bias.f32()[to[e]] = bias.f32()[e];
    }
    if (table.defined()) {
      w.router.tid2eid = table.clone();
      for (int64_t i = 0; i < table.numel(); ++i) w.router.tid2eid.ptr<int32_t>()[i] = to[table.ptr<int32_t>()[i]];
    }
  }
  const std::vector<int> ids = random_tokens(m->model, 30, 11);
  EXPECT_TRUE(same_bits(hidden_of(*m, {ids}, Numerics::fp32), hidden_of(*p, {ids}, Numerics::fp32)));
}

TEST(Forward, OnlyWantedRowsComeBack) {
  auto m = random_model(tiny_config(), 9);
  SequencePlan plan = plan_documents(plan_shape(m->model), {random_tokens(m->model, 20, 12)});
  ForwardOptions o;
  const Tensor all = forward(*m, plan, o).hidden;
  plan.wanted = {3, 19};
  const Tensor two = forward(*m, plan, o).hidden;
  EXPECT_TRUE(same_bits(two.rows(0, 1), all.rows(3, 4)));
  EXPECT_TRUE(same_bits(two.rows(1, 2), all.rows(19, 20)));
}

TEST(Adapters, AZeroAdapterIsTheBaseModelAndARealOneIsNot) {
  auto m = random_model(tiny_config(), 10, WeightFormat::fp8);
  auto zero = random_adapter(m->model, 3, 1);
  LayerLoraGrad unused;
  for (LayerLora& l : zero->layers)
    visit_lora(l, unused, [](const std::string&, LoraPair& p, LoraGrad&) { p.b.zero(); });
  const std::vector<int> ids = random_tokens(m->model, 33, 13);
  const Tensor base = hidden_of(*m, {ids}, Numerics::released);
  AdapterBatch with_zero{{{zero, {}, true, nullptr}}}, with_real{{{random_adapter(m->model, 3, 2), {}, true, nullptr}}};
  EXPECT_TRUE(same_bits(hidden_of(*m, {ids}, Numerics::released, &with_zero), base));
  EXPECT_GT(largest_difference(hidden_of(*m, {ids}, Numerics::released, &with_real), base), 0.01);
}

TEST(Adapters, RowsOfSeveralAdaptersInOneBatchHaveTheBitsOfEachAlone) {
  auto m = random_model(tiny_config(), 11, WeightFormat::fp8);
  const std::vector<std::vector<int>> documents = {random_tokens(m->model, 21, 1), random_tokens(m->model, 18, 2),
                                                   random_tokens(m->model, 25, 3)};
  std::vector<std::shared_ptr<const Adapter>> adapters = {random_adapter(m->model, 2, 3), nullptr,
                                                          random_adapter(m->model, 5, 4)};
  AdapterBatch mixed;
  int row = 0;
  for (size_t d = 0; d < documents.size(); ++d) {
    std::vector<int> rows;
    for (size_t i = 0; i < documents[d].size(); ++i) rows.push_back(row++);
    if (adapters[d]) mixed.parts.push_back({adapters[d], rows, false, nullptr});
  }
  for (Numerics n : {Numerics::fp32, Numerics::released}) {
    const Tensor together = hidden_of(*m, documents, n, &mixed);
    row = 0;
    for (size_t d = 0; d < documents.size(); ++d) {
      AdapterBatch alone;
      if (adapters[d]) alone.parts.push_back({adapters[d], {}, true, nullptr});
      const int rows = static_cast<int>(documents[d].size());
      EXPECT_TRUE(same_bits(together.rows(row, row + rows), hidden_of(*m, {documents[d]}, n, &alone))) << d;
      row += rows;
    }
  }
}

// B7: the grouped output projection equals one block-diagonal matrix. Written out densely here.
TEST(Attention, GroupedProjectionIsBlockDiagonal) {
  auto m = random_model(tiny_config(), 12);
  const ModelConfig& c = m->model;
  const SequencePlan plan = plan_documents(plan_shape(c), {random_tokens(c, 9, 14)});
  const PassContext ctx = make_context(c, plan, Numerics::fp32);
  Random g(15);
  Tensor x = Tensor::empty({9, c.hidden_size});
  for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = g.normal();
  AttentionSaved s;
  attention_forward(ctx, m->layers[0], 0, x, s);
  const int64_t width = c.num_attention_heads * c.head_dim, group = width / c.o_groups,
                outs = c.o_groups * c.o_lora_rank;
  Linear dense{Tensor::zeros({outs, width}), {}, WeightFormat::f32, static_cast<int>(outs), static_cast<int>(width)};
  for (int64_t o = 0; o < outs; ++o)
    for (int64_t i = 0; i < group; ++i)
      dense.data.f32()[o * width + o / c.o_lora_rank * group + i] = m->layers[0].attn.wo_a.data.f32()[o * group + i];
  const Tensor u = ops::linear(s.core.turned.view({9, width}), dense);
  EXPECT_LT(largest_difference(u, s.u), 1e-6);  // products with zero only change the sign of zero
}

}  // namespace
}  // namespace plumb
