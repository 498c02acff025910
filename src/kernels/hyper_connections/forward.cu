// A boundary between two sublayers, forward: map_kernel (map.cuh) takes up the sublayer's output and computes the sums
// of the next mapping, finish_kernel turns them into coefficients, contract_kernel makes the normed
// input of the next sublayer, in bf16 and as FP8 codes.
#include <algorithm>

#include "kernels/hyper_connections/coefficients.cuh"
#include "kernels/hyper_connections/map.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels {
namespace hyper {
namespace {

constexpr int kFinishTokens = 32, kFinishThreads = 256;

struct FinishArguments {
  const float *products, *squares;  // [slices][padded][24], [slices][padded]
  HyperMapping map;
  float *coefficients, *mix, *rho;
  int rows, width, padded;
};

// All threads add the slices' sums; one warp then has a token a lane.
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ FinishArguments p) {
  __shared__ float sum[kSums][kFinishTokens + 1];
  const int first = blockIdx.x * kFinishTokens, slices = p.width / kSlice;
  for (int i = threadIdx.x; i < kSums * kFinishTokens; i += kFinishThreads) {
    const bool square = i >= kHyperOutputs * kFinishTokens;
    const int output = square ? kHyperOutputs : i % kHyperOutputs;
    const int token = square ? i - kHyperOutputs * kFinishTokens : i / kHyperOutputs;
    float total = 0;
    if (first + token < p.padded) {
      const float* from =
          square ? p.squares + first + token : p.products + static_cast<size_t>(first + token) * kHyperOutputs + output;
      const size_t stride = static_cast<size_t>(p.padded) * (square ? 1 : kHyperOutputs);
#pragma unroll 16
      for (int s = 0; s < slices; ++s) total += from[s * stride];
    }
    sum[output][token] = total;
  }
  __syncthreads();
  const int token = threadIdx.x, row = first + token;
  if (token >= kFinishTokens || row >= p.rows) return;
  const float rho = inverse_rms(sum[kHyperOutputs][token], kHyperStreams * p.width, p.map.norm_eps);
  float mix[kHyperOutputs];
#pragma unroll
  for (int i = 0; i < kHyperOutputs; ++i) mix[i] = sum[i][token] * rho;
  store_outputs(mix, p.mix + static_cast<size_t>(row) * kHyperOutputs);
  p.rho[row] = rho;
  float* out = p.coefficients + static_cast<size_t>(row) * kHyperOutputs;
  float pre[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) pre[j] = sigmoid(fmaf(mix[j], __ldg(p.map.scale), __ldg(p.map.base + j))) + p.map.hc_eps;
  store_outputs(pre, out);
  float post[4] = {}, comb[16] = {};
  if (p.map.outputs == kHyperStreams) {
    store_outputs(post, out + 4);
    store_outputs(comb, out + 8);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    post[j] = 2 * sigmoid(fmaf(mix[4 + j], __ldg(p.map.scale + 1), __ldg(p.map.base + 4 + j)));
  store_outputs(post, out + 4);
  Matrix m = comb_logits(mix, p.map);
  sinkhorn(m, p.map.sinkhorn_iterations, p.map.hc_eps, [](int, const float(&)[4]) {});
#pragma unroll
  for (int i = 0; i < 16; ++i) comb[i] = m.c[i / 4][i % 4];
  store_outputs(comb, out + 8);
}

struct ContractArguments {
  const uint8_t* streams;
  const float *coefficients, *norm_weight;
  uint8_t *y, *x;
  uint8_t* values;
  float* scales;
  int width, scale_stride;
  float rms_eps;
};

// One block a token; a thread has kVectors times eight channels, 2,048 apart.
template <int kVectors>
__global__ void __launch_bounds__(kThreads) contract_kernel(const __grid_constant__ ContractArguments p) {
  __shared__ float partial[kWarps];
  const size_t row = gridDim.x - 1 - blockIdx.x;  // the last tokens of map_kernel are still in the L2 cache
  const uint8_t* h = p.streams + row * kHyperStreams * p.width * 2;
  uint4 in[kVectors][4];
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = (v * kThreads + threadIdx.x) * 8;
      if (channel < p.width)
        in[v][j] = __ldcs(reinterpret_cast<const uint4*>(h + (static_cast<size_t>(j) * p.width + channel) * 2));
    }
  const float4 pre = __ldg(reinterpret_cast<const float4*>(p.coefficients + row * kHyperOutputs));
  float y[kVectors][8], square[1] = {0};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int channel = (v * kThreads + threadIdx.x) * 8;
    if (channel >= p.width) break;
    float s[4][8];
#pragma unroll
    for (int j = 0; j < 4; ++j) unpack(in[v][j], s[j]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      y[v][i] = fmaf(pre.w, s[3][i], fmaf(pre.z, s[2][i], fmaf(pre.y, s[1][i], pre.x * s[0][i])));
    const uint4 packed = pack(y[v]);
    unpack(packed, y[v]);
    if (p.y) *reinterpret_cast<uint4*>(p.y + (row * p.width + channel) * 2) = packed;
#pragma unroll
    for (int i = 0; i < 8; ++i) square[0] = fmaf(y[v][i], y[v][i], square[0]);
  }
  warp_sums(square, &partial[threadIdx.x / 32]);
  __syncthreads();
  const float rho = inverse_rms(block_sum<kWarps>(partial, 1, 0), p.width, p.rms_eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int channel = (v * kThreads + threadIdx.x) * 8;
    if (channel >= p.width) break;  // whole warps: width is a multiple of 256
    float w[8];
    load_eight(p.norm_weight + channel, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] *= y[v][i] * rho;
    const uint4 x = pack(w);
    *reinterpret_cast<uint4*>(p.x + (row * p.width + channel) * 2) = x;
    if (p.values) store_fp8_block(x, channel, p.values + row * p.width, p.scales + row * p.scale_stride);
  }
}

template <bool kPost>
cudaError_t launch_map(const MapArguments& map, cudaStream_t stream) {
  const int bytes = std::min(static_cast<int>(sizeof(MapShared<kPost>)), shared_memory_limit());  // of fewer stages
  const cudaError_t error = cudaFuncSetAttribute(map_kernel<kPost>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int steps = (map.rows + kMapTokens - 1) / kMapTokens;
  map_kernel<kPost><<<walking_blocks(map.width, steps), kThreads, bytes, stream>>>(map);
  return cudaGetLastError();
}

template <int kVectors>
void launch_contract(const ContractArguments& c, int rows, cudaStream_t stream) {
  contract_kernel<kVectors><<<rows, kThreads, 0, stream>>>(c);
}

int padded_rows(int rows) { return (rows + kMapTokens - 1) / kMapTokens * kMapTokens; }

}  // namespace
}  // namespace hyper

size_t hyper_boundary_workspace(int rows, int width) {
  return sizeof(float) * hyper::kSums * (width / hyper::kSlice) * static_cast<size_t>(hyper::padded_rows(rows));
}

cudaError_t hyper_boundary(const HyperBoundary& p, cudaStream_t stream) {
  using namespace hyper;
  const int outputs = p.mapping.outputs;
  if (wrong_shape(p.rows, p.width) || (outputs != kHyperOutputs && outputs != kHyperStreams) ||
      p.mapping.sinkhorn_iterations < 1 || (p.out != nullptr) != (p.next != nullptr) ||
      (p.out != nullptr) != (p.finished != nullptr) || (p.x_values != nullptr) != (p.x_scales != nullptr))
    return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  float* products = static_cast<float*>(p.workspace);
  float* squares = products + static_cast<size_t>(p.width / kSlice) * padded_rows(p.rows) * kHyperOutputs;
  const MapArguments map{static_cast<const uint8_t*>(p.streams),
                         static_cast<const uint8_t*>(p.out),
                         p.finished,
                         static_cast<uint8_t*>(p.next),
                         p.mapping.fn,
                         products,
                         squares,
                         p.rows,
                         p.width,
                         outputs};
  const cudaError_t error = p.out ? launch_map<true>(map, stream) : launch_map<false>(map, stream);
  if (error != cudaSuccess) return error;
  const FinishArguments finish{products, squares, p.mapping, p.coefficients,     p.mix,
                               p.rho,    p.rows,  p.width,   padded_rows(p.rows)};
  finish_kernel<<<(p.rows + kFinishTokens - 1) / kFinishTokens, kFinishThreads, 0, stream>>>(finish);
  const ContractArguments contract{static_cast<const uint8_t*>(p.out ? p.next : p.streams),
                                   p.coefficients,
                                   p.norm_weight,
                                   static_cast<uint8_t*>(p.y),
                                   static_cast<uint8_t*>(p.x),
                                   p.x_values,
                                   p.x_scales,
                                   p.width,
                                   fp8_scale_stride(p.width),
                                   p.rms_eps};
  switch ((p.width + 2047) / 2048) {
    case 1:
      launch_contract<1>(contract, p.rows, stream);
      break;
    case 2:
      launch_contract<2>(contract, p.rows, stream);
      break;
    case 3:
      launch_contract<3>(contract, p.rows, stream);
      break;
    default:
      launch_contract<4>(contract, p.rows, stream);
  }
  return cudaGetLastError();
}

}  // namespace plumb::kernels
