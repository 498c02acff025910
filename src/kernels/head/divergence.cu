// A block has a row of both models' logits, a megabyte at 129,280 tokens: it is read from memory for the sum and from
// L2 for the gradient. Bound by memory; the products around it take most of the time.
#include "kernels/head/divergence.h"

#include <algorithm>
#include <utility>

#include "kernels/device.h"
#include "kernels/hopper/vectors.cuh"
#include "kernels/portable/product.cuh"
#include "kernels/row_linear/wide_product.cuh"

namespace plumb::kernels::head {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Pair {
  const float *student, *teacher;  // logits [rows, vocabulary]
  const Normaliser *student_normaliser, *teacher_normaliser;
  int vocabulary;
};

// Log-probabilities of both.
struct Logarithms {
  float student, teacher;
};

template <Divergence kKind>
__global__ void __launch_bounds__(kThreads) divergence_kernel(const __grid_constant__ Pair p, float* divergence,
                                                              const float* d_divergence, uint16_t* gradient) {
  __shared__ double partial[kWarps];
  const size_t row = blockIdx.x;
  const float4* student = reinterpret_cast<const float4*>(p.student + row * p.vocabulary);
  const float4* teacher = reinterpret_cast<const float4*>(p.teacher + row * p.vocabulary);
  const Normaliser own = p.student_normaliser[row], other = p.teacher_normaliser[row];
  const auto of = [&](float a, float b) {
    return Logarithms{a - own.maximum - own.logarithm, b - other.maximum - other.logarithm};
  };
  double sum = 0;
  const auto add = [&](float a, float b) {
    const Logarithms l = of(a, b);
    const float weight = expf(kKind == Divergence::reverse_kl ? l.student : l.teacher);
    if (weight > 0)  // a token that cannot be: its logarithm may be infinite
      sum += static_cast<double>(weight) *
             static_cast<double>(kKind == Divergence::reverse_kl ? l.student - l.teacher : l.teacher - l.student);
  };
  for (int i = threadIdx.x; i < p.vocabulary / 4; i += kThreads) {
    const float4 a = student[i], b = teacher[i];
    add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w);
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  double total = partial[0];
  for (int w = 1; w < kWarps; ++w) total += partial[w];
  const float value = static_cast<float>(total);
  if (threadIdx.x == 0) divergence[row] = value;
  if (!d_divergence) return;
  const float d = d_divergence[row];
  const auto slope = [&](float a, float b) {
    const Logarithms l = of(a, b);
    const float mine = expf(l.student);
    if (kKind == Divergence::forward_kl) return d * (mine - expf(l.teacher));
    return mine > 0 ? d * mine * (l.student - l.teacher - value) : 0.f;
  };
  uint2* out = reinterpret_cast<uint2*>(gradient + row * p.vocabulary);
  for (int i = threadIdx.x; i < p.vocabulary / 4; i += kThreads) {
    const float4 a = student[i], b = teacher[i];
    out[i] = make_uint2(hopper::pack_bf16(slope(a.x, b.x), slope(a.y, b.y)),
                        hopper::pack_bf16(slope(a.z, b.z), slope(a.w, b.w)));
  }
}

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The pieces of the workspace, one behind the other.
struct Workspace {
  float *student, *teacher;
  Normaliser *student_normaliser, *teacher_normaliser;
  uint16_t* gradient;
  void* of_head;
  size_t bytes;
  Workspace(void* start, int rows, int vocabulary) {
    uintptr_t at = reinterpret_cast<uintptr_t>(start);
    const auto take = [&](size_t size) { return reinterpret_cast<void*>(std::exchange(at, at + padded(size))); };
    const size_t logits = static_cast<size_t>(rows) * vocabulary;
    student = static_cast<float*>(take(4 * logits)), teacher = static_cast<float*>(take(4 * logits));
    student_normaliser = static_cast<Normaliser*>(take(rows * sizeof(Normaliser)));
    teacher_normaliser = static_cast<Normaliser*>(take(rows * sizeof(Normaliser)));
    gradient = static_cast<uint16_t*>(take(2 * logits));
    of_head = take(workspace_bytes(rows, vocabulary));
    bytes = at - reinterpret_cast<uintptr_t>(start);
  }
};

}  // namespace

size_t divergence_workspace_bytes(int chunk_rows, int vocabulary) {
  return Workspace(nullptr, chunk_rows, vocabulary).bytes;
}

void divergence(Divergence kind, const Model& student, const Model& teacher, int rows, int chunk_rows,
                float* divergence, const float* d_divergence, float* d_hidden, void* workspace, cudaStream_t stream) {
  const char* where = "head: divergence";
  const Weight& w = student.weight;
  require(w.vocabulary == teacher.weight.vocabulary, where, "both models must have the same vocabulary");
  require(rows > 0 && chunk_rows > 0, where, "rows and chunk_rows must be positive");
  require(aligned(workspace, 256), where, "the workspace must be aligned to 256 bytes");
  const Workspace space(workspace, std::min(rows, chunk_rows), w.vocabulary);
  for (int first = 0; first < rows; first += chunk_rows) {
    const int n = std::min(chunk_rows, rows - first);
    const auto of = [first](const Model& m) { return m.hidden + static_cast<size_t>(first) * m.weight.width; };
    logits(of(student), n, w, space.student, space.student_normaliser, space.of_head, stream);
    logits(of(teacher), n, teacher.weight, space.teacher, space.teacher_normaliser, space.of_head, stream);
    const Pair pair{space.student, space.teacher, space.student_normaliser, space.teacher_normaliser, w.vocabulary};
    auto* kernel = kind == Divergence::reverse_kl ? divergence_kernel<Divergence::reverse_kl>
                                                  : divergence_kernel<Divergence::forward_kl>;
    kernel<<<n, kThreads, 0, stream>>>(pair, divergence + first, d_divergence ? d_divergence + first : nullptr,
                                       space.gradient);
    check_cuda(cudaGetLastError(), "head: launching the divergence");
    if (!d_divergence) continue;
    float* to = d_hidden + static_cast<size_t>(first) * w.width;
    if (is_hopper())
      wide_product::launch<hopper::kColumnsContracted, hopper::kRowsContracted>(
          space.gradient, w.data, {n, w.width, w.vocabulary}, wide_product::StoreFloats{to, false}, stream);
    else
      portable::product({space.gradient, w.vocabulary, 1, 0}, {w.data, 1, w.width, 0}, n, w.width, w.vocabulary, 1,
                        portable::Store{to, nullptr, w.width, w.width, 0}, stream);
  }
}

}  // namespace plumb::kernels::head
