#include "ops/matmul.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <memory>
#include <new>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/matmul_kernels.h"

namespace plumb::ops {
namespace {

// Memory of one thread that grows to the largest need and stays.
class Scratch {
 public:
  float* get(size_t floats) {
    if (floats > size_) {
      data_.reset(static_cast<float*>(::operator new (floats * sizeof(float), std::align_val_t{64})));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

const MatmulKernels* widest() { return vector_unit_available(VectorUnit::avx512) ? &avx512_kernels : &avx2_kernels; }
std::atomic<const MatmulKernels*> chosen{nullptr};

const MatmulKernels& kernels() {
  const MatmulKernels* k = chosen.load(std::memory_order_relaxed);
  if (!k) chosen.store(k = widest(), std::memory_order_relaxed);
  return *k;
}

// How m rows are cut into groups of nearly equal size, at most `most` each.
struct Groups {
  Groups(int64_t m, int most) : m(m), count((m + most - 1) / most) {}
  int64_t begin(int64_t g) const { return g * m / count; }
  int64_t m, count;
};

// out[k][rows] = A of `rows` neighbouring rows, k0 <= k < k1. May write up to 8 floats past the end.
void interleave_along_k(const float* a, int64_t stride, int rows, int64_t k, float* out) {
  const float* row[8];
  for (int r = 0; r < 8; ++r) row[r] = a + std::min(r, rows - 1) * stride;
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    __m256 v[8];
    for (int r = 0; r < 4; ++r) {  // halves of rows r and r + 4 side by side: what remains is a 4 x 4 transposition
      const auto pair = [&](int64_t at) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[r] + at)), _mm_loadu_ps(row[r + 4] + at),
                                    1);
      };
      v[r] = pair(i), v[r + 4] = pair(i + 4);
    }
    for (int half = 0; half < 2; ++half) {
      const __m256* h = v + 4 * half;
      const __m256 low01 = _mm256_unpacklo_ps(h[0], h[1]), low23 = _mm256_unpacklo_ps(h[2], h[3]);
      const __m256 high01 = _mm256_unpackhi_ps(h[0], h[1]), high23 = _mm256_unpackhi_ps(h[2], h[3]);
      float* o = out + (i + 4 * half) * rows;  // eight lanes are stored, the next k overwrites those past `rows`
      _mm256_storeu_ps(o, _mm256_shuffle_ps(low01, low23, 0x44));
      _mm256_storeu_ps(o + rows, _mm256_shuffle_ps(low01, low23, 0xee));
      _mm256_storeu_ps(o + 2 * rows, _mm256_shuffle_ps(high01, high23, 0x44));
      _mm256_storeu_ps(o + 3 * rows, _mm256_shuffle_ps(high01, high23, 0xee));
    }
  }
  for (; i < k; ++i)
    for (int r = 0; r < rows; ++r) out[i * rows + r] = row[r][i];
}

// The same where neighbouring rows of A lie side by side (A is a matrix read transposed).
void interleave_along_rows(const float* a, int64_t stride, int rows, int64_t k, float* out) {
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(rows), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  for (int64_t i = 0; i < k; ++i) _mm256_storeu_ps(out + i * rows, _mm256_maskload_ps(a + i * stride, mask));
}

void interleave(const RowOperand& a, int64_t m, int rows, int64_t k0, int64_t k1, float* out) {
  const float* source = a.data + m * a.row_stride + k0 * a.k_stride;
  if (a.k_stride == 1) return interleave_along_k(source, a.row_stride, rows, k1 - k0, out);
  if (a.row_stride == 1) return interleave_along_rows(source, a.k_stride, rows, k1 - k0, out);
  for (int64_t k = k0; k < k1; ++k, source += a.k_stride, out += rows)
    for (int r = 0; r < rows; ++r) out[r] = source[r * a.row_stride];
}

struct Panel {
  const float* data;
  int64_t stride;
};
// Weights [k0, k1) of one panel: widened into `scratch`, or in place if they are used once and are what a tile reads.
Panel panel_at(const MatmulKernels& kernel, const PanelOperand& b, int64_t n, int64_t k0, int64_t k1, bool used_once,
               float* scratch) {
  if (used_once && b.format == WeightFormat::f32 && !b.outputs_are_rows)
    return {reinterpret_cast<const float*>(b.data + k0 * b.row_bytes) + n,
            b.row_bytes / static_cast<int64_t>(sizeof(float))};
  kernel.widen(b, n, k0, k1, scratch);
  return {scratch, kernel.lanes};
}

// One tile of c: rows [m0, m1), outputs [n0, n1), all k.
void block(const MatmulKernels& kernel, int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t k, const RowOperand& a,
           const PanelOperand& b, float* c, int64_t ldc, bool accumulate) {
  static thread_local Scratch rows_scratch, panel_scratch;
  const Groups groups(m1 - m0, kernel.rows);
  float* packed = rows_scratch.get((m1 - m0) * kBlockK + 8);
  float* panel = panel_scratch.get(kBlockK * kMaxLanes);
  for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
    const int64_t k1 = std::min(k, k0 + kBlockK);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t first = groups.begin(g);
      interleave(a, m0 + first, static_cast<int>(groups.begin(g + 1) - first), k0, k1, packed + first * (k1 - k0));
    }
    for (int64_t n = n0; n < n1; n += kernel.lanes) {
      const int valid = static_cast<int>(std::min<int64_t>(kernel.lanes, n1 - n));
      const Panel p = panel_at(kernel, b, n, k0, k1, groups.count == 1 && valid == kernel.lanes, panel);
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.begin(g);
        kernel.tile(static_cast<int>(groups.begin(g + 1) - first), packed + first * (k1 - k0), p.data, p.stride,
                    k1 - k0, c + (m0 + first) * ldc + n, ldc, valid, accumulate || k0 > 0);
      }
    }
  }
}

// Rows of a block: its packed rows (kBlockK of them at a time, 192 KiB) stay in the second-level cache, and a widened
// panel is used often enough to pay for widening.
constexpr int64_t kBlockRows = 192;
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which waking a thread costs more than it saves

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

void few_rows(const MatmulKernels& kernel, int64_t m, int64_t n, int64_t k, const RowOperand& a, const PanelOperand& b,
              float* c, int64_t ldc, bool accumulate) {
  const int64_t unit = kernel.lanes / 2 * kStreamLanes, units = (n + unit - 1) / unit;
  const int64_t halves = 2 * int64_t{thread_count()};  // long runs of rows: each unit asks for the weights of the next
  const int64_t grain = std::max((units + halves - 1) / halves, kSerialWork / (2 * unit * k));
  parallel_for(units, grain, [&](int64_t begin, int64_t end) {
    kernel.few_rows(static_cast<int>(m), a.data, a.row_stride, b, begin * unit, std::min(n, end * unit), c, ldc,
                    accumulate);
  });
}

}  // namespace

constexpr E8m0Table make_e8m0_table() {
  E8m0Table t{};
  for (uint32_t code = 1; code < 255; ++code) t.value[code] = std::bit_cast<float>(code << 23);
  t.value[0] = 0x1p-127f;
  t.value[255] = std::numeric_limits<float>::quiet_NaN();
  return t;
}
constinit const E8m0Table e8m0 = make_e8m0_table();

void matmul(int64_t m, const RowOperand& a, const PanelOperand& b, float* c, int64_t ldc, bool accumulate) {
  const int64_t n = b.outputs_are_rows ? b.rows : b.columns, k = b.outputs_are_rows ? b.columns : b.rows;
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (int64_t r = 0; r < m && !accumulate; ++r) std::fill(c + r * ldc, c + r * ldc + n, 0.0f);
    return;
  }
  const MatmulKernels& kernel = kernels();
  if (m <= kFewRows && b.outputs_are_rows && a.k_stride == 1)
    return few_rows(kernel, m, n, k, a, b, c, ldc, accumulate);
  // Several blocks of rows: as many for each thread, unless that makes them so low that widening dominates.
  const int64_t fewest = (m + kBlockRows - 1) / kBlockRows, even = round_up(fewest, thread_count());
  const int64_t blocks = fewest > 1 && m / even >= kBlockRows / 3 ? even : fewest;
  const Groups row_blocks(m, static_cast<int>((m + blocks - 1) / blocks));
  // Blocks across: none to spare for other threads inside a loop, where they would only pack A again.
  const int64_t wanted = inside_parallel_for() ? 1 : std::max<int64_t>(1, 2 * thread_count() / row_blocks.count);
  const int64_t width = std::clamp(round_up((n + wanted - 1) / wanted, kernel.lanes), int64_t{64}, int64_t{512});
  const int64_t across = (n + width - 1) / width, tasks = row_blocks.count * across;
  const int64_t work = (m + 8) * n * k / tasks;
  parallel_for(tasks, std::max<int64_t>(1, kSerialWork / work), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = t / across, first = t % across * width;
      block(kernel, row_blocks.begin(row), row_blocks.begin(row + 1), first, std::min(n, first + width), k, a, b, c,
            ldc, accumulate);
    }
  });
}

PanelOperand panel_of(const Linear& w, bool outputs_are_rows) {
  PanelOperand b{};
  b.data = reinterpret_cast<const uint8_t*>(w.data.raw());
  b.scale = w.scale.defined() ? reinterpret_cast<const uint8_t*>(w.scale.raw()) : nullptr;
  b.scale_stride = w.scale.defined() ? w.scale.size(1) : 0;
  b.row_bytes = w.out == 0 ? 0 : static_cast<int64_t>(w.data.bytes()) / w.out;
  b.format = w.format, b.outputs_are_rows = outputs_are_rows, b.rows = w.out, b.columns = w.in;
  return b;
}

PanelOperand panel_of(const float* x, int64_t ld, int64_t rows, int64_t columns, bool outputs_are_rows) {
  PanelOperand b{};
  b.data = reinterpret_cast<const uint8_t*>(x);
  b.row_bytes = ld * static_cast<int64_t>(sizeof(float));
  b.format = WeightFormat::f32, b.outputs_are_rows = outputs_are_rows, b.rows = rows, b.columns = columns;
  return b;
}

void add_scaled(const float* from, float scale, float* to, int64_t n) {
  const __m256 s = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_add_ps(_mm256_loadu_ps(to + i), _mm256_mul_ps(s, _mm256_loadu_ps(from + i))));
  for (; i < n; ++i) to[i] += scale * from[i];
}

bool vector_unit_available(VectorUnit unit) { return unit == VectorUnit::avx2 || __builtin_cpu_supports("avx512f"); }

void use_vector_unit(VectorUnit unit) {
  if (!vector_unit_available(unit)) fail("matmul", "this machine has no AVX-512", "use avx2");
  chosen = unit == VectorUnit::avx512 ? &avx512_kernels : &avx2_kernels;
}

VectorUnit vector_unit() { return &kernels() == &avx512_kernels ? VectorUnit::avx512 : VectorUnit::avx2; }

}  // namespace plumb::ops
