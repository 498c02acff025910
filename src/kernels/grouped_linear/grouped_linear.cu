#include "kernels/grouped_linear/grouped_linear.h"

#include <algorithm>

#include "kernels/device.h"
#include "kernels/grouped_linear/plan.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/launch.cuh"
#include "kernels/portable/grouped_linear.h"

namespace plumb::kernels::grouped_linear {
namespace {

void require(bool condition, const std::string& message) { kernels::require(condition, "grouped_linear", message); }
void check_sizes(int groups, int rows, int n, int width) {
  require(groups > 0 && rows > 0, "groups = " + std::to_string(groups) + " and rows = " + std::to_string(rows) +
                                      " must be positive (skip the product when there are no rows)");
  require(n > 0 && n % kRecordRows == 0,
          "n = " + std::to_string(n) + " is no multiple of 256: pad the weight with zero rows before it is packed");
  require(width == 8 || width == 16 || width == 64 || width == kWideRows,
          "width = " + std::to_string(width) + " is none of 8, 16, 64, 256: use best_width");
}

void check_low_rank(const lora::LowRank& l) {
  require(l.rank >= 0 && l.rank % 4 == 0 && l.t_stride % 4 == 0 && l.t_stride >= l.rank,
          "a low rank of " + std::to_string(l.rank) + " must be a multiple of 4, its rows at least as long");
  require(l.rank == 0 || (aligned(l.t, 16) && l.factor), "low-rank rows must be aligned to 16 bytes, factors be given");
}

void check_product(const Weights& w, const Activations& a, const Plan& plan) {
  check_sizes(plan.groups, plan.rows, plan.n, plan.width);
  require(w.k > 0 && w.k % kBlock == 0,
          "k = " + std::to_string(w.k) + " is no multiple of 128: pad inputs and weight with zeros");
  require(w.groups == plan.groups && w.n == plan.n && a.rows == plan.rows,
          "the plan is for " + std::to_string(plan.groups) + " groups, " + std::to_string(plan.rows) +
              " rows, n = " + std::to_string(plan.n) + "; the product has " + std::to_string(w.groups) + ", " +
              std::to_string(a.rows) + ", " + std::to_string(w.n));
  require(aligned(w.records, 128) && aligned(a.values, 128),
          "records and activation values must be aligned to 128 bytes");
  require(aligned(w.bases, 16) && aligned(a.scales, 16),
          "weight bases and activation scales must be aligned to 16 bytes");
  require(aligned(plan.workspace, 256), "the plan's workspace must be aligned to 256 bytes");
}

// One block a group: counts the row tiles of the groups before it, then lists its own.
__global__ void __launch_bounds__(256) plan_kernel(const int* first_row, int width, int record_rows, Workspace out) {
  __shared__ int sums[8];
  hopper::take_turn();
  const int group = blockIdx.x, thread = threadIdx.x;
  const auto row_tiles_of = [&](int g) { return (first_row[g + 1] - first_row[g] + width - 1) / width; };
  int before = 0;
  for (int g = thread; g < group; g += 256) before += row_tiles_of(g);
  before = __reduce_add_sync(~0u, before);
  if (thread % 32 == 0) sums[thread / 32] = before;
  __syncthreads();
  before = 0;
  for (int w = 0; w < 8; ++w) before += sums[w];

  const int first = first_row[group], rows = first_row[group + 1] - first;
  list_tiles({group, first, rows, width, record_rows}, thread, 256, out.record_tiles + before * record_rows);
  if (width == kWideRows)
    list_tiles({group, first, rows, width, 2 * record_rows}, thread, 256, out.block_tiles + before * 2 * record_rows);
  if (group == static_cast<int>(gridDim.x) - 1 && thread == 0) {
    const int count = (before + row_tiles_of(group)) * record_rows;
    out.counters[0] = count, out.counters[1] = 2 * count;
  }
}

void launch_product(const Weights& w, const Activations& a, const Plan& plan, Epilogue epilogue, Problem p,
                    cudaStream_t stream) {
  check_low_rank(p.low_rank);
  const Workspace space = workspace_of(plan);
  p.records = w.records, p.bases = w.bases, p.token_scales = a.scales;
  const bool wide = plan.width == kWideRows, blocks_of_128 = is_hopper() && wide && epilogue == Epilogue::bf16;
  p.tiles = blocks_of_128 ? space.block_tiles : space.record_tiles;
  p.tile_count = space.counters + (blocks_of_128 ? 1 : 0);
  p.queue = space.counters + 2, p.stash = space.stash, p.settled = plan.settled;
  p.n = w.n, p.k_blocks = w.k / kBlock;
  p.block_stride = block_stride(w.k), p.hidden_stride = block_stride(w.n / 2);
  const int64_t tiles = (blocks_of_128 ? 2 : 1) * tile_capacity(plan.groups, plan.rows, plan.n, plan.width);
  if (!is_hopper()) return launch_portable(w.format, epilogue, plan.width, tiles, a.values, p, stream);
  if (!wide) return launch_narrow(plan.width, w, a, epilogue, tiles, p, stream);
  const CUtensorMap tokens = hopper::byte_matrix_map(a.values, a.rows, w.k, kWideTokenBox);
  const CUtensorMap scales = hopper::float_matrix_map(a.scales, a.rows, p.block_stride, kWideRows, kWideScaleBox);
  launch_wide(w.format, epilogue, tiles, multiprocessors(), tokens, scales, p, stream);
}

}  // namespace

int best_width(int rows, int groups) {
  const double mean = static_cast<double>(rows) / groups;
  if (groups == 1) return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 64 ? 64 : kWideRows;
  return mean <= 4 ? 8 : mean <= 12 ? 16 : mean <= 48 ? 64 : kWideRows;
}

size_t plan_bytes(int groups, int rows, int n, int width) {
  check_sizes(groups, rows, n, width);
  return kCounterBytes + stash_bytes(width) +
         (width == kWideRows ? 3 : 1) * static_cast<size_t>(tile_capacity(groups, rows, n, width)) * sizeof(Tile);
}

void make_plan(const int* first_row, const Plan& plan, cudaStream_t stream) {
  check_sizes(plan.groups, plan.rows, plan.n, plan.width);
  require(first_row && aligned(plan.workspace, 256),
          "first_row is missing or the workspace is not aligned to 256 bytes");
  launch_dependent(plan_kernel, {static_cast<unsigned>(plan.groups), 256}, stream, first_row, plan.width,
                   plan.n / kRecordRows, workspace_of(plan));
}

void linear(const Weights& weights, const Activations& activations, const Plan& plan, uint16_t* out,
            cudaStream_t stream, const lora::LowRank& low_rank) {
  check_product(weights, activations, plan);
  require(aligned(out, 16), "out must be aligned to 16 bytes");
  Problem p{};
  p.out = out, p.low_rank = low_rank;
  launch_product(weights, activations, plan, Epilogue::bf16, p, stream);
}

void linear_swiglu(const Weights& weights, const Activations& activations, const Plan& plan, const float* route_weight,
                   float limit, uint8_t* hidden, float* hidden_scales, cudaStream_t stream,
                   const lora::LowRank& low_rank) {
  check_product(weights, activations, plan);
  require(aligned(hidden, 16) && hidden_scales, "hidden must be aligned to 16 bytes and hidden_scales be given");
  Problem p{};
  p.hidden = hidden, p.hidden_scales = hidden_scales, p.route_weight = route_weight;
  p.low_rank = low_rank;
  p.limit = limit > 0 ? limit : std::numeric_limits<float>::infinity();
  launch_product(weights, activations, plan, Epilogue::swiglu, p, stream);
}

void linear_backward_input(const Weights& w, const uint16_t* dy, const Plan& plan, uint16_t* dx, cudaStream_t stream,
                           const lora::LowRank& low_rank) {
  check_sizes(plan.groups, plan.rows, plan.n, plan.width);
  require(w.groups == plan.groups && w.k == plan.n && plan.width == kWideRows,
          "the plan of an input gradient has the weight's groups (" + std::to_string(w.groups) +
              "), n = the weight's k (" + std::to_string(w.k) + ") and width 256");
  require(w.n > 0 && w.n % kRecordRows == 0, "n = " + std::to_string(w.n) + " is no multiple of 256");
  require(aligned(w.records, 128) && aligned(dy, 16) && aligned(dx, 16) && aligned(plan.workspace, 256),
          "records must be aligned to 128 bytes, dy and dx to 16, the plan's workspace to 256");
  check_low_rank(low_rank);
  const Workspace space = workspace_of(plan);
  Problem p{};
  p.records = w.records, p.bases = w.bases;
  p.tiles = space.block_tiles, p.tile_count = space.counters + 1, p.queue = space.counters + 2;
  p.n = w.n, p.k_blocks = w.k / kBlock, p.block_stride = block_stride(w.k);
  p.out = dx, p.low_rank = low_rank;
  const int64_t tiles = tile_capacity(plan.groups, plan.rows, plan.n, plan.width);
  if (!is_hopper()) {
    p.tiles = space.record_tiles, p.tile_count = space.counters;
    return launch_portable_backward_input(w.format, tiles, dy, p, stream);
  }
  const CUtensorMap map = hopper::matrix_map(dy, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, plan.rows, w.n, kWideTokenBox, 64,
                                             CU_TENSOR_MAP_SWIZZLE_128B);
  launch_backward_input(w.format, 2 * tiles, multiprocessors(), map, p, stream);
}

}  // namespace plumb::kernels::grouped_linear
