// Replayed decoding steps against plain ones, on bits: hidden rows and all caches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "flash_model.h"
#include "memory/device_weights.h"
#include "model/decode_graphs.h"
#include "ops/gpu/recording.h"
#include "ops/gpu/support.h"
#include "ops/rows.h"
#include "support/same_bits.h"

namespace plumb {
namespace {

using testing::flash_adapter;
using testing::flash_config;
using testing::same_bits;

WeightStore& weights() {
  static WeightStore& w = *new DeviceWeights(testing::flash_model(3));
  return w;
}

// Which adapter each sequence uses, by number; -1: none.
struct Adapters {
  std::vector<std::shared_ptr<const Adapter>> all;
  AdapterBatch of(const std::vector<int>& number) const {
    AdapterBatch batch;
    for (size_t a = 0; a < all.size(); ++a) {
      AdapterBatch::Part part{all[a], {}, false, nullptr};
      for (size_t r = 0; r < number.size(); ++r)
        if (number[r] == static_cast<int>(a)) part.rows.push_back(static_cast<int>(r));
      if (!part.rows.empty()) batch.parts.push_back(std::move(part));
    }
    return batch;
  }
};

// Sequences with a cache of their own each way: plain steps, and steps through graphs.
class TwoWays {
 public:
  TwoWays(std::vector<int> length, int longest)
      : config_(flash_config()), shape_(plan_shape(config_)), length_(std::move(length)) {
    const int n = static_cast<int>(length_.size()), keys = shape_.window + 300;
    const int csa = longest / shape_.csa_ratio + 1, hca = longest / shape_.hca_ratio + 1;
    for (int i = 0; i < n; ++i)
      slots_.push_back({i * keys, keys, i * csa, i * hca, i * 2 * shape_.csa_ratio, i * shape_.hca_ratio});
    totals_ = {n * keys, n * csa, n * hca};
    for (KvCache* cache : {&plain_, &replayed_})
      *cache = make_cache(config_, totals_, n * 2 * shape_.csa_ratio, n * shape_.hca_ratio, Space::device);
    graphs_ = decode_graphs(weights(), replayed_);
    for (int i = 0; i < n; ++i) prefill(i);
  }

  // The next token of the sequences `who`.
  void step(const std::vector<int>& who, const AdapterBatch& adapters = {}) {
    std::vector<CacheSlots> slots;
    std::vector<int> length;
    std::vector<std::vector<int>> next;
    for (int i : who)
      slots.push_back(slots_[i]), length.push_back(length_[i]++), next.push_back({token(i, length.back())});
    const SequencePlan plan = plan_cached_step(shape_, totals_, slots, length, next, true);
    ForwardOptions o;
    o.adapters = adapters.parts.empty() ? nullptr : &adapters;
    o.cache = &plain_;
    const Tensor hidden = forward(weights(), plan, o).hidden;
    o.cache = &replayed_;
    ASSERT_TRUE(same_bits(graphs_->forward(plan, o), hidden)) << who.size() << " rows, step " << steps_;
    ++steps_;
  }
  void expect_same_caches() const { EXPECT_TRUE(same_bits(plain_, replayed_)) << "after step " << steps_; }
  DecodeGraphStats stats() const { return graphs_->stats(); }

 private:
  int token(int sequence, int position) const {
    return (sequence * 977 + position * 131 + position * position * 7) % config_.vocab_size;
  }
  void prefill(int i) {
    for (int done = 0; done < length_[i];) {
      const int take = std::min(256, length_[i] - done);
      std::vector<int> ids;
      for (int p = done; p < done + take; ++p) ids.push_back(token(i, p));
      const SequencePlan plan = plan_cached_step(shape_, totals_, {slots_[i]}, {done}, {ids}, false);
      for (KvCache* cache : {&plain_, &replayed_}) {
        ForwardOptions o;
        o.cache = cache;
        forward(weights(), plan, o);
      }
      done += take;
    }
  }

  ModelConfig config_;
  PlanShape shape_;
  std::vector<int> length_;
  std::vector<CacheSlots> slots_;
  CacheShape totals_;
  KvCache plain_, replayed_;
  std::unique_ptr<DecodeGraphs> graphs_;
  int steps_ = 0;
};

std::vector<int> first(int n) {
  std::vector<int> who(n);
  for (int i = 0; i < n; ++i) who[i] = i;
  return who;
}

// Positions around the end of the window, of both compression windows and of the lists for which a graph has room: all
// of 4, 128, 512 (eight tiles of 64 entries are 2,048) are passed by some row.
std::vector<int> ragged(int n) {
  const int starts[] = {124, 1, 3, 252, 130, 509, 64, 2045, 7, 126};
  std::vector<int> length;
  for (int i = 0; i < n; ++i) length.push_back(starts[i % 10] + i / 10);
  return length;
}

TEST(DecodeGraphs, BatchesOfAllSizesHaveTheBitsOfPlainSteps) {
  TwoWays two(ragged(17), 2100);
  for (int batch = 1; batch <= 17; ++batch)
    for (int step = 0; step < 5; ++step) {
      two.step(first(batch));
      if (HasFatalFailure()) return;
    }
  two.expect_same_caches();
  const DecodeGraphStats s = two.stats();
  std::printf("%d graphs, %lld replays, %.1f MB\n", s.graphs, static_cast<long long>(s.replays), 1e-6 * s.bytes);
  EXPECT_GT(s.replays, 40);
  EXPECT_GT(s.bytes, 0);
}

// A long way of few sequences, one of which passes all boundaries alone; plain chunks in between use other sizes of
// the same kernels.
TEST(DecodeGraphs, AlongBoundariesOfWindowsAndLists) {
  TwoWays two({2040, 120, 1}, 2200);
  for (int step = 0; step < 140; ++step) {
    two.step(step % 3 == 2 ? std::vector<int>{0} : std::vector<int>{0, 1, 2});
    if (HasFatalFailure()) return;
  }
  two.expect_same_caches();
  EXPECT_GT(two.stats().replays, 100);
}

TEST(DecodeGraphs, AdaptersOfRowsChange) {
  TwoWays two(ragged(6), 2100);
  Adapters adapters{{flash_adapter(flash_config(), 4, 41), flash_adapter(flash_config(), 8, 42)}};
  const std::vector<std::vector<int>> uses = {{0, 0, 0, 0, 0, 0},     {0, 0, 1, 1, -1, 0}, {1, 0, -1, 0, 1, 1},
                                              {-1, 1, 0, -1, -1, -1}, {1, 1, 1, 1, 1, 1},  {-1, 0, -1, 0, 0, -1}};
  for (int round = 0; round < 3; ++round)
    for (const std::vector<int>& of : uses)
      for (int step = 0; step < 3; ++step) {
        two.step(first(6), adapters.of(of));
        two.step(first(5), adapters.of({of.begin(), of.begin() + 5}));
        if (HasFatalFailure()) return;
      }
  two.step(first(6));
  two.expect_same_caches();
  EXPECT_GT(two.stats().replays, 50);
}

// A new version has its own graph, and that of the old one goes when nobody has the old one any more.
TEST(DecodeGraphs, NewVersionsOfAnAdapterGiveNewResults) {
  TwoWays two({40, 9}, 100);
  Adapters adapters{{flash_adapter(flash_config(), 4, 43)}};
  for (int version = 0; version < 4; ++version) {
    for (int step = 0; step < 6; ++step) {
      two.step({0, 1}, adapters.of({0, 0}));
      if (HasFatalFailure()) return;
    }
    EXPECT_LE(two.stats().graphs, 3);  // with and without entries
    adapters.all[0] = flash_adapter(flash_config(), 4, 44 + version);
  }
  EXPECT_GE(two.stats().replays, 8);  // of 24 steps: each version first makes its graphs
}

TEST(DecodeGraphs, SmallStepsForTheSanitizer) {
  TwoWays two({126, 2}, 140);
  Adapters adapters{{flash_adapter(flash_config(), 4, 45)}};
  for (int step = 0; step < 4; ++step) two.step({0, 1});
  for (int step = 0; step < 3; ++step) two.step({0, 1}, adapters.of({0, -1}));
  two.expect_same_caches();
  EXPECT_GT(two.stats().replays, 0);
}

// What cannot be repeated without the host says so, and leaves the thread as it was.
TEST(Recording, CopiesToAndFromTheHostAreErrors) {
  const auto memory = std::make_shared<ops::gpu::RecordedMemory>();
  const Tensor x = to_device(Tensor::full({4, 8}, 3));
  try {
    const ops::gpu::Recording bad(memory, [&] { to_host(ops::gather_rows(x, std::vector<int>{1})); });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("a copy of"), std::string::npos) << e.what();
  }
  EXPECT_FALSE(ops::gpu::recording());
  EXPECT_EQ(to_host(x).f32()[31], 3);
}

TEST(Recording, ReplaysReadWhatLiesInTheirInputs) {
  const auto memory = std::make_shared<ops::gpu::RecordedMemory>();
  const Tensor row = to_device(Tensor::of(std::vector<int>{0, 1}));
  const Tensor x = to_device(Tensor::of(std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}, {3, 4}));
  Tensor y;
  const ops::gpu::Recording gather(memory, [&] { y = ops::gather_rows(x, row); });
  EXPECT_EQ(gather.nodes(), 1u);
  for (const std::vector<int>& rows : {std::vector<int>{2, 0}, {1, 2}, {0, 0}}) {
    copy_bytes(row, Tensor::of(rows));
    gather.replay();
    const Tensor host = to_host(y);
    EXPECT_EQ(host.f32()[0], rows[0]);
    EXPECT_EQ(host.f32()[4], rows[1]);
  }
}

}  // namespace
}  // namespace plumb
