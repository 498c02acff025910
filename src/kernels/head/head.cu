#include "kernels/head/head.h"

#include <algorithm>

#include "kernels/device.h"
#include "kernels/portable/product.cuh"
#include "kernels/row_linear/narrow_product.cuh"
#include "kernels/row_linear/wide_product.cuh"

namespace plumb::kernels::head {
namespace {

using hopper::kColumnsContracted;
using hopper::kRowsContracted;
using wide_product::kColumns;
using wide_product::Place;
using wide_product::Shape;

constexpr float kNone = -INFINITY;
static_assert(kColumns == kTile);

__device__ __forceinline__ float exponential(float x) {  // relative error 2^-22 where it matters, x <= 0
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, 1.4426950408889634f)));
  return e;
}
// As on the host (ops/head.h): sampling applies it there, to the token that it draws.
__device__ __forceinline__ float log_probability_of(float logit, const Normaliser& n) {
  return __double2float_rn(__dsub_rn(__dsub_rn(logit, n.maximum), n.logarithm));
}
// For gradients, which are rounded to bf16.
__device__ __forceinline__ float probability_of(float logit, const Normaliser& n) {
  return exponential(__fsub_rn(__fsub_rn(logit, n.maximum), n.logarithm));
}

// ---- Forward: what a tile of 256 logits contributes ----------------------------------------------------------------
// (the largest logit, the sum of exp(logit - largest)). A quad of threads has the 256 logits of a row; logit(i, b) is
// column 8 i + b of those from this thread's first on.
template <typename Logit>
__device__ __forceinline__ float2 part_of(const Logit& logit) {
  float largest[2] = {kNone, kNone}, sum[4] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i % 2] = fmaxf(largest[i % 2], logit(i / 2, i % 2));
  float top = fmaxf(largest[0], largest[1]);
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i % 4] = __fadd_rn(sum[i % 4], exponential(__fsub_rn(logit(i / 2, i % 2), top)));
  float total = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
  total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
  return make_float2(top, total);
}

struct Summarise {
  float2* parts;      // [rows, tiles]
  float* logits;      // null: not wanted
  const int* target;  // null: none
  float* target_logit;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    int offset[2] = {-1, -1};  // of the target, counted from this thread's first column
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (target && place.row + 8 * half < s.rows) offset[half] = target[place.row + 8 * half] - place.column;
    if (logits) wide_product::StoreFloats{logits, false}(d, s, place);
    if (place.first_column() + kColumns > s.columns) {  // the last tile may be cut
#pragma unroll
      for (int i = 0; i < 128; ++i)
        if (place.column + i / 4 * 8 >= s.columns) d[i] = kNone;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      const float2 part = part_of([&](int i, int b) { return d[4 * i + 2 * half + b]; });
      if (row >= s.rows) continue;
      if (place.lane % 4 == 0) parts[static_cast<size_t>(row) * s.column_tiles() + place.column / kColumns] = part;
      if (offset[half] >= 0 && offset[half] < kColumns && offset[half] % 8 < 2) {
#pragma unroll
        for (int i = 0; i < 64; ++i)
          if (offset[half] == i / 2 * 8 + i % 2) target_logit[row] = d[i / 2 * 4 + 2 * half + i % 2];
      }
    }
  }
};

// The same from logits in memory. Grid: (tiles / 8, rows); a quad a tile.
__global__ void __launch_bounds__(32) summarise_kernel(const float* logits, int vocabulary, int tiles, float2* parts) {
  const int tile = blockIdx.x * 8 + threadIdx.x / 4, column = tile * kColumns + threadIdx.x % 4 * 2;
  const float* row = logits + static_cast<size_t>(blockIdx.y) * vocabulary;
  float v[64];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const bool exists = column + 8 * i < vocabulary;
    const float2 pair = exists ? *reinterpret_cast<const float2*>(row + column + 8 * i) : make_float2(kNone, kNone);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
  const float2 part = part_of([&](int i, int b) { return v[2 * i + b]; });
  if (threadIdx.x % 4 == 0 && tile < tiles) parts[static_cast<size_t>(blockIdx.y) * tiles + tile] = part;
}

// A warp a row. Lane l takes parts l, l + 32, ...; the lanes' sums are added in a fixed tree.
__global__ void __launch_bounds__(256)
    combine_kernel(const float2* parts, int rows, int vocabulary, int tiles, const int* target,
                   const float* target_logit, float* log_probability, Normaliser* normaliser) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  parts += static_cast<size_t>(row) * tiles;
  float largest = kNone;
  for (int i = lane; i < tiles; i += 32) largest = fmaxf(largest, parts[i].x);
#pragma unroll
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  double sum = 0;
  for (int i = lane; i < tiles; i += 32)
    sum += static_cast<double>(__fmul_rn(parts[i].y, exponential(__fsub_rn(parts[i].x, largest))));
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane != 0) return;
  const Normaliser n{largest, static_cast<float>(log(sum))};
  normaliser[row] = n;
  if (target) {
    const bool exists = target[row] >= 0 && target[row] < vocabulary;
    log_probability[row] = exists ? log_probability_of(target_logit[row], n) : NAN;
  }
}

// Of logits in memory: target_logit[row] = that of its target, if there is one.
__global__ void pick_kernel(const float* logits, int rows, int vocabulary, const int* target, float* target_logit) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows && target[row] >= 0 && target[row] < vocabulary)
    target_logit[row] = logits[static_cast<size_t>(row) * vocabulary + target[row]];
}

// ---- Backward: logits become gradients in the epilogue -------------------------------------------------------------
struct Differentiate {
  const float* d_log_probability;
  const int* target;
  const Normaliser* normaliser;
  uint16_t* gradient;  // bf16 [rows, vocabulary]
  static __device__ __forceinline__ float of(float logit, bool is_target, float factor, const Normaliser& n) {
    return __fmul_rn(factor, __fsub_rn(is_target ? 1.0f : 0.0f, probability_of(logit, n)));
  }
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    float factor[2];
    Normaliser n[2];
    int offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(place.row + 8 * half, s.rows - 1);
      factor[half] = d_log_probability[row], n[half] = normaliser[row], offset[half] = target[row] - place.column;
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      const int half = i / 2 % 2;
      d[i] = of(d[i], offset[half] == i / 4 * 8 + i % 2, factor[half], n[half]);
    }
    wide_product::write_bf16_rows(d, s, place, gradient);
  }
};
struct DifferentiateOne {
  Differentiate p;
  int vocabulary;
  __device__ __forceinline__ void operator()(int, int row, int column, float logit) const {
    p.gradient[static_cast<size_t>(row) * vocabulary + column] = portable::to_bf16(
        Differentiate::of(logit, column == p.target[row], p.d_log_probability[row], p.normaliser[row]));
  }
};

// ---- Host ----------------------------------------------------------------------------------------------------------
// Rows that a portable pass has logits of at a time, which it needs even if nobody wants them.
constexpr int kPortableRows = 256;
int tiles_of(int vocabulary) { return (vocabulary + kColumns - 1) / kColumns; }
size_t target_bytes(int rows) { return (static_cast<size_t>(rows) * sizeof(float) + 15) / 16 * 16; }
size_t parts_bytes(int rows, int tiles) { return (static_cast<size_t>(rows) * tiles * sizeof(float2) + 15) / 16 * 16; }

struct Workspace {
  float2* parts;           // [rows, tiles]; first, where `best` looks for them
  float* target_logit;     // [rows]
  float* portable_logits;  // [min(rows, kPortableRows), vocabulary]
};
Workspace workspace_of(void* workspace, int rows, int tiles) {
  auto* parts = static_cast<uint8_t*>(workspace);
  uint8_t *targets = parts + parts_bytes(rows, tiles), *logits = targets + target_bytes(rows);
  return {reinterpret_cast<float2*>(parts), reinterpret_cast<float*>(targets), reinterpret_cast<float*>(logits)};
}

void check(const char* where, const uint16_t* hidden, int rows, const Weight& w, const void* workspace) {
  require(rows > 0, where, "rows = " + std::to_string(rows) + " must be positive (skip the head when there are none)");
  require(w.vocabulary > 0 && w.vocabulary % 8 == 0 && w.width > 0 && w.width % 8 == 0, where,
          "the weight [" + std::to_string(w.vocabulary) + ", " + std::to_string(w.width) +
              "] must have positive multiples of 8: pad it with zeros");
  require(aligned(w.data, 16) && aligned(hidden, 16) && aligned(workspace, 16), where,
          "hidden rows, weight and workspace must be aligned to 16 bytes");
}

// Parts of all rows, their logits if wanted, and the logits of their targets if there are any.
void summarise_portable(const uint16_t* hidden, int rows, const Weight& w, const int* target, float* logits,
                        const Workspace& space, cudaStream_t stream) {
  const int tiles = tiles_of(w.vocabulary), chunk = std::min(rows, kPortableRows);
  for (int first = 0; first < rows; first += chunk) {
    const int n = std::min(chunk, rows - first);
    float* to = logits ? logits + static_cast<size_t>(first) * w.vocabulary : space.portable_logits;
    portable::product({hidden + static_cast<size_t>(first) * w.width, w.width, 1, 0}, {w.data, w.width, 1, 0}, n,
                      w.vocabulary, w.width, 1, portable::Store{to, nullptr, w.vocabulary, w.vocabulary, 0}, stream);
    summarise_kernel<<<dim3((tiles + 7) / 8, n), 32, 0, stream>>>(to, w.vocabulary, tiles,
                                                                  space.parts + static_cast<size_t>(first) * tiles);
    if (target)
      pick_kernel<<<(n + 255) / 256, 256, 0, stream>>>(to, n, w.vocabulary, target + first, space.target_logit + first);
  }
}

void forward(const uint16_t* hidden, int rows, const Weight& w, const int* target, float* log_probability,
             float* logits, Normaliser* normaliser, void* workspace, cudaStream_t stream) {
  const int tiles = tiles_of(w.vocabulary);
  const Workspace space = workspace_of(workspace, rows, tiles);
  if (!is_hopper()) {
    summarise_portable(hidden, rows, w, target, logits, space, stream);
  } else if (logits && rows <= narrow_product::kMostRows) {  // bound by reading the weight; the bits are the same
    narrow_product::launch(hidden, w.data, {rows, w.vocabulary, w.width, w.vocabulary},
                           narrow_product::Store<float>{logits}, stream);
    summarise_kernel<<<dim3((tiles + 7) / 8, rows), 32, 0, stream>>>(logits, w.vocabulary, tiles, space.parts);
  } else {
    wide_product::launch<kColumnsContracted, kColumnsContracted>(
        hidden, w.data, {rows, w.vocabulary, w.width}, Summarise{space.parts, logits, target, space.target_logit},
        stream);
  }
  combine_kernel<<<(rows + 7) / 8, 256, 0, stream>>>(space.parts, rows, w.vocabulary, tiles, target, space.target_logit,
                                                     log_probability, normaliser);
  check_cuda(cudaGetLastError(), "head: launching the combination");
}

}  // namespace

size_t workspace_bytes(int rows, int vocabulary) {
  const size_t portable =
      is_hopper() ? 0 : static_cast<size_t>(std::min(rows, kPortableRows)) * vocabulary * sizeof(float);
  return parts_bytes(rows, tiles_of(vocabulary)) + target_bytes(rows) + portable;
}

void log_probabilities(const uint16_t* hidden, int rows, const Weight& weight, const int* target,
                       float* log_probability, Normaliser* normaliser, void* workspace, cudaStream_t stream) {
  check("head: log_probabilities", hidden, rows, weight, workspace);
  forward(hidden, rows, weight, target, log_probability, nullptr, normaliser, workspace, stream);
}

void logits(const uint16_t* hidden, int rows, const Weight& weight, float* logits, Normaliser* normaliser,
            void* workspace, cudaStream_t stream) {
  check("head: logits", hidden, rows, weight, workspace);
  require(aligned(logits, 8), "head: logits", "the logits must be aligned to 8 bytes");
  forward(hidden, rows, weight, nullptr, nullptr, logits, normaliser, workspace, stream);
}

size_t backward_workspace_bytes(int chunk_rows, int vocabulary) {
  return static_cast<size_t>(chunk_rows) * vocabulary * sizeof(uint16_t);
}

void log_probabilities_backward(const float* d_log_probability, const uint16_t* hidden, int rows, const Weight& w,
                                const int* target, const Normaliser* normaliser, int chunk_rows, float* d_hidden,
                                float* d_weight, void* workspace, cudaStream_t stream) {
  check("head: log_probabilities_backward", hidden, rows, w, workspace);
  require(chunk_rows > 0, "head: log_probabilities_backward", "chunk_rows must be positive");
  auto* gradient = static_cast<uint16_t*>(workspace);
  for (int first = 0; first < rows; first += chunk_rows) {
    const int n = std::min(chunk_rows, rows - first);
    const uint16_t* x = hidden + static_cast<size_t>(first) * w.width;
    const Differentiate differentiate{d_log_probability + first, target + first, normaliser + first, gradient};
    if (!is_hopper()) {
      const int64_t vocabulary = w.vocabulary, width = w.width;
      portable::product({x, width, 1, 0}, {w.data, width, 1, 0}, n, w.vocabulary, w.width, 1,
                        DifferentiateOne{differentiate, w.vocabulary}, stream);
      portable::product({gradient, vocabulary, 1, 0}, {w.data, 1, width, 0}, n, w.width, w.vocabulary, 1,
                        portable::Store{d_hidden + first * width, nullptr, w.width, width, 0}, stream);
      if (d_weight)
        portable::product({gradient, 1, vocabulary, 0}, {x, 1, width, 0}, w.vocabulary, w.width, n, 1,
                          portable::Store{d_weight, nullptr, w.width, width, 0, true}, stream);
      continue;
    }
    wide_product::launch<kColumnsContracted, kColumnsContracted>(x, w.data, {n, w.vocabulary, w.width}, differentiate,
                                                                 stream);
    wide_product::launch<kColumnsContracted, kRowsContracted>(
        gradient, w.data, {n, w.width, w.vocabulary},
        wide_product::StoreFloats{d_hidden + static_cast<size_t>(first) * w.width, false}, stream);
    if (d_weight)  // rows are contracted: gradient and x as they lie
      wide_product::launch<kRowsContracted, kRowsContracted>(gradient, x, {w.vocabulary, w.width, n},
                                                             wide_product::StoreFloats{d_weight, true}, stream);
  }
}

}  // namespace plumb::kernels::head
