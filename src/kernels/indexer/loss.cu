// Four kernels. Teacher: the attention's mass on each listed entry; a block has a row's queries in shared memory and
// gathers 64 entries at a time. Student: scores, the loss and its slope d score, then with every score once more
// d_q = P K and d_w, where P[h, i] = d score_i w_h [q_h . k_i > 0]. Keys: d_keys = P^T Q; a block has 64 neighbouring
// entries and walks over the rows of its segment that list any of them; what it needs of P is computed a third time,
// which is cheaper than to keep it (8 M pairs x 64 heads) and needs no additions into memory. The segments' sums are
// added in order.
//
// The rows of a product are those of 16 heads or entries a warp, its columns 64 entries or heads; student and keys are
// the same two products with the operands exchanged.
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/mma.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/loss.h"

namespace plumb::kernels {
namespace index_loss_kernels {
namespace {

using namespace hopper;

constexpr int kTile = kIndexTile, kAttnDim = 512;
constexpr int kThreads = 128, kWarps = kThreads / 32;  // student and keys: 16 rows of a product a warp
constexpr int kTeacherThreads = 256;
constexpr int kSegments = 8;  // of the rows, for d_keys: part of its bits

struct Arguments {
  IndexLoss p;
  float *target, *score;  // [listed]; score becomes d score
  double* row_loss;       // [rows]
  float* parts;           // [kSegments][tiles * kTile][kIndexDim]
  int tiles;
};

// ---- Rows of bf16 in shared memory, 16 bytes further apart than they are long: matrix loads meet no bank twice
// ----------
template <int kWidth>
struct Panel {
  static constexpr int kStride = (kWidth + 8) * 2;  // bytes
  static constexpr int kBytes = kTile * kStride;
  // Fills row i with source(i), those from `count` (at least 1) on with zeros. All kBlock threads take part; copy_wait
  // and a barrier are the caller's.
  template <int kBlock, class Source>
  static __device__ __forceinline__ void fetch(uint32_t start, int rows, int count, const Source& source) {
    constexpr int kPieces = kWidth / 8;
    for (int i = threadIdx.x; i < rows * kPieces; i += kBlock) {
      const bool exists = i / kPieces < count;
      copy16(start + i / kPieces * kStride + i % kPieces * 16, source(exists ? i / kPieces : 0) + i % kPieces * 8,
             exists ? 16 : 0);
    }
    copy_commit();
  }
  // Operand a: 16 rows, 16 columns.
  static __device__ __forceinline__ void rows_of(uint32_t (&a)[4], uint32_t start, int row, int column, int lane) {
    load_matrices(a, start + (row + lane % 16) * kStride + (column + lane / 16 * 8) * 2);
  }
  // Operand b of two products whose columns are 16 rows of the panel, K along the row.
  static __device__ __forceinline__ void as_columns(uint32_t (&b)[4], uint32_t start, int row, int column, int lane) {
    load_matrices(b, start + (row + lane % 8 + lane / 16 * 8) * kStride + (column + lane / 8 % 2 * 8) * 2);
  }
  // Operand b of two products whose columns are 16 columns of the panel, K down the rows.
  static __device__ __forceinline__ void down(uint32_t (&b)[4], uint32_t start, int row, int column, int lane) {
    load_matrices_transposed(b, start + (row + lane % 16) * kStride + (column + lane / 16 * 8) * 2);
  }
};
using IndexPanel = Panel<kIndexDim>;

constexpr int kSteps = kIndexDim / 16;
__device__ __forceinline__ void load_rows(uint32_t (&a)[kSteps][4], uint32_t start, int warp, int lane) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) IndexPanel::rows_of(a[k], start, warp * 16, k * 16, lane);
}
// d = the warp's 16 rows times 64 rows of the panel.
__device__ __forceinline__ void scores_of(float (&d)[kTile / 8][4], const uint32_t (&a)[kSteps][4], uint32_t panel,
                                          int lane) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
      uint32_t b[4];
      IndexPanel::as_columns(b, panel, j * 16, k * 16, lane);
      multiply_16x8(d[2 * j], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
      multiply_16x8(d[2 * j + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
    }
}
// sum += p (16 x 64, rounded to bf16) times the panel (64 x 128).
__device__ __forceinline__ void add_product(float (&sum)[kIndexDim / 8][4], const float (&p)[kTile / 8][4],
                                            uint32_t panel, int lane) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    const uint32_t a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                           pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]), pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < kIndexDim / 16; ++j) {
      uint32_t b[4];
      IndexPanel::down(b, panel, k * 16, j * 16, lane);
      multiply_16x8(sum[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
      multiply_16x8(sum[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}
// Over the rows of a product: all lanes get the sum over the lanes that share their columns.
__device__ __forceinline__ float sum_over_rows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// ---- Teacher
// -----------------------------------------------------------------------------------------------------------
template <int kHeads>
struct Teacher {
  static constexpr int kRowGroups = kHeads / 16;    // warps that share the heads
  static constexpr int kShares = 8 / kRowGroups;    // and the entries of a block
  static constexpr int kColumns = kTile / kShares;  // of a warp
  static constexpr int kQueryBytes = kHeads * Panel<kAttnDim>::kStride;
  static constexpr int kSharedBytes = kQueryBytes + Panel<kAttnDim>::kBytes;
};

template <int kHeads>
__global__ void __launch_bounds__(kTeacherThreads) teacher_kernel(const __grid_constant__ Arguments s) {
  using T = Teacher<kHeads>;
  using P = Panel<kAttnDim>;
  extern __shared__ __align__(16) uint8_t raw[];
  __shared__ float partial[T::kRowGroups][kTile];
  const IndexLoss& p = s.p;
  const int row = blockIdx.x, first = p.begin[row], last = p.begin[row + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % T::kRowGroups;
  const int first_column = warp / T::kRowGroups * T::kColumns;
  const uint32_t queries = shared_address(raw), entries = queries + T::kQueryBytes;
  const uint16_t* q = static_cast<const uint16_t*>(p.attn_q) + static_cast<size_t>(row) * kHeads * kAttnDim;
  const uint16_t* all = static_cast<const uint16_t*>(p.attn_entries);
  if (first == last) return;
  P::fetch<kTeacherThreads>(queries, kHeads, kHeads, [&](int i) { return q + static_cast<size_t>(i) * kAttnDim; });
  constexpr float kLog2e = 1.4426950408889634f;
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    shift[h] = -p.joint_lse[static_cast<size_t>(row) * kHeads + group * 16 + lane / 4 + 8 * h] * kLog2e;
  for (int start = first; start < last; start += kTile) {
    const int count = min(kTile, last - start);
    __syncthreads();
    P::fetch<kTeacherThreads>(entries, kTile, count,
                              [&](int i) { return all + static_cast<size_t>(p.entry[start + i]) * kAttnDim; });
    copy_wait<0>();
    __syncthreads();
    float d[T::kColumns / 8][4] = {};
#pragma unroll 4
    for (int k = 0; k < kAttnDim; k += 16) {
      uint32_t a[4], b[4];
      P::rows_of(a, queries, group * 16, k, lane);
#pragma unroll
      for (int j = 0; j < T::kColumns / 16; ++j) {
        P::as_columns(b, entries, first_column + j * 16, k, lane);
        multiply_16x8(d[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply_16x8(d[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float mass = sum_over_rows(exp2f(fmaf(d[j][b], p.scale * kLog2e, shift[0])) +
                                         exp2f(fmaf(d[j][2 + b], p.scale * kLog2e, shift[1])));
        if (lane < 4) partial[group][first_column + 8 * j + 2 * lane + b] = mass;
      }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) {
      float total = partial[0][threadIdx.x];
#pragma unroll
      for (int g = 1; g < T::kRowGroups; ++g) total += partial[g][threadIdx.x];
      s.target[start + threadIdx.x] = total;
    }
  }
}

// ---- Student
// ----------------------------------------------------------------------------------------------------------- combine
// over all threads of the block, in one tree. shared: [kWarps]; alternate between calls in a row.
template <class T, class Combine>
__device__ __forceinline__ T over_block(T x, T* shared, const Combine& combine) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = combine(x, shared[w]);
  return x;
}

// The loss of a row; its scores become d score. Written by this block before, read after a barrier.
__device__ __forceinline__ double differentiate(const Arguments& s, int first, int last) {
  __shared__ float top_of[kWarps];
  __shared__ double total_of[kWarps], sum_of[kWarps], loss_of[kWarps];
  const auto add = [](double a, double b) { return a + b; };
  float top = -INFINITY;
  double total = 0, sum = 0, loss = 0;
  for (int i = first + threadIdx.x; i < last; i += kThreads)
    top = fmaxf(top, s.score[i]), total += static_cast<double>(s.target[i]);
  top = over_block(top, top_of, [](float a, float b) { return fmaxf(a, b); });
  total = over_block(total, total_of, add);
  for (int i = first + threadIdx.x; i < last; i += kThreads) sum += static_cast<double>(expf(s.score[i] - top));
  sum = over_block(sum, sum_of, add);
  const double logarithm = log(sum), inverse = total > 0 ? 1 / total : total;  // no mass: no loss; NaN stays
  const float mass = total > 0 ? 1.0f : static_cast<float>(total);
  for (int i = first + threadIdx.x; i < last; i += kThreads) {
    const double target = s.target[i] * inverse, student = static_cast<double>(s.score[i] - top) - logarithm;
    loss += target * (log(fmax(target, 1e-10)) - student);
    s.score[i] = s.p.factor * (static_cast<float>(exp(student)) * mass - static_cast<float>(target));
  }
  return over_block(loss, loss_of, add);
}

__global__ void __launch_bounds__(kThreads) student_kernel(const __grid_constant__ Arguments s) {
  extern __shared__ __align__(16) uint8_t raw[];
  __shared__ float partial[kWarps][kTile], slope[kTile];
  const IndexLoss& p = s.p;
  const int row = blockIdx.x, first = p.begin[row], last = p.begin[row + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            own = warp * 16 + lane / 4;  // and own + 8: this lane's heads
  const uint32_t queries = shared_address(raw), keys = queries + IndexPanel::kBytes;
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + static_cast<size_t>(row) * kIndexHeads * kIndexDim;
  const auto fetch_keys = [&](int start, int count) {
    __syncthreads();
    IndexPanel::fetch<kThreads>(keys, kTile, count, [&](int i) {
      return static_cast<const uint16_t*>(p.keys) + static_cast<size_t>(p.entry[start + i]) * kIndexDim;
    });
    copy_wait<0>();
    __syncthreads();
  };
  IndexPanel::fetch<kThreads>(queries, kIndexHeads, kIndexHeads,
                              [&](int i) { return q + static_cast<size_t>(i) * kIndexDim; });
  const float w[2] = {p.w[static_cast<size_t>(row) * kIndexHeads + own],
                      p.w[static_cast<size_t>(row) * kIndexHeads + own + 8]};
  copy_wait<0>();
  __syncthreads();
  uint32_t a[kSteps][4];
  load_rows(a, queries, warp, lane);
  float d[kTile / 8][4];
  for (int start = first; start < last; start += kTile) {
    const int count = min(kTile, last - start);
    fetch_keys(start, count);
    scores_of(d, a, keys, lane);
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float sum = sum_over_rows(fmaf(w[0], fmaxf(d[j][b], 0.f), w[1] * fmaxf(d[j][2 + b], 0.f)));
        if (lane < 4) partial[warp][8 * j + 2 * lane + b] = sum;
      }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count)
      s.score[start + threadIdx.x] =
          (partial[0][threadIdx.x] + partial[1][threadIdx.x]) + (partial[2][threadIdx.x] + partial[3][threadIdx.x]);
  }
  __syncthreads();
  const double loss = first < last ? differentiate(s, first, last) : 0;
  if (threadIdx.x == 0) s.row_loss[row] = loss;

  float d_q[kIndexDim / 8][4] = {}, d_w[2] = {};
  for (int start = first; start < last; start += kTile) {
    const int count = min(kTile, last - start);
    fetch_keys(start, count);  // its first barrier also orders the scores' new values
    if (threadIdx.x < kTile)
      slope[threadIdx.x] = static_cast<int>(threadIdx.x) < count ? s.score[start + threadIdx.x] : 0;
    __syncthreads();
    scores_of(d, a, keys, lane);
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float g = d[j][i] > 0 ? slope[8 * j + 2 * (lane % 4) + i % 2] : 0.f;
        d_w[i / 2] = fmaf(g, d[j][i], d_w[i / 2]);
        d[j][i] = g * w[i / 2];
      }
    add_product(d_q, d, keys, lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    d_w[h] += __shfl_xor_sync(~0u, d_w[h], 1);
    d_w[h] += __shfl_xor_sync(~0u, d_w[h], 2);
    const size_t head = static_cast<size_t>(row) * kIndexHeads + own + 8 * h;
    if (lane % 4 == 0) p.d_w[head] = d_w[h];
    uint32_t* to = static_cast<uint32_t*>(p.d_q) + head * (kIndexDim / 2) + lane % 4;
#pragma unroll
    for (int j = 0; j < kIndexDim / 8; ++j) to[4 * j] = pack_bf16(d_q[j][2 * h], d_q[j][2 * h + 1]);
  }
}

// ---- Keys
// ----------------------------------------------------------------------------------------------------------------
struct Listed {
  int first, last;
};
// Where a row's list reaches `entry`.
__device__ __forceinline__ int lower_bound(const int* list, int first, int last, int entry) {
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (list[middle] < entry)
      first = middle + 1;
    else
      last = middle;
  }
  return first;
}

// Grid: (tiles, kSegments).
__global__ void __launch_bounds__(kThreads) keys_kernel(const __grid_constant__ Arguments s) {
  extern __shared__ __align__(16) uint8_t raw[];
  __shared__ Listed listed[kThreads];
  __shared__ float slope[kTile], weight[kIndexHeads];
  const IndexLoss& p = s.p;
  const int tile = blockIdx.x, first_entry = tile * kTile, entries = min(kTile, p.entries - first_entry);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * 16 + lane / 4;  // and own + 8: entries
  const int segment_rows = (p.rows + kSegments - 1) / kSegments, first_row = blockIdx.y * segment_rows,
            last_row = min(p.rows, first_row + segment_rows);
  const uint32_t keys = shared_address(raw), queries = keys + IndexPanel::kBytes;
  IndexPanel::fetch<kThreads>(keys, kTile, entries, [&](int i) {
    return static_cast<const uint16_t*>(p.keys) + static_cast<size_t>(first_entry + i) * kIndexDim;
  });
  copy_wait<0>();
  __syncthreads();
  uint32_t a[kSteps][4];
  load_rows(a, keys, warp, lane);
  float d_keys[kIndexDim / 8][4] = {};
  for (int base = first_row; base < last_row; base += kThreads) {
    const int mine = base + static_cast<int>(threadIdx.x);
    Listed l{0, 0};
    if (mine < last_row) {
      const int begin = p.begin[mine], end = p.begin[mine + 1];
      l.first = lower_bound(p.entry, begin, end, first_entry);
      l.last = lower_bound(p.entry, l.first, end, first_entry + kTile);
    }
    __syncthreads();
    listed[threadIdx.x] = l;
    __syncthreads();
    for (int i = 0; i < min(kThreads, last_row - base); ++i) {
      const Listed range = listed[i];
      if (range.first == range.last) continue;
      const size_t row = base + i;
      __syncthreads();
      IndexPanel::fetch<kThreads>(queries, kIndexHeads, kIndexHeads, [&](int h) {
        return static_cast<const uint16_t*>(p.q) + (row * kIndexHeads + h) * kIndexDim;
      });
      if (threadIdx.x < kTile) slope[threadIdx.x] = 0, weight[threadIdx.x] = p.w[row * kIndexHeads + threadIdx.x];
      __syncthreads();
      const int at = range.first + static_cast<int>(threadIdx.x);
      if (at < range.last) slope[p.entry[at] - first_entry] = s.score[at];
      copy_wait<0>();
      __syncthreads();
      float d[kTile / 8][4];
      scores_of(d, a, queries, lane);
      const float g[2] = {slope[own], slope[own + 8]};
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) d[j][k] = d[j][k] > 0 ? g[k / 2] * weight[8 * j + 2 * (lane % 4) + k % 2] : 0.f;
      add_product(d_keys, d, queries, lane);
    }
  }
  float* to = s.parts + (static_cast<size_t>(blockIdx.y) * s.tiles + tile) * kTile * kIndexDim + 2 * (lane % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < kIndexDim / 8; ++j)
      *reinterpret_cast<float2*>(to + (own + 8 * h) * kIndexDim + 8 * j) =
          make_float2(d_keys[j][2 * h], d_keys[j][2 * h + 1]);
}

__global__ void __launch_bounds__(256) add_segments_kernel(const __grid_constant__ Arguments s) {
  const size_t i = blockIdx.x * size_t{256} + threadIdx.x;
  if (i >= static_cast<size_t>(s.p.entries) * kIndexDim) return;
  float sum = 0;
#pragma unroll
  for (int segment = 0; segment < kSegments; ++segment)
    sum += s.parts[static_cast<size_t>(segment) * s.tiles * kTile * kIndexDim + i];
  s.p.d_keys[i] = sum;
}

__global__ void __launch_bounds__(kThreads) add_losses_kernel(const double* row_loss, int rows, double* loss) {
  __shared__ double shared[kWarps];
  double sum = 0;
  for (int i = threadIdx.x; i < rows; i += kThreads) sum += row_loss[i];
  sum = over_block(sum, shared, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) *loss = sum;
}

// ---- Host
// ----------------------------------------------------------------------------------------------------------------
int tiles_of(int entries) { return (entries + kTile - 1) / kTile; }
size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

template <class Kernel>
cudaError_t launch(Kernel* kernel, dim3 blocks, int threads, int shared, const Arguments& a, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace
}  // namespace index_loss_kernels

size_t index_loss_workspace(int rows, int entries, int listed) {
  using namespace index_loss_kernels;
  return 2 * padded(sizeof(float) * listed) + padded(sizeof(double) * rows) +
         sizeof(float) * kSegments * tiles_of(entries) * kTile * kIndexDim;
}

cudaError_t index_loss(const IndexLoss& p, cudaStream_t stream) {
  using namespace index_loss_kernels;
  if (p.rows <= 0 || p.entries <= 0 || p.listed < 0 || (p.heads != 64 && p.heads != 128)) return cudaErrorInvalidValue;
  auto* at = static_cast<uint8_t*>(p.workspace);
  const size_t list = padded(sizeof(float) * p.listed), losses = padded(sizeof(double) * p.rows);
  const Arguments a{p,
                    reinterpret_cast<float*>(at),
                    reinterpret_cast<float*>(at + list),
                    reinterpret_cast<double*>(at + 2 * list),
                    reinterpret_cast<float*>(at + 2 * list + losses),
                    tiles_of(p.entries)};
  cudaError_t error = p.heads == 64
                          ? launch(teacher_kernel<64>, p.rows, kTeacherThreads, Teacher<64>::kSharedBytes, a, stream)
                          : launch(teacher_kernel<128>, p.rows, kTeacherThreads, Teacher<128>::kSharedBytes, a, stream);
  if (error != cudaSuccess) return error;
  constexpr int kSharedBytes = 2 * IndexPanel::kBytes;
  error = launch(student_kernel, p.rows, kThreads, kSharedBytes, a, stream);
  if (error != cudaSuccess) return error;
  error = launch(keys_kernel, dim3(a.tiles, kSegments), kThreads, kSharedBytes, a, stream);
  if (error != cudaSuccess) return error;
  const size_t elements = static_cast<size_t>(p.entries) * kIndexDim;
  add_segments_kernel<<<static_cast<unsigned>((elements + 255) / 256), 256, 0, stream>>>(a);
  add_losses_kernel<<<1, kThreads, 0, stream>>>(a.row_loss, p.rows, p.loss);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
