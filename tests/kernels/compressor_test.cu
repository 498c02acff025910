// Pooling of compressed entries against FP64 code on the CPU, forward and backward, over plans as documents, prefix
// trees and caches have them: absent slots, rows that feed several entries, pending rows.
#include "kernels/compressor/compressor.h"

#include "device_data.cuh"

namespace plumb::kernels {
namespace {

struct Problem {
  int rows, entries, ratio, slots, width, pending;
  std::vector<int> source;
  std::vector<float> kv, gate, pending_kv, pending_gate, ape;
  std::vector<uint16_t> d_entries;
  Problem(int ratio, int width, int rows, const std::vector<std::vector<int>>& sources, int pending = 0)
      : rows(rows),
        entries(static_cast<int>(sources.size())),
        ratio(ratio),
        slots(ratio == 4 ? 8 : 128),
        width(width),
        pending(pending) {
    for (const auto& list : sources) source.insert(source.end(), list.begin(), list.end());
    const size_t row_width = static_cast<size_t>(slots / ratio) * width;
    kv = random_floats(rows * row_width, 1, 1), gate = random_floats(rows * row_width, 2, 2);
    pending_kv = random_floats(pending * row_width, 1, 3), pending_gate = random_floats(pending * row_width, 2, 4);
    ape = random_floats(ratio * row_width, 1, 5);
    d_entries = random_bf16(static_cast<size_t>(entries) * width, 1, 6);
  }
  int row_width() const { return slots / ratio * width; }
};

// Entries of a document of `rows` rows starting at `first`.
void add_document(std::vector<std::vector<int>>& sources, int ratio, int first, int rows) {
  for (int e = 0; (e + 1) * ratio <= rows; ++e) {
    std::vector<int> list;
    if (ratio == 4)
      for (int i = 0; i < 4; ++i) list.push_back(e == 0 ? -1 : first + (e - 1) * 4 + i);
    for (int i = 0; i < ratio; ++i) list.push_back(first + e * ratio + i);
    sources.push_back(list);
  }
}
Problem documents(int ratio, int width, const std::vector<int>& lengths) {
  std::vector<std::vector<int>> sources;
  int rows = 0;
  for (int length : lengths) add_document(sources, ratio, rows, length), rows += length;
  return Problem(ratio, width, rows, sources);
}
Problem random_sources(int ratio, int width, int rows, int entries, int pending) {
  std::mt19937 random(9);
  std::vector<std::vector<int>> sources(entries);
  for (auto& list : sources) {
    for (int s = 0; s < (ratio == 4 ? 8 : 128); ++s)
      list.push_back(random() % 4 == 0 ? -1 : static_cast<int>(random() % (rows + pending)));
    list.back() = 0;  // one at least is present
  }
  return Problem(ratio, width, rows, sources, pending);
}

struct Reference {
  std::vector<double> entries, d_kv, d_gate, d_ape;
  explicit Reference(const Problem& p) {
    const size_t rw = p.row_width();
    entries.resize(static_cast<size_t>(p.entries) * p.width);
    d_kv.resize(p.rows * rw), d_gate.resize(p.rows * rw), d_ape.resize(p.ratio * rw);
    for (int e = 0; e < p.entries; ++e)
      for (int c = 0; c < p.width; ++c) {
        std::vector<double> weight(p.slots, 0.0), v(p.slots, 0.0);
        double total = 0, entry = 0;
        const auto at = [&](int s) { return static_cast<size_t>(s / p.ratio * p.width + c); };
        for (int s = 0; s < p.slots; ++s) {
          const int source = p.source[e * p.slots + s];
          if (source < 0) continue;
          const bool pending = source >= p.rows;
          const size_t i = (pending ? source - p.rows : source) * rw + at(s);
          v[s] = (pending ? p.pending_kv : p.kv)[i];
          weight[s] =
              std::exp((pending ? p.pending_gate : p.gate)[i] + static_cast<double>(p.ape[s % p.ratio * rw + at(s)]));
          total += weight[s];
        }
        for (int s = 0; s < p.slots; ++s) weight[s] /= total, entry += weight[s] * v[s];
        entries[static_cast<size_t>(e) * p.width + c] = entry;
        const double de = value(p.d_entries[static_cast<size_t>(e) * p.width + c]);
        for (int s = 0; s < p.slots; ++s) {
          const int source = p.source[e * p.slots + s];
          if (source < 0 || source >= p.rows) continue;
          const double d_score = weight[s] * (v[s] - entry) * de;
          d_kv[source * rw + at(s)] += weight[s] * de;
          d_gate[source * rw + at(s)] += d_score;
          d_ape[s % p.ratio * rw + at(s)] += d_score;
        }
      }
  }
};

struct Pool {
  SlotTargetLists lists;
  Buffer<float> kv, gate, pending_kv, pending_gate, ape, d_kv, d_gate, d_frozen_kv, d_frozen_gate, d_ape;
  Buffer<int> source, target, key, begin;
  Buffer<uint16_t> entries, d_entries;
  CompressedPooling pooling;
  Buffer<uint8_t> workspace;
  explicit Pool(const Problem& p)
      : lists(slot_targets(p.source, p.rows, p.ratio, p.slots)),
        kv(p.kv),
        gate(p.gate),
        pending_kv(p.pending_kv),
        pending_gate(p.pending_gate),
        ape(p.ape),
        d_kv(p.kv.size()),
        d_gate(p.kv.size()),
        d_frozen_kv(p.kv.size()),
        d_frozen_gate(p.kv.size()),
        d_ape(std::vector<float>(p.ape.size(), 0.f)),
        source(p.source),
        target(lists.target),
        key(lists.key),
        begin(lists.begin),
        entries(static_cast<size_t>(p.entries) * p.width),
        d_entries(p.d_entries),
        pooling{kv.get(),
                gate.get(),
                p.pending ? pending_kv.get() : nullptr,
                p.pending ? pending_gate.get() : nullptr,
                ape.get(),
                source.get(),
                p.rows,
                p.entries,
                p.ratio,
                p.slots,
                p.width},
        workspace(pool_entries_backward_workspace(pooling, lists.parts(), true)) {
    run();
  }
  void run() {
    check(pool_entries(pooling, entries.get(), nullptr));
    const auto backward = [&](Buffer<float>& kv_gradient, Buffer<float>& gate_gradient, float* ape_gradient) {
      check(pool_entries_backward({pooling,
                                   d_entries.get(),
                                   {target.get(), key.get(), begin.get(), lists.joined(), lists.parts()},
                                   kv_gradient.get(),
                                   gate_gradient.get(),
                                   ape_gradient,
                                   workspace.get()},
                                  nullptr));
    };
    backward(d_kv, d_gate, d_ape.get());
    backward(d_frozen_kv, d_frozen_gate, nullptr);
    check(cudaDeviceSynchronize());
  }
};

// Two entries of ratio 4 over five rows: rows 0 and 1 in the first half of both, row 4 pending.
TEST(Compressor, TargetsNameTheOnlySlotOfARow) {
  const SlotTargetLists lists = slot_targets({-1, 0, 1, -1, 0, 1, 2, 3, 0, 1, 2, 3, 4, -1, -1, -1}, 4, 4, 8);
  // Halves (row, h) with one slot: (0, 1), (1, 1), (2, 1), (3, 1), (2, 0), (3, 0). Of two slots: (0, 0), (1, 0).
  EXPECT_EQ(lists.target, (std::vector<int>{-1, 4, 6, -1, 0, 1, 2, 3, 5, 7, 2, 3, -1, -1, -1, -1}));
  EXPECT_EQ(lists.key, (std::vector<int>{0, 2}));
  EXPECT_EQ(lists.begin, (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(lists.parts(), 4);
}

// FP32 sums of 8 or 128 terms, expf accurate to 2 units in the last place.
void compare(const Problem& p) {
  const Pool pool(p);
  const Reference want(p);
  const auto entries = pool.entries.host();
  for (size_t i = 0; i < entries.size(); ++i)
    ASSERT_LE(std::abs(value(entries[i]) - want.entries[i]), std::abs(want.entries[i]) * 0x1.01p-8 + 1e-5) << i;
  EXPECT_LT(relative_error(pool.d_kv.host(), want.d_kv), 2e-6);
  EXPECT_LT(relative_error(pool.d_gate.host(), want.d_gate), 2e-6);
  EXPECT_LT(relative_error(pool.d_ape.host(), want.d_ape), 5e-6);
  EXPECT_TRUE(same_bits(pool.d_kv.host(), pool.d_frozen_kv.host()));
  EXPECT_TRUE(same_bits(pool.d_gate.host(), pool.d_frozen_gate.host()));
}
TEST(Compressor, DocumentsSmall) {
  compare(documents(4, 128, {4, 7, 0, 3, 21}));
  compare(documents(4, 512, {33, 5}));
  compare(documents(128, 512, {128, 300}));
}
TEST(Compressor, ManySourcesSmall) {  // rows that feed several entries, absent and pending ones
  compare(random_sources(4, 128, 20, 30, 9));
  compare(random_sources(128, 512, 60, 3, 50));
}
TEST(Compressor, Documents) {
  compare(documents(4, 512, {700, 300, 64}));
  compare(documents(4, 128, {1000}));
  compare(documents(128, 512, {1500, 127, 640}));
}

TEST(Compressor, AnEntrysBitsDependOnItsSlotsAlone) {
  for (const int ratio : {4, 128}) {
    const int width = 512, rows = 5 * ratio;
    const Problem whole = documents(ratio, width, {rows});
    const auto entries = Pool(whole).entries.host();
    // The last entry from a cache: all rows but the last are pending.
    const int slots = whole.slots;
    std::vector<int> last(whole.source.end() - slots, whole.source.end());
    Problem step(ratio, width, 1, {last}, rows);
    for (int s = 0; s < slots; ++s) step.source[s] = last[s] == rows - 1 ? 0 : 1 + last[s];
    step.pending_kv = whole.kv, step.pending_gate = whole.gate, step.ape = whole.ape;
    step.kv.assign(whole.kv.end() - whole.row_width(), whole.kv.end());
    step.gate.assign(whole.gate.end() - whole.row_width(), whole.gate.end());
    const auto decoded = Pool(step).entries.host();
    EXPECT_EQ(0, std::memcmp(decoded.data(), &entries[entries.size() - width], width * 2)) << ratio;
  }
}
TEST(Compressor, RepeatsBitwiseBesideOtherWork) {
  const Problem p = documents(4, 512, {900, 101});
  Pool pool(p);
  const auto entries = pool.entries.host();
  const auto d_kv = pool.d_kv.host(), d_gate = pool.d_gate.host(), d_ape = pool.d_ape.host();
  OtherWork work;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    pool.entries.poison(), pool.d_kv.poison(), pool.d_gate.poison();
    pool.d_ape.fill(0);
    pool.run();
    ASSERT_TRUE(same_bits(pool.entries.host(), entries) && same_bits(pool.d_kv.host(), d_kv)) << i;
    ASSERT_TRUE(same_bits(pool.d_gate.host(), d_gate) && same_bits(pool.d_ape.host(), d_ape)) << i;
  }
}
TEST(Compressor, KeepsPendingRowsSmall) {
  const auto kv = random_floats(6 * 1024, 1, 1), gate = random_floats(6 * 1024, 1, 2);
  Buffer<float> kvs(kv), gates(gate), pending_kv(std::vector<float>(8 * 1024)),
      pending_gate(std::vector<float>(8 * 1024));
  Buffer<int> from(std::vector<int>{5, 2}), slot(std::vector<int>{0, 7});
  check(keep_pending(kvs.get(), gates.get(), pending_kv.get(), pending_gate.get(), from.get(), slot.get(), 2, 1024,
                     nullptr));
  const auto k = pending_kv.host(), g = pending_gate.host();
  EXPECT_EQ(0, std::memcmp(&k[0], &kv[5 * 1024], 4096));
  EXPECT_EQ(0, std::memcmp(&g[7 * 1024], &gate[2 * 1024], 4096));
  EXPECT_EQ(k[1024], 0);
}

}  // namespace
}  // namespace plumb::kernels
