// Products with packed weights for any GPU: weights are unpacked one at a time, by the formulas of weight_format.h, as
// they enter a tile. Work lists are those of the other kernels (make_plan): a block has a tile of 256 weight rows times
// some activation rows of a group.
#include <cuda_fp8.h>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/portable/grouped_linear.h"
#include "kernels/portable/product.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

using portable::kFewRows;
using portable::kThreads;
using portable::kTile;
constexpr int kWarps = kThreads / 32;
constexpr int kSwigluRows = 32;  // of a tile whose gates and ups are in shared memory

__device__ __forceinline__ float from_e4m3(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
// The place that holds k of 128: k_of_place turned round.
__device__ __forceinline__ int place_of_k(int k) { return k / 8 % 4 * 32 + k / 4 % 2 * 16 + k / 32 * 4 + k % 4; }

// The e4m3 number at a row and a place of an FP4 record. Its word is that of the thread and index for which code_word
// names this row and, of the places, `place` or the one 16 before it.
__device__ __forceinline__ uint8_t expand_code(const uint8_t* record, int row, int place) {
  const int slab = row / kSlabRows, r = row % kSlabRows, quad = place / 4 % 4;
  const int thread = r / 16 * 32 + r % 8 * 4 + quad, index = place / 32 * 2 + r / 8 % 2;
  const uint32_t word =
      *reinterpret_cast<const uint32_t*>(record + slab * kSlabCodeBytes + code_word(thread, index).byte);
  const MagnitudeTable table =
      magnitude_table(record[4 * kSlabCodeBytes + slab * kSlabOffsetBytes + offset_byte(r, quad)]);
  const uint32_t four = place % 32 < 16 ? expand_first(table, word) : expand_second(table, word);
  return static_cast<uint8_t>(four >> 8 * (place % 4));
}

// The weights of a group. Values are exact: e4m3 times a power of two.
struct Group {
  const uint8_t* records;
  const float* bases;
  WeightFormat format;
  int k_blocks, block_stride;
  __device__ __forceinline__ float at(int n, int k_block, int place) const {
    const uint8_t* record =
        records + (static_cast<size_t>(n / kRecordRows) * k_blocks + k_block) * record_bytes(format);
    const int row = n % kRecordRows;
    const uint8_t code =
        format == WeightFormat::fp4 ? expand_code(record, row, place) : record[swizzled_byte(row, place)];
    return from_e4m3(code) * bases[static_cast<size_t>(n / kBlock) * block_stride + k_block];
  }
};
__device__ __forceinline__ Group group_of(const Problem& p, WeightFormat format, int group) {
  const size_t records = static_cast<size_t>(p.n / kRecordRows) * p.k_blocks;
  return {p.records + group * records * record_bytes(format),
          p.bases + static_cast<size_t>(group) * (p.n / kBlock) * p.block_stride, format, p.k_blocks, p.block_stride};
}

// Sums of kRows activation rows from first_row on and kTile weight rows from first_n on, K in the order of places.
template <int kRows, typename Store>
__device__ __forceinline__ void multiply(const Problem& p, const uint8_t* tokens, const Group& w, int first_row,
                                         int rows, int first_n, const Store& store) {
  const int k = p.k_blocks * kBlock;
  portable::product_tile<kRows>(
      k,
      [&](int i, int l) {
        const size_t row = first_row + i;
        return i < rows ? from_e4m3(tokens[row * k + l]) * p.token_scales[row * p.block_stride + l / kBlock] : 0.f;
      },
      [&](int j, int l) { return w.at(first_n + j, l / kBlock, l % kBlock); }, store);
}
// The low rank added, rounded.
__device__ __forceinline__ uint16_t finish(const Problem& p, float sum, int group, int row, int n) {
  return portable::to_bf16(portable::add_low_rank(sum, p.low_rank, row, {group, p.n, n}));
}

// Grid: (tiles of the list, 256 / kTile).
template <int kRows>
__global__ void __launch_bounds__(kThreads) linear_kernel(const Problem p, const uint8_t* tokens, WeightFormat format) {
  if (static_cast<int>(blockIdx.x) >= *p.tile_count) return;
  const Tile tile = p.tiles[blockIdx.x];
  const Group w = group_of(p, format, tile.group);
  const int first_n = tile.weight_tile * kRecordRows + blockIdx.y * kTile;
  for (int done = 0; done < tile.rows; done += kRows) {
    const int first_row = tile.first_row + done, rows = tile.rows - done;
    multiply<kRows>(p, tokens, w, first_row, rows, first_n, [&](int i, int j, float sum) {
      if (i < rows)
        p.out[static_cast<size_t>(first_row + i) * p.n + first_n + j] =
            finish(p, sum, tile.group, first_row + i, first_n + j);
    });
  }
}

// Grid: tiles of the list. Gates and ups of a record meet in shared memory.
template <int kRows>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const Problem p, const uint8_t* tokens, WeightFormat format) {
  __shared__ __align__(16) uint16_t gate_up[kRows][kRecordRows];
  if (static_cast<int>(blockIdx.x) >= *p.tile_count) return;
  const Tile tile = p.tiles[blockIdx.x];
  const Group w = group_of(p, format, tile.group);
  const int lane = threadIdx.x % 32;
  for (int done = 0; done < tile.rows; done += kRows) {
    const int first_row = tile.first_row + done, rows = min(kRows, tile.rows - done);
    for (int first = 0; first < kRecordRows; first += kTile) {
      const int first_n = tile.weight_tile * kRecordRows + first;
      multiply<kRows>(p, tokens, w, first_row, rows, first_n, [&](int i, int j, float sum) {
        if (i < rows) gate_up[i][first + j] = finish(p, sum, tile.group, first_row + i, first_n + j);
      });
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < rows; i += kWarps) {
      const size_t row = first_row + i;
      const uint2 h = swiglu_record(gate_up[i], lane, p.limit, p.route_weight ? p.route_weight[row] : 1.f);
      const float scale = quantise_block(h.x, h.y, p.hidden + row * (p.n / 2) + tile.weight_tile * kBlock);
      if (lane == 0) p.hidden_scales[row * p.hidden_stride + tile.weight_tile] = scale;
    }
  }
}

// The contracted rows of the weight in order. Grid: as linear_kernel, weight tiles are 256 of K.
__global__ void __launch_bounds__(kThreads)
    backward_input_kernel(const Problem p, const uint16_t* dy, WeightFormat format) {
  if (static_cast<int>(blockIdx.x) >= *p.tile_count) return;
  const Tile tile = p.tiles[blockIdx.x];
  const Group w = group_of(p, format, tile.group);
  const int k = p.k_blocks * kBlock, first_k = tile.weight_tile * kRecordRows + blockIdx.y * kTile;
  for (int done = 0; done < tile.rows; done += kTile) {
    const int first_row = tile.first_row + done, rows = tile.rows - done;
    portable::product_tile<kTile>(
        p.n,
        [&](int i, int n) {
          return i < rows ? portable::from_bf16(dy[static_cast<size_t>(first_row + i) * p.n + n]) : 0.f;
        },
        [&](int j, int n) { return w.at(n, (first_k + j) / kBlock, place_of_k((first_k + j) % kBlock)); },
        [&](int i, int j, float sum) {
          if (i >= rows) return;
          sum = portable::add_low_rank(sum, p.low_rank, first_row + i, {tile.group, k, first_k + j});
          p.out[static_cast<size_t>(first_row + i) * k + first_k + j] = portable::to_bf16(sum);
        });
  }
}

}  // namespace

void launch_portable(WeightFormat format, Epilogue epilogue, int width, int64_t tiles, const uint8_t* tokens,
                     const Problem& p, cudaStream_t stream) {
  const auto count = static_cast<unsigned>(tiles);
  const bool few = width <= kFewRows;
  const auto launch = [&](auto* kernel, dim3 blocks) { kernel<<<blocks, kThreads, 0, stream>>>(p, tokens, format); };
  if (epilogue == Epilogue::swiglu)
    launch(few ? swiglu_kernel<kFewRows> : swiglu_kernel<kSwigluRows>, count);
  else
    launch(few ? linear_kernel<kFewRows> : linear_kernel<kTile>, dim3(count, kRecordRows / kTile));
  check_cuda(cudaGetLastError(), "grouped_linear: launching a portable product");
}

void launch_portable_backward_input(WeightFormat format, int64_t tiles, const uint16_t* dy, const Problem& p,
                                    cudaStream_t stream) {
  backward_input_kernel<<<dim3(static_cast<unsigned>(tiles), kRecordRows / kTile), kThreads, 0, stream>>>(p, dy,
                                                                                                          format);
  check_cuda(cudaGetLastError(), "grouped_linear: launching a portable input gradient");
}

}  // namespace plumb::kernels::grouped_linear
