// Exact top-k: a radix select over a row's scores for the smallest one that is taken, then one sweep in order of
// position that takes what is above it and, from the left, as many of its equals as are left over. One block a row.
#include <algorithm>

#include "kernels/indexer/indexer.h"
#include "kernels/launch.cuh"

namespace plumb::kernels {
namespace indexer {
namespace {

constexpr int kBins = 2048;
constexpr int kFewRows = 128;  // that do not fill the GPU: a block of twice as many threads each
// Rows with more columns, or more than fit beside the rest, are read from memory in every pass.
constexpr int kSharedColumns = 32768;

struct Arguments {
  const float* scores;
  IndexGroupsDevice groups;
  const int* out_begin;
  int* out;
  int first_row, group_rows, columns, topk, out_offset;
};

// Orders as the score does; invisible entries lie below everything, NaN beside minus infinity.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x007fffffu;
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

template <int kThreads>
struct Shared {
  static constexpr int kWarps = kThreads / 32;
  int bins[kBins];
  int warp_sum[kWarps];
  int warp_equal[kWarps];
  int digit, left;  // the threshold's digit, and how many of its bin are still to be taken
};

// Finds the bin in which the `wanted`-th largest lies. All threads get its number; `wanted` becomes its rank inside.
template <int kThreads>
__device__ __forceinline__ int find_bin(Shared<kThreads>& s, int& wanted) {
  constexpr int kBinsPerThread = kBins / kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int own = 0;  // of this thread's bins, numbered from the top
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) own += s.bins[kBins - 1 - (threadIdx.x * kBinsPerThread + i)];
  int upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) s.warp_sum[warp] = upto;
  __syncthreads();
  for (int w = 0; w < warp; ++w) upto += s.warp_sum[w];
  int before = upto - own;
  if (before < wanted && wanted <= upto) {
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int bin = kBins - 1 - (static_cast<int>(threadIdx.x) * kBinsPerThread + i), count = s.bins[bin];
      if (before + count >= wanted) {
        s.digit = bin, s.left = wanted - before;
        break;
      }
      before += count;
    }
  }
  __syncthreads();
  wanted = s.left;
  return s.digit;
}

template <int kThreads, bool kInShared>
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ uint32_t kept[];  // keys, with kInShared
  __shared__ Shared<kThreads> s;
  constexpr int kWarps = kThreads / 32;
  const int row = p.first_row + blockIdx.x, group = row / p.group_rows, member = row % p.group_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_tile = __ldg(p.groups.tile_begin + group);
  const int tiles = __ldg(p.groups.tile_begin + group + 1) - first_tile, columns = tiles * kIndexTile;
  const int seen = __ldg(p.groups.visible_count + row);
  const bool all = seen <= p.topk;
  if (seen == 0) return;
  const float* scores = p.scores + static_cast<size_t>(blockIdx.x) * p.columns;
  const auto visible = [&](int column) {
    return __ldg(p.groups.visible + static_cast<size_t>(first_tile + column / kIndexTile) * p.group_rows + member) >>
               (column % kIndexTile) &
           1;
  };
  const auto fresh_key = [&](int column) { return visible(column) ? key_of(scores[column]) : 0u; };
  const auto key = [&](int column) { return kInShared ? kept[column] : fresh_key(column); };

  uint32_t threshold = 0;
  int equals = 0;  // of the threshold that are taken
  if (!all) {
    equals = p.topk;
    constexpr int kShift[3] = {21, 10, 0};
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
      __syncthreads();
      const int shift = kShift[pass], above = pass == 0 ? 31 : kShift[pass - 1];
#pragma unroll 4
      for (int column = threadIdx.x; column < columns; column += kThreads) {
        const uint32_t k = pass == 0 ? fresh_key(column) : key(column);
        if (kInShared && pass == 0) kept[column] = k;
        if (k != 0 && (pass == 0 || (k ^ threshold) >> above == 0))
          atomicAdd(&s.bins[k >> shift & (above == 10 ? 1023 : 2047)], 1);
      }
      __syncthreads();
      threshold |= static_cast<uint32_t>(find_bin(s, equals)) << shift;
    }
  }

  // Each warp has a run of whole 32-column steps.
  const int steps = columns / 32, first_step = steps * warp / kWarps, last_step = steps * (warp + 1) / kWarps;
  int greater = 0, equal = 0;
  for (int step = first_step; step < last_step; ++step) {
    const int column = step * 32 + lane;
    const uint32_t k = all ? (visible(column) ? 2u : 0u) : key(column);
    greater += __popc(__ballot_sync(~0u, all ? k > 0 : k > threshold));
    if (!all) equal += __popc(__ballot_sync(~0u, k == threshold));
  }
  if (lane == 0) s.warp_sum[warp] = greater, s.warp_equal[warp] = equal;
  __syncthreads();
  int greater_before = 0, equal_before = 0;
  for (int w = 0; w < warp; ++w) greater_before += s.warp_sum[w], equal_before += s.warp_equal[w];
  int taken = greater_before + min(equal_before, equals);
  int* out = p.out + __ldg(p.out_begin + row);
  const uint32_t before = (1u << lane) - 1;
  for (int step = first_step; step < last_step; ++step) {
    const int column = step * 32 + lane;
    const uint32_t k = all ? (visible(column) ? 2u : 0u) : key(column);
    const uint32_t same = __ballot_sync(~0u, !all && k == threshold);
    const bool take = all ? k > 0 : k > threshold || (k == threshold && equal_before + __popc(same & before) < equals);
    const uint32_t takes = __ballot_sync(~0u, take);
    if (take)
      out[taken + __popc(takes & before)] =
          __ldg(p.groups.tile_first + first_tile + column / kIndexTile) + column % kIndexTile + p.out_offset;
    taken += __popc(takes), equal_before += __popc(same);
  }
}

cudaError_t launch_select(const IndexSelection& s, int first_group, int last_group, int columns, const float* scores,
                          cudaStream_t stream) {
  const int group_rows = s.groups->group_rows, first_row = first_group * group_rows;
  const int rows = std::min(s.groups->rows, last_group * group_rows) - first_row;
  const Arguments a{scores, s.device, s.out_begin, s.out, first_row, group_rows, columns, s.topk, s.out_offset};
  const int most = std::min(kSharedColumns, (shared_memory_limit() - static_cast<int>(sizeof(Shared<512>))) / 4);
  if (columns > most) {
    select_kernel<512, false><<<rows, 512, 0, stream>>>(a);
    return cudaGetLastError();
  }
  const auto launch = [&](auto* kernel, int threads) {
    const int bytes = columns * 4;  // the limit is the same in all calls: a recorded launch keeps relying on it
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most * 4);
    if (error != cudaSuccess) return error;
    kernel<<<rows, threads, bytes, stream>>>(a);
    return cudaGetLastError();
  };
  return rows <= kFewRows ? launch(select_kernel<512, true>, 512) : launch(select_kernel<256, true>, 256);
}

// ---- Groups, on the host ----
using Ranges = std::vector<IndexRange>;

// Whether one list of ranges is the other one, cut off somewhere: what rows of one sequence see.
bool same_path(const Ranges& a, const Ranges& b) {
  const size_t common = std::min(a.size(), b.size());
  for (size_t i = 0; i < common; ++i) {
    const bool a_ends = i + 1 == a.size(), b_ends = i + 1 == b.size();
    if (a[i].first != b[i].first || (!a_ends && b[i].last > a[i].last) || (!b_ends && a[i].last > b[i].last) ||
        (!a_ends && !b_ends && a[i].last != b[i].last))
      return false;
  }
  return true;
}
const Ranges& longer(const Ranges& a, const Ranges& b) {
  if (a.size() != b.size()) return a.size() > b.size() ? a : b;
  return a.empty() || a.back().last > b.back().last ? a : b;
}

Ranges ranges_of(const std::vector<int>& begin, const std::vector<IndexRange>& range, int row) {
  Ranges ranges(range.begin() + begin[row], range.begin() + begin[row + 1]);
  std::erase_if(ranges, [](const IndexRange& r) { return r.first == r.last; });
  return ranges;
}

// Appends the tiles of rows first .. last - 1, which are on one path: those of `most`, the ranges of the row that sees
// most, in its order, so that columns are in order of position wherever the entries lie.
void add_path(IndexGroups& g, const std::vector<Ranges>& rows, int first, int last, int group_begin,
              const Ranges& most) {
  std::vector<int> tile_of;  // of each range
  for (const IndexRange& r : most) {
    tile_of.push_back(static_cast<int>(g.tile_first.size()));
    for (int entry = r.first; entry < r.last; entry += kIndexTile) g.tile_first.push_back(entry);
  }
  g.visible.resize(g.tile_first.size() * g.group_rows, 0);
  for (int row = first; row < last; ++row) {
    const Ranges& ranges = rows[row - group_begin];
    for (size_t i = 0; i < ranges.size(); ++i) {
      g.visible_count[row] += ranges[i].last - ranges[i].first;
      for (int entry = ranges[i].first, tile = tile_of[i]; entry < ranges[i].last; entry += kIndexTile, ++tile) {
        const int count = std::min(ranges[i].last - entry, kIndexTile);
        g.visible[static_cast<size_t>(tile) * g.group_rows + row - group_begin] = ~uint64_t{0} >> (64 - count);
      }
    }
  }
}

IndexGroups make_groups(const std::vector<int>& begin, const std::vector<IndexRange>& range, int group_rows) {
  IndexGroups g;
  g.rows = static_cast<int>(begin.size()) - 1;
  g.group_rows = group_rows;
  g.visible_count.assign(g.rows, 0);
  g.tile_begin.push_back(0);
  for (int first = 0; first < g.rows; first += group_rows) {
    const int last = std::min(g.rows, first + group_rows);
    std::vector<Ranges> rows;
    for (int row = first; row < last; ++row) rows.push_back(ranges_of(begin, range, row));
    for (int path = first; path < last;) {
      const Ranges* most = &rows[path - first];
      int end = path + 1;
      for (; end < last && same_path(*most, rows[end - first]); ++end) most = &longer(*most, rows[end - first]);
      add_path(g, rows, path, end, first, *most);
      path = end;
    }
    g.tile_begin.push_back(static_cast<int>(g.tile_first.size()));
  }
  return g;
}

int columns_of(const IndexGroups& g, int group) { return (g.tile_begin[group + 1] - g.tile_begin[group]) * kIndexTile; }

// The groups from first_group on whose scores fit into `bytes` together (at least one), and their columns.
int groups_that_fit(const IndexGroups& g, int first_group, size_t bytes, int& columns) {
  const int groups = static_cast<int>(g.tile_begin.size()) - 1;
  columns = columns_of(g, first_group);
  int last = first_group + 1;
  for (; last < groups; ++last) {
    const int wider = std::max(columns, columns_of(g, last));
    if (sizeof(float) * wider * g.group_rows * (last + 1 - first_group) > bytes) break;
    columns = wider;
  }
  return last;
}

}  // namespace
}  // namespace indexer

IndexGroups make_index_groups(const std::vector<int>& begin, const std::vector<IndexRange>& range, int group_rows) {
  if (group_rows != 0) return indexer::make_groups(begin, range, group_rows);
  IndexGroups eight = indexer::make_groups(begin, range, 8), one = indexer::make_groups(begin, range, 1);
  // Tiles are computed for all rows of a group; one row at a time keeps the tensor cores half as busy.
  return eight.tile_first.size() * 8 <= one.tile_first.size() * 2 ? eight : one;
}

size_t index_workspace(const IndexGroups& g, size_t limit) {
  size_t most = 0;
  for (int group = 0; group + 1 < static_cast<int>(g.tile_begin.size());) {
    int columns;
    const int last = indexer::groups_that_fit(g, group, limit, columns);
    most = std::max(most, sizeof(float) * columns * g.group_rows * (last - group));
    group = last;
  }
  return most;
}

cudaError_t select_entries(const IndexSelection& s, cudaStream_t stream) {
  using namespace indexer;
  const IndexGroups& g = *s.groups;
  if (s.topk <= 0) return cudaErrorInvalidValue;
  for (int group = 0; group + 1 < static_cast<int>(g.tile_begin.size());) {
    int columns;
    const int last = groups_that_fit(g, group, s.workspace_bytes, columns);
    if (sizeof(float) * columns * g.group_rows * (last - group) > s.workspace_bytes) return cudaErrorInvalidValue;
    const bool scored = std::any_of(g.visible_count.begin() + group * g.group_rows,
                                    g.visible_count.begin() + std::min(g.rows, last * g.group_rows),
                                    [&](int count) { return count > s.topk; });
    float* scores = static_cast<float*>(s.workspace);
    if (scored)
      if (const cudaError_t error = index_scores(s, group, last - group, columns, scores, stream); error != cudaSuccess)
        return error;
    if (const cudaError_t error = launch_select(s, group, last, columns, scores, stream); error != cudaSuccess)
      return error;
    group = last;
  }
  return cudaSuccess;
}

}  // namespace plumb::kernels
