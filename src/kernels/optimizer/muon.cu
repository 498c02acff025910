#include "kernels/optimizer/muon.h"

#include <algorithm>

#include "kernels/device.h"
#include "kernels/hopper/numbers.cuh"
#include "kernels/portable/product.cuh"
#include "kernels/row_linear/wide_product.cuh"

namespace plumb::kernels::optimizer {
namespace {

using hopper::kColumnsContracted;
using hopper::kRowsContracted;
using wide_product::Place;
using wide_product::Shape;

// ---- Epilogues of the three products of a step. Matrices are bf16 [batch, rows, columns] ----------------------------
__device__ __forceinline__ size_t first_of(const Shape& s, const Place& place) {
  return static_cast<size_t>(place.matrix) * s.rows * s.columns;
}
// d = own * d + other * what lies there.
__device__ __forceinline__ void combine(float (&d)[128], const Shape& s, const Place& place, float own, float other,
                                        const uint16_t* there) {
  there += first_of(s, place);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int row = place.row + i % 2 * 8, column = place.column + i / 2 * 8;
    if (row >= s.rows || column >= s.columns) continue;
    const uint32_t pair =
        __ldg(reinterpret_cast<const uint32_t*>(there + static_cast<size_t>(row) * s.columns + column));
    d[2 * i] = fmaf(other, low_bf16(pair), __fmul_rn(own, d[2 * i]));
    d[2 * i + 1] = fmaf(other, high_bf16(pair), __fmul_rn(own, d[2 * i + 1]));
  }
}
// The tile, and its mirror image if it lies below the diagonal.
__device__ __forceinline__ void store_symmetric(const float (&d)[128], const Shape& s, const Place& place,
                                                uint16_t* out) {
  out += first_of(s, place);
  wide_product::write_bf16_rows(d, s, place, out);
  if (place.tile_row > place.first_column()) wide_product::write_bf16_columns(d, s, place, out);
}

struct StoreGram {  // X X^T or X^T X
  uint16_t* out;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    store_symmetric(d, s, place, out);
  }
};
struct StorePolynomial {  // b G + c G^2
  float b, c;
  const uint16_t* gram;
  uint16_t* out;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    combine(d, s, place, c, b, gram);
    store_symmetric(d, s, place, out);
  }
};
struct StoreNext {  // a X + the product
  float a;
  const uint16_t* x;
  uint16_t* out;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    combine(d, s, place, 1, a, x);
    wide_product::write_bf16_rows(d, s, place, out + first_of(s, place));
  }
};

// The three of them for portable products: own * sum + other * what lies there, which may be nothing.
struct StoreOne {
  float own, other;
  const uint16_t* there;
  uint16_t* out;
  int columns;
  size_t size;  // of a matrix
  __device__ __forceinline__ void operator()(int matrix, int row, int column, float sum) const {
    const size_t at = matrix * size + static_cast<size_t>(row) * columns + column;
    if (there) sum = fmaf(other, portable::from_bf16(there[at]), __fmul_rn(own, sum));
    out[at] = portable::to_bf16(sum);
  }
};

struct Coefficients {
  float a, b, c;
};

void newton_schulz_step_portable(const Coefficients& k, const uint16_t* x, uint16_t* next, uint16_t* gram,
                                 uint16_t* polynomial, int count, int rows, int columns, cudaStream_t stream) {
  const bool tall = rows > columns;
  const int64_t side = std::min(rows, columns), length = std::max(rows, columns), size = side * length;
  const portable::Operand across =
                              tall ? portable::Operand{x, 1, columns, size} : portable::Operand{x, columns, 1, size},
                          along =
                              tall ? portable::Operand{x, columns, 1, size} : portable::Operand{x, 1, columns, size};
  const portable::Operand square{gram, side, 1, side * side}, mixed{polynomial, side, 1, side * side};
  const int s = static_cast<int>(side), l = static_cast<int>(length);
  const size_t square_size = side * side;
  portable::product(across, across, s, s, l, count, StoreOne{1, 0, nullptr, gram, s, square_size}, stream);
  portable::product(square, square, s, s, s, count, StoreOne{k.c, k.b, gram, polynomial, s, square_size}, stream);
  const StoreOne store{1, k.a, x, next, columns, static_cast<size_t>(size)};
  if (tall)
    portable::product(along, mixed, rows, columns, s, count, store, stream);
  else
    portable::product(mixed, along, rows, columns, s, count, store, stream);
}

// The smaller side is that of the Gram matrix: rows of a wide matrix, columns of a tall one.
void newton_schulz_step(const Coefficients& k, const uint16_t* x, uint16_t* next, uint16_t* gram, uint16_t* polynomial,
                        int count, int rows, int columns, cudaStream_t stream) {
  if (!is_hopper()) return newton_schulz_step_portable(k, x, next, gram, polynomial, count, rows, columns, stream);
  using wide_product::launch;
  const bool tall = rows > columns;
  const int side = std::min(rows, columns), length = std::max(rows, columns);
  Shape square{side, side, length};
  square.batch = count, square.symmetric = true;
  if (tall)
    launch<kRowsContracted, kRowsContracted>(x, x, square, StoreGram{gram}, stream);
  else
    launch<kColumnsContracted, kColumnsContracted>(x, x, square, StoreGram{gram}, stream);
  square.k = side;
  launch<kColumnsContracted, kColumnsContracted>(gram, gram, square, StorePolynomial{k.b, k.c, gram, polynomial},
                                                 stream);
  Shape whole{rows, columns, side};
  whole.batch = count;
  const StoreNext store{k.a, x, next};
  if (tall)
    launch<kColumnsContracted, kColumnsContracted>(x, polynomial, whole, store, stream);
  else
    launch<kColumnsContracted, kRowsContracted>(polynomial, x, whole, store, stream);
}

// ---- What surrounds them --------------------------------------------------------------------------------------------
constexpr int kThreads = 256, kPiece = 8192;  // elements of a block

struct Scale {
  double gradient, largest_norm;
  const double* norm;
  __device__ __forceinline__ double operator()() const {
    return largest_norm > 0 && *norm > largest_norm ? gradient * (largest_norm / *norm) : gradient;
  }
};
// Nesterov's look ahead, from the momentum after its step.
__device__ __forceinline__ double ahead(double mu, float momentum, double gradient) {
  return fma(mu, static_cast<double>(momentum), gradient);
}

// Grid: (pieces, matrices). Moves the momentum; sums[matrix, piece] = squares of what lies ahead of it.
__global__ void __launch_bounds__(kThreads)
    momentum_kernel(const float* gradient, float* momentum, size_t size, double mu, Scale scale_of, double* sums) {
  __shared__ double of_warp[kThreads / 32];
  const size_t first = blockIdx.y * size, piece = size_t{blockIdx.x} * kPiece;
  const double scale = scale_of();
  double sum = 0;
  for (size_t i = piece + 4 * threadIdx.x; i < min(piece + kPiece, size); i += 4 * kThreads) {
    const float4 g = *reinterpret_cast<const float4*>(gradient + first + i);
    float4 m = *reinterpret_cast<float4*>(momentum + first + i);
    const auto move = [&](float& m_i, float g_i) {
      const double scaled = scale * g_i;
      m_i = static_cast<float>(fma(mu, static_cast<double>(m_i), scaled));
      const double v = ahead(mu, m_i, scaled);
      sum = fma(v, v, sum);
    };
    move(m.x, g.x), move(m.y, g.y), move(m.z, g.z), move(m.w, g.w);
    *reinterpret_cast<float4*>(momentum + first + i) = m;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (const double v : of_warp) sum += v;
  sums[blockIdx.y * size_t{gridDim.x} + blockIdx.x] = sum;
}

// A block a matrix: inverse[matrix] = 1 / its Frobenius norm, 0 for a zero matrix. Pieces are added in order.
__global__ void inverse_norm_kernel(const double* sums, int pieces, double* inverse) {
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (int i = 0; i < pieces; ++i) sum += sums[static_cast<size_t>(blockIdx.x) * pieces + i];
  inverse[blockIdx.x] = sum > 0 ? 1 / sqrt(sum) : 0;
}

__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const float* gradient, const float* momentum, size_t size, double mu, Scale scale_of,
                     const double* inverse, uint16_t* x) {
  const size_t first = blockIdx.y * size, piece = size_t{blockIdx.x} * kPiece;
  const double scale = scale_of(), factor = inverse[blockIdx.y];
  for (size_t i = piece + 4 * threadIdx.x; i < min(piece + kPiece, size); i += 4 * kThreads) {
    const float4 g = *reinterpret_cast<const float4*>(gradient + first + i);
    const float4 m = *reinterpret_cast<const float4*>(momentum + first + i);
    const auto value = [&](float m_i, float g_i) { return static_cast<float>(ahead(mu, m_i, scale * g_i) * factor); };
    *reinterpret_cast<uint2*>(x + first + i) = make_uint2(hopper::pack_bf16(value(m.x, g.x), value(m.y, g.y)),
                                                          hopper::pack_bf16(value(m.z, g.z), value(m.w, g.w)));
  }
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(float* weight, const uint16_t* direction, size_t count, double keep, double rate) {
  const size_t piece = size_t{blockIdx.x} * kPiece;
  for (size_t i = piece + 4 * threadIdx.x; i < min(piece + kPiece, count); i += 4 * kThreads) {
    float4 w = *reinterpret_cast<float4*>(weight + i);
    const uint2 o = *reinterpret_cast<const uint2*>(direction + i);
    const auto moved = [&](float w_i, float o_i) { return static_cast<float>(w_i * keep - rate * o_i); };
    w = make_float4(moved(w.x, low_bf16(o.x)), moved(w.y, high_bf16(o.x)), moved(w.z, low_bf16(o.y)),
                    moved(w.w, high_bf16(o.y)));
    *reinterpret_cast<float4*>(weight + i) = w;
  }
}

// ---- Host ----------------------------------------------------------------------------------------------------------
struct Workspace {
  uint16_t *x, *next, *gram, *polynomial;
  double *sums, *inverse;
  size_t bytes;
};
unsigned pieces_of_matrix(size_t size) { return static_cast<unsigned>((size + kPiece - 1) / kPiece); }
Workspace workspace_of(void* memory, const Matrices& m, int at_once) {
  const size_t size = static_cast<size_t>(m.rows) * m.columns, side = std::min(m.rows, m.columns);
  auto* at = static_cast<uint8_t*>(memory);
  Workspace w{};
  const auto take = [&](auto*& to, size_t count) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(at + w.bytes);
    w.bytes += (count * sizeof(*to) + 255) / 256 * 256;
  };
  take(w.x, at_once * size), take(w.next, at_once * size);
  take(w.gram, at_once * side * side), take(w.polynomial, at_once * side * side);
  take(w.sums, static_cast<size_t>(at_once) * pieces_of_matrix(size)), take(w.inverse, at_once);
  return w;
}
void check(const char* where, int count, int rows, int columns) {
  require(count > 0 && rows > 0 && rows % 64 == 0 && columns > 0 && columns % 8 == 0, where,
          std::to_string(count) + " matrices [" + std::to_string(rows) + ", " + std::to_string(columns) +
              "]: rows must be a multiple of 64, columns of 8 (pad with zeros)");
}

}  // namespace

void newton_schulz(uint16_t* x, uint16_t* scratch, uint16_t* gram, uint16_t* polynomial, int count, int rows,
                   int columns, cudaStream_t stream) {
  check("optimizer: newton_schulz", count, rows, columns);
  for (const uint16_t* p : {x, scratch, gram, polynomial})
    require(aligned(p, 16), "optimizer: newton_schulz", "all arrays must be aligned to 16 bytes");
  constexpr int kSteps = 10, kLifting = 8;  // even: the last result is in x
  for (int step = 0; step < kSteps; ++step) {
    const Coefficients k = step < kLifting ? Coefficients{3.4445f, -4.7750f, 2.0315f} : Coefficients{2, -1.5f, 0.5f};
    newton_schulz_step(k, x, scratch, gram, polynomial, count, rows, columns, stream);
    std::swap(x, scratch);
  }
}

size_t muon_bytes(const Matrices& m, int at_once) { return workspace_of(nullptr, m, std::min(at_once, m.count)).bytes; }

void muon(const Matrices& m, const Muon& o, const double* norm, int at_once, void* workspace, cudaStream_t stream) {
  const char* where = "optimizer: muon";
  check(where, m.count, m.rows, m.columns);
  require(at_once > 0 && aligned(workspace, 16), where, "at_once must be positive, the workspace aligned to 16 bytes");
  for (const float* p : {m.weight, m.gradient, m.momentum})
    require(aligned(p, 16), where, "weights, gradients and momenta must be aligned to 16 bytes");
  require(o.largest_norm <= 0 || norm, where, "clipping needs the norm");
  const size_t size = static_cast<size_t>(m.rows) * m.columns;
  const Workspace w = workspace_of(workspace, m, std::min(at_once, m.count));
  const Scale scale{o.gradient_scale, o.largest_norm, norm};
  const double keep = 1 - o.learning_rate * o.weight_decay,
               rate = o.learning_rate * 0.18 * std::sqrt(static_cast<double>(std::max(m.rows, m.columns)));
  for (int first = 0; first < m.count; first += at_once) {
    const int count = std::min(at_once, m.count - first);
    const dim3 grid(pieces_of_matrix(size), count);
    const size_t at = first * size;
    momentum_kernel<<<grid, kThreads, 0, stream>>>(m.gradient + at, m.momentum + at, size, o.momentum, scale, w.sums);
    inverse_norm_kernel<<<count, 32, 0, stream>>>(w.sums, grid.x, w.inverse);
    normalise_kernel<<<grid, kThreads, 0, stream>>>(m.gradient + at, m.momentum + at, size, o.momentum, scale,
                                                    w.inverse, w.x);
    check_cuda(cudaGetLastError(), where);
    newton_schulz(w.x, w.next, w.gram, w.polynomial, count, m.rows, m.columns, stream);
    update_kernel<<<pieces_of_matrix(count * size), kThreads, 0, stream>>>(m.weight + at, w.x, count * size, keep,
                                                                           rate);
    check_cuda(cudaGetLastError(), where);
  }
}

}  // namespace plumb::kernels::optimizer
