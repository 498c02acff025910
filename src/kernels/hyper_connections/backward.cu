// Backward of a boundary, in four passes over a token's streams (docs/kernels/hyper_connections.md counts their bytes):
//   post_backward_kernel         d_out and the gradients of post and comb: twenty dot products a token
//   normed_input_backward_kernel the gradients of pre, through norm and contraction: ten sums a token
//   coefficient_backward_kernel  from these to the mapping's outputs, through sigmoid and Sinkhorn: a thread a token
//   streams_backward_kernel      d_streams; the mapping's transpose on tensor cores
// and, where the mapping is trained, fn_gradient.cu.
#include <algorithm>

#include "kernels/hopper/code.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/backward_parts.cuh"
#include "kernels/hyper_connections/coefficients.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels {
namespace hyper {
namespace {

struct PostArguments {
  const uint8_t *d_next, *streams, *out;
  const float* finished;
  uint8_t* d_out;
  float* d_coefficients;
  int width;
};

// One block a token; its threads walk over the channels, eight at a time.
__global__ void __launch_bounds__(kThreads) post_backward_kernel(const __grid_constant__ PostArguments p) {
  constexpr int kDots = 20;  // post, comb
  __shared__ float partial[kWarps][kDots];
  const size_t row = blockIdx.x, stream_bytes = static_cast<size_t>(p.width) * 2;
  const float4 post = __ldg(reinterpret_cast<const float4*>(p.finished + row * kHyperOutputs + 4));
  float dots[kDots] = {};
  for (int channel = threadIdx.x * 8; channel < p.width; channel += kThreads * 8) {
    const size_t at = row * stream_bytes * kHyperStreams + channel * 2;
    uint4 d_word[4], h_word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      d_word[j] = *reinterpret_cast<const uint4*>(p.d_next + at + j * stream_bytes);
      h_word[j] = *reinterpret_cast<const uint4*>(p.streams + at + j * stream_bytes);
    }
    const uint4 out_word = *reinterpret_cast<const uint4*>(p.out + row * stream_bytes + channel * 2);
    float d_out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float d[4], h[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t dw = word_of(d_word[j], i / 2), hw = word_of(h_word[j], i / 2);
        d[j] = i % 2 ? high_bf16(dw) : low_bf16(dw), h[j] = i % 2 ? high_bf16(hw) : low_bf16(hw);
      }
      const uint32_t ow = word_of(out_word, i / 2);
      const float out = i % 2 ? high_bf16(ow) : low_bf16(ow);
      d_out[i] = fmaf(post.w, d[3], fmaf(post.z, d[2], fmaf(post.y, d[1], post.x * d[0])));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        dots[k] = fmaf(d[k], out, dots[k]);
#pragma unroll
        for (int j = 0; j < 4; ++j) dots[4 + 4 * j + k] = fmaf(d[k], h[j], dots[4 + 4 * j + k]);
      }
    }
    *reinterpret_cast<uint4*>(p.d_out + row * stream_bytes + channel * 2) = pack(d_out);
  }
  warp_sums(dots, partial[threadIdx.x / 32]);
  __syncthreads();
  if (threadIdx.x < kDots)
    p.d_coefficients[row * kHyperOutputs + 4 + threadIdx.x] = block_sum<kWarps>(&partial[0][0], kDots, threadIdx.x);
}

struct NormedInputArguments {
  const uint8_t *streams, *d_x;
  const float *coefficients, *norm_weight;
  float* d_coefficients;
  Record* records;
  float rms_eps;
  int width, outputs;
};

// With g = norm_weight d_x and d_y = rho (g - slope y): d_pre_j = d_y . h_j = rho (g . h_j - slope y . h_j).
__global__ void __launch_bounds__(kThreads)
    normed_input_backward_kernel(const __grid_constant__ NormedInputArguments p) {
  constexpr int kDots = 10;  // y y, g y, four g h_j, four y h_j
  __shared__ float partial[kWarps][kDots];
  const size_t row = blockIdx.x, stream_bytes = static_cast<size_t>(p.width) * 2;
  const float4 pre = __ldg(reinterpret_cast<const float4*>(p.coefficients + row * kHyperOutputs));
  float dots[kDots] = {};
#pragma unroll 2
  for (int channel = threadIdx.x * 8; channel < p.width; channel += kThreads * 8) {
    float h[4][8], g[8], w[8], y[8];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      unpack(__ldcs(reinterpret_cast<const uint4*>(p.streams + (row * kHyperStreams + j) * stream_bytes + channel * 2)),
             h[j]);
    unpack(*reinterpret_cast<const uint4*>(p.d_x + row * stream_bytes + channel * 2), g);
    load_eight(p.norm_weight + channel, w);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      y[i] = fmaf(pre.w, h[3][i], fmaf(pre.z, h[2][i], fmaf(pre.y, h[1][i], pre.x * h[0][i])));
    unpack(pack(y), y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] *= w[i];
      dots[0] = fmaf(y[i], y[i], dots[0]);
      dots[1] = fmaf(g[i], y[i], dots[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dots[2 + j] = fmaf(g[i], h[j][i], dots[2 + j]);
        dots[6 + j] = fmaf(y[i], h[j][i], dots[6 + j]);
      }
    }
  }
  warp_sums(dots, partial[threadIdx.x / 32]);
  __syncthreads();
  if (p.outputs == kHyperStreams && kHyperStreams <= threadIdx.x && threadIdx.x < kHyperOutputs)
    p.d_coefficients[row * kHyperOutputs + threadIdx.x] = 0;  // the head has no others
  if (threadIdx.x >= kHyperStreams) return;
  const float* sums = &partial[0][0];
  const float rho = inverse_rms(block_sum<kWarps>(sums, kDots, 0), p.width, p.rms_eps);
  const float slope = block_sum<kWarps>(sums, kDots, 1) * rho * rho / static_cast<float>(p.width);
  const int j = threadIdx.x;
  p.d_coefficients[row * kHyperOutputs + j] =
      rho * (block_sum<kWarps>(sums, kDots, 2 + j) - slope * block_sum<kWarps>(sums, kDots, 6 + j));
  if (j == 0) p.records[row].norm_rho = rho, p.records[row].slope = slope, p.records[row].padding = 0;
}

constexpr int kGradientTokens = 64;
constexpr int kScalarSums = 2 * kHyperOutputs;  // over tokens: d_logit, d_logit * mix

struct CoefficientGradients {
  HyperMapping map;
  const float *coefficients, *mix, *rho, *d_coefficients;
  Record* records;  // norm_rho and slope are there already
  float* scalar;    // [blocks][kScalarSums] or null
  int rows, width;
};

__global__ void __launch_bounds__(kGradientTokens)
    coefficient_backward_kernel(const __grid_constant__ CoefficientGradients p) {
  extern __shared__ __align__(16) float4 divisors[];  // [steps][kGradientTokens]
  __shared__ float scalar[kScalarSums][kGradientTokens + 1];
  const int row = blockIdx.x * kGradientTokens + threadIdx.x;
  const bool head = p.map.outputs == kHyperStreams;
  float d_logit[kHyperOutputs] = {}, mix[kHyperOutputs] = {};
  if (row < p.rows) {
    const size_t at = static_cast<size_t>(row) * kHyperOutputs;
    float c[kHyperOutputs], d[kHyperOutputs];
    load_outputs(p.mix + at, mix);
    load_outputs(p.coefficients + at, c);
    load_outputs(p.d_coefficients + at, d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float s = c[j] - p.map.hc_eps;
      d_logit[j] = d[j] * s * (1 - s);
      if (!head) d_logit[4 + j] = d[4 + j] * c[4 + j] * (1 - c[4 + j] / 2);
    }
    if (!head) {
      Matrix m = comb_logits(mix, p.map), slope;
      Matrix soft = m;
      row_softmax(soft);
      sinkhorn(m, p.map.sinkhorn_iterations, p.map.hc_eps, [&](int t, const float(&sum)[4]) {
        divisors[t * kGradientTokens + threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      });
#pragma unroll
      for (int i = 0; i < 16; ++i) slope.c[i / 4][i % 4] = d[8 + i];
      for (int t = 2 * p.map.sinkhorn_iterations - 2; t >= 0; --t) {
        const float4 v = divisors[t * kGradientTokens + threadIdx.x];
        const float sum[4] = {v.x, v.y, v.z, v.w};
        t % 2 == 0 ? normalise_backward<false>(m, slope, sum) : normalise_backward<true>(m, slope, sum);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float along = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) along = fmaf(slope.c[i][j], soft.c[i][j], along);
#pragma unroll
        for (int j = 0; j < 4; ++j) d_logit[8 + 4 * i + j] = soft.c[i][j] * (slope.c[i][j] - along);
      }
    }
    const float rho = p.rho[row];
    Record& record = p.records[row];
    float along = 0, scaled[kHyperOutputs];
#pragma unroll
    for (int i = 0; i < kHyperOutputs; ++i) {
      const int part = i < 4 ? 0 : i < 8 ? 1 : 2;
      const float d_mix = head && i >= 4 ? 0.f : d_logit[i] * __ldg(p.map.scale + part);
      along = fmaf(d_mix, mix[i], along);
      scaled[i] = rho * d_mix;
    }
    store_outputs(scaled, record.mix);
    record.factor = -along * rho * rho / static_cast<float>(kHyperStreams * p.width);
  }
  if (p.scalar == nullptr) return;
#pragma unroll
  for (int i = 0; i < kHyperOutputs; ++i) {
    scalar[i][threadIdx.x] = d_logit[i];
    scalar[kHyperOutputs + i][threadIdx.x] = d_logit[i] * mix[i];
  }
  __syncthreads();
  if (threadIdx.x < kScalarSums) {
    float sum = 0;
    for (int t = 0; t < kGradientTokens; ++t) sum += scalar[threadIdx.x][t];
    p.scalar[static_cast<size_t>(blockIdx.x) * kScalarSums + threadIdx.x] = sum;
  }
}

// Adds the blocks' sums in order to d_base [outputs] and d_scale [3 or 1].
__global__ void __launch_bounds__(64)
    scalar_gradient_kernel(const float* scalar, int blocks, int outputs, float* d_base, float* d_scale) {
  __shared__ float total[kScalarSums];
  if (threadIdx.x < kScalarSums) {
    float sum = 0;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) sum += scalar[static_cast<size_t>(b) * kScalarSums + threadIdx.x];
    total[threadIdx.x] = sum;
  }
  __syncthreads();
  const int t = threadIdx.x;
  if (t < outputs) d_base[t] += total[t];
  if (t < (outputs == kHyperOutputs ? 3 : 1)) {
    const int first = t == 0 ? 0 : 4 * t, last = t == 0 ? 4 : t == 1 ? 8 : kHyperOutputs;
    float sum = 0;
    for (int i = first; i < last; ++i) sum += total[kHyperOutputs + i];
    d_scale[t] += sum;
  }
}

// ---- d_streams ----
// As map_kernel: a block owns 256 channels of the four streams and walks over the tokens, 16 at a time; lane 4 g + q
// has tokens g and g + 8 and eight channels. The products fn^T d_mix come out in the same places: tokens are the 16
// rows, and column 2 q + b of product i is channel 8 q + 2 i + b. TF32: each weight is off by at most 2^-12.
constexpr int kStreamTokens = 16;
constexpr int kStreamStages = hopper::kHasCode ? 3 : 1;  // that the least of shared memory has room for

struct StreamsArguments {
  const uint8_t *d_next, *streams, *d_x;
  const float *coefficients, *fn, *norm_weight;
  const Record* records;
  uint8_t* d_streams;
  int rows, width, outputs;
};

template <bool kNext>
struct StreamsShared {
  static constexpr int kInputs = kNext ? 9 : 5;      // d_x, streams, d_next
  uint4 input[kStreamStages][2][kInputs][kThreads];  // [token half]; each thread reads what it copied itself
  float coefficient[kStreamStages][kStreamTokens][kHyperOutputs];
  Record record[kStreamStages][kStreamTokens];
};

__device__ __forceinline__ uint32_t tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
// d += a b, 16 x 8, k = 8.
__device__ __forceinline__ void product_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <bool kNext>
__global__ void __launch_bounds__(kThreads, 1) streams_backward_kernel(const __grid_constant__ StreamsArguments p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<StreamsShared<kNext>*>(raw);
  static_assert(hopper::kFitsEverywhere<StreamsShared<kNext>>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slices = p.width / kSlice, slice = blockIdx.x % slices, stride = gridDim.x / slices;
  const int steps = (p.rows + kStreamTokens - 1) / kStreamTokens, first_step = blockIdx.x / slices;
  const int first_channel = slice * kSlice + warp * 32, channel = first_channel + 8 * q;
  const size_t stream_bytes = static_cast<size_t>(p.width) * 2;

  uint32_t weight[4][4][3][2];  // [stream][product][k / 8]
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int part = 0; part < 6; ++part) {
        const int output = 4 * part + q, at = first_channel + g / 2 * 8 + 2 * i + g % 2;
        weight[j][i][part / 2][part % 2] =
            output < p.outputs ? tf32(__ldg(p.fn + (static_cast<size_t>(output) * kHyperStreams + j) * p.width + at))
                               : 0;
      }
  float norm_weight[8];
  load_eight(p.norm_weight + channel, norm_weight);

  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int row = step * kStreamTokens + g + 8 * u;
        const uint32_t bytes = row < p.rows ? 16 : 0;
        const size_t safe = row < p.rows ? row : 0, at = channel * 2;
        const auto copy = [&](int input, const uint8_t* from) {
          hopper::copy16(hopper::shared_address(&s.input[stage][u][input][threadIdx.x]), from + at, bytes);
        };
        copy(0, p.d_x + safe * stream_bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          copy(1 + j, p.streams + (safe * kHyperStreams + j) * stream_bytes);
          if constexpr (kNext) copy(5 + j, p.d_next + (safe * kHyperStreams + j) * stream_bytes);
        }
      }
      constexpr int kPieces = kHyperOutputs / 4 + kRecordFloats / 4;
      if (threadIdx.x < kPieces * kStreamTokens) {
        const int token = threadIdx.x / kPieces, piece = threadIdx.x % kPieces, row = step * kStreamTokens + token;
        const uint32_t bytes = row < p.rows ? 16 : 0;
        const size_t safe = row < p.rows ? row : 0;
        if (piece < kHyperOutputs / 4)
          hopper::copy16(hopper::shared_address(&s.coefficient[stage][token][piece * 4]),
                         p.coefficients + safe * kHyperOutputs + piece * 4, bytes);
        else
          hopper::copy16(hopper::shared_address(&s.record[stage][token].mix[(piece - kHyperOutputs / 4) * 4]),
                         &p.records[safe].mix[(piece - kHyperOutputs / 4) * 4], bytes);
      }
    }
    hopper::copy_commit();
  };

#pragma unroll
  for (int i = 0; i < kStreamStages - 1; ++i) fetch(first_step + i * stride, i);
  int stage = 0;
  for (int step = first_step; step < steps; step += stride) {
    if constexpr (kStreamStages > 1) hopper::copy_wait<kStreamStages - 2>();
    __syncthreads();
    fetch(step + (kStreamStages - 1) * stride, stage == 0 ? kStreamStages - 1 : stage - 1);
    if constexpr (kStreamStages == 1) {
      hopper::copy_wait<0>();
      __syncthreads();
    }
    uint32_t d_mix[3][4];
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) d_mix[part][i] = tf32(s.record[stage][g + i % 2 * 8].mix[8 * part + q + i / 2 * 4]);
    uint4 result[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two channels of both tokens at a time
      float product[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) product[j][c] = 0;
#pragma unroll
        for (int part = 0; part < 3; ++part) product_tf32(product[j], d_mix[part], weight[j][i][part]);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const auto word = [&](int input) {
          return reinterpret_cast<const uint32_t*>(&s.input[stage][u][input][threadIdx.x])[i];
        };
        const Record& record = s.record[stage][g + 8 * u];
        const float* c = s.coefficient[stage][g + 8 * u];
        float h[2][4], d[2][4], y[2], d_y[2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          h[0][j] = low_bf16(word(1 + j)), h[1][j] = high_bf16(word(1 + j));
          if constexpr (kNext) d[0][j] = low_bf16(word(5 + j)), d[1][j] = high_bf16(word(5 + j));
        }
        const uint32_t d_x = word(0);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          y[b] = round_bf16(fmaf(c[3], h[b][3], fmaf(c[2], h[b][2], fmaf(c[1], h[b][1], c[0] * h[b][0]))));
          const float slope = norm_weight[2 * i + b] * (b ? high_bf16(d_x) : low_bf16(d_x));
          d_y[b] = record.norm_rho * (slope - record.slope * y[b]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float sum[2];
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            sum[b] = fmaf(c[j], d_y[b], fmaf(record.factor, h[b][j], product[j][2 * u + b]));
            if constexpr (kNext)
#pragma unroll
              for (int k = 0; k < 4; ++k) sum[b] = fmaf(c[8 + 4 * j + k], d[b][k], sum[b]);
          }
          (&result[u][j].x)[i] = hopper::pack_bf16(sum[0], sum[1]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = step * kStreamTokens + g + 8 * u;
      if (row < p.rows)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *reinterpret_cast<uint4*>(p.d_streams + (static_cast<size_t>(row) * kHyperStreams + j) * stream_bytes +
                                    channel * 2) = result[u][j];
    }
    stage = stage == kStreamStages - 1 ? 0 : stage + 1;
  }
  hopper::copy_wait<0>();
}

template <class Kernel, class Arguments>
cudaError_t launch(Kernel* kernel, int blocks, int threads, size_t shared, cudaStream_t stream, const Arguments& a) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared, stream>>>(a);
  return cudaGetLastError();
}

struct Workspace {
  Record* records;
  float *scalar, *fn_partial;
  size_t bytes;
};
Workspace workspace_at(void* base, int rows, int width, bool weight_gradients) {
  const size_t blocks = (rows + kGradientTokens - 1) / kGradientTokens;
  const size_t records = (sizeof(Record) * rows + 255) / 256 * 256;
  const size_t scalar = weight_gradients ? (blocks * kScalarSums * 4 + 255) / 256 * 256 : 0;
  const size_t fn = weight_gradients ? sizeof(float) * kTokenChunks * kHyperOutputs * kHyperStreams * width : 0;
  auto* bytes = static_cast<uint8_t*>(base);
  return {reinterpret_cast<Record*>(bytes), reinterpret_cast<float*>(bytes + records),
          reinterpret_cast<float*>(bytes + records + scalar), records + scalar + fn};
}

}  // namespace
}  // namespace hyper

cudaError_t hyper_post_backward(const HyperPostBackward& p, cudaStream_t stream) {
  using namespace hyper;
  if (wrong_shape(p.rows, p.width)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  post_backward_kernel<<<p.rows, kThreads, 0, stream>>>(
      {static_cast<const uint8_t*>(p.d_next), static_cast<const uint8_t*>(p.streams),
       static_cast<const uint8_t*>(p.out), p.finished, static_cast<uint8_t*>(p.d_out), p.d_coefficients, p.width});
  return cudaGetLastError();
}

size_t hyper_pre_backward_workspace(int rows, int width, bool weight_gradients) {
  return hyper::workspace_at(nullptr, rows, width, weight_gradients).bytes;
}

cudaError_t hyper_pre_backward(const HyperPreBackward& p, cudaStream_t stream) {
  using namespace hyper;
  const bool trained = p.d_fn != nullptr;
  const int outputs = p.mapping.outputs;
  if (wrong_shape(p.rows, p.width) || (outputs != kHyperOutputs && outputs != kHyperStreams) ||
      (outputs == kHyperStreams) != (p.d_next == nullptr) || p.mapping.sinkhorn_iterations < 1 ||
      trained != (p.d_base != nullptr) || trained != (p.d_scale != nullptr))
    return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const Workspace w = workspace_at(p.workspace, p.rows, p.width, trained);
  const auto* streams = static_cast<const uint8_t*>(p.streams);
  const auto* d_x = static_cast<const uint8_t*>(p.d_x);
  normed_input_backward_kernel<<<p.rows, kThreads, 0, stream>>>(
      {streams, d_x, p.coefficients, p.norm_weight, p.d_coefficients, w.records, p.rms_eps, p.width, outputs});
  const int blocks = (p.rows + kGradientTokens - 1) / kGradientTokens;
  cudaError_t error = launch(coefficient_backward_kernel, blocks, kGradientTokens,
                             sizeof(float4) * kGradientTokens * (2 * p.mapping.sinkhorn_iterations - 1), stream,
                             CoefficientGradients{p.mapping, p.coefficients, p.mix, p.rho, p.d_coefficients, w.records,
                                                  trained ? w.scalar : nullptr, p.rows, p.width});
  if (error != cudaSuccess) return error;
  if (trained) {
    scalar_gradient_kernel<<<1, 64, 0, stream>>>(w.scalar, blocks, outputs, p.d_base, p.d_scale);
    error = fn_gradient({streams, w.records, w.fn_partial, p.rows, p.width}, outputs, p.d_fn, stream);
    if (error != cudaSuccess) return error;
  }
  const StreamsArguments a{
      static_cast<const uint8_t*>(p.d_next), streams, d_x,     p.coefficients, p.mapping.fn, p.norm_weight, w.records,
      static_cast<uint8_t*>(p.d_streams),    p.rows,  p.width, outputs};
  const int grid = walking_blocks(p.width, (p.rows + kStreamTokens - 1) / kStreamTokens);
  const auto shared = [](size_t bytes) { return std::min<size_t>(bytes, shared_memory_limit()); };  // of fewer stages
  return p.d_next
             ? launch(streams_backward_kernel<true>, grid, kThreads, shared(sizeof(StreamsShared<true>)), stream, a)
             : launch(streams_backward_kernel<false>, grid, kThreads, shared(sizeof(StreamsShared<false>)), stream, a);
}

}  // namespace plumb::kernels
