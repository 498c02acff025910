// Between the input gradients of w2 and of w1, w3: the derivative of clamped SwiGLU, and rows to their experts. Both
// are bound by memory.
#include <limits>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kWarps = 8;

struct Gradient {
  float gate, up, route;
};
// h = silu(min(gate, limit)) * clamp(up) * weight. At equality with the limit the gradient passes; NaNs pass.
__device__ __forceinline__ Gradient differentiate(float d, float gate, float up, float limit, float weight) {
  const float g = min_nan(gate, limit), u = max_nan(min_nan(up, limit), -limit);
  float e, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(__fadd_rn(1.0f, e)));
  const float silu = g * sigmoid, slope = sigmoid * fmaf(g, 1.0f - sigmoid, 1.0f), dw = d * weight;
  return {gate > limit ? 0.0f : dw * u * slope, up > limit || up < -limit ? 0.0f : dw * silu, d * silu * u};
}

// A warp a row. A lane's four hidden units are rows 4 lane .. + 3 of a record's gates: two pairs of neighbours.
__global__ void __launch_bounds__(32 * kWarps)
    swiglu_backward_kernel(const uint16_t* d_hidden, const uint16_t* gate_up, int rows, int n,
                           const float* route_weight, float limit, uint16_t* d_gate_up, float* d_route) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float weight = route_weight ? route_weight[row] : 1.0f;
  const uint16_t* d = d_hidden + static_cast<size_t>(row) * (n / 2);
  const size_t at = static_cast<size_t>(row) * n + 4 * lane;
  const int unit[2] = {hidden_of_row(4 * lane), hidden_of_row(4 * lane + 2)};
  float route = 0;
#pragma unroll 2
  for (int record = 0; record < n / kRecordRows; ++record) {
    const uint2 gates = *reinterpret_cast<const uint2*>(gate_up + at + record * kRecordRows);
    const uint2 ups = *reinterpret_cast<const uint2*>(gate_up + at + record * kRecordRows + kBlock);
    uint32_t d_gate[2], d_up[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t dh = *reinterpret_cast<const uint32_t*>(d + record * kBlock + unit[i]);
      const uint32_t gate = i ? gates.y : gates.x, up = i ? ups.y : ups.x;
      const Gradient low = differentiate(low_bf16(dh), low_bf16(gate), low_bf16(up), limit, weight);
      const Gradient high = differentiate(high_bf16(dh), high_bf16(gate), high_bf16(up), limit, weight);
      d_gate[i] = hopper::pack_bf16(low.gate, high.gate), d_up[i] = hopper::pack_bf16(low.up, high.up);
      route = __fadd_rn(__fadd_rn(route, low.route), high.route);
    }
    *reinterpret_cast<uint2*>(d_gate_up + at + record * kRecordRows) = make_uint2(d_gate[0], d_gate[1]);
    *reinterpret_cast<uint2*>(d_gate_up + at + record * kRecordRows + kBlock) = make_uint2(d_up[0], d_up[1]);
  }
#pragma unroll
  for (int step = 16; step; step /= 2) route = __fadd_rn(route, __shfl_xor_sync(~0u, route, step));
  if (d_route && lane == 0) d_route[row] = route;
}

}  // namespace

void swiglu_backward(const uint16_t* d_hidden, const uint16_t* gate_up, int rows, int n, const float* route_weight,
                     float limit, uint16_t* d_gate_up, float* d_route, cudaStream_t stream) {
  require(rows > 0 && n > 0 && n % kRecordRows == 0, "swiglu_backward",
          "rows = " + std::to_string(rows) + " must be positive and n = " + std::to_string(n) +
              " a positive multiple of 256");
  swiglu_backward_kernel<<<(rows + kWarps - 1) / kWarps, 32 * kWarps, 0, stream>>>(
      d_hidden, gate_up, rows, n, route_weight, limit > 0 ? limit : std::numeric_limits<float>::infinity(), d_gate_up,
      d_route);
  check_cuda(cudaGetLastError(), "swiglu_backward");
}

}  // namespace plumb::kernels::grouped_linear
