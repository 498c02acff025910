// The coefficients of a token from its mapping's sums, and their gradients back to the mapping: scalar work, one thread
// a token. The 4 x 4 Sinkhorn iteration stays in registers; its backward pass walks the same steps in reverse, from the
// result and the kept sums of each step.
#pragma once
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/parts.cuh"

namespace plumb::kernels::hyper {

struct Matrix {
  float c[4][4];  // (source, destination)
};

// To one unit in the last place. The iteration contracts errors, so they do not add up.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Divides the columns (kRows = false) or rows by their sums + eps; sum keeps the divisors.
template <bool kRows>
__device__ __forceinline__ void normalise(Matrix& m, float eps, float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = eps;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i] += kRows ? m.c[i][j] : m.c[j][i];
    const float inverse = reciprocal(sum[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) (kRows ? m.c[i][j] : m.c[j][i]) *= inverse;
  }
}

// In place on d, from the step's result y: dX = (dY - sum dY Y) / sum. y becomes the step's input.
template <bool kRows>
__device__ __forceinline__ void normalise_backward(Matrix& y, Matrix& d, const float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float along = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) along += (kRows ? d.c[i][j] : d.c[j][i]) * (kRows ? y.c[i][j] : y.c[j][i]);
    const float inverse = reciprocal(sum[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float &slope = kRows ? d.c[i][j] : d.c[j][i], &value = kRows ? y.c[i][j] : y.c[j][i];
      slope = (slope - along) * inverse;
      value *= sum[i];
    }
  }
}

__device__ __forceinline__ void row_softmax(Matrix& m) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float top = fmaxf(fmaxf(m.c[i][0], m.c[i][1]), fmaxf(m.c[i][2], m.c[i][3]));
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += m.c[i][j] = expf(m.c[i][j] - top);
#pragma unroll
    for (int j = 0; j < 4; ++j) m.c[i][j] /= sum;
  }
}

// keep(t, sum): called with the divisors of step t.
template <class Keep>
__device__ __forceinline__ void sinkhorn(Matrix& m, int iterations, float eps, const Keep& keep) {
  row_softmax(m);
#pragma unroll
  for (int i = 0; i < 16; ++i) m.c[i / 4][i % 4] += eps;
  float sum[4];
  for (int t = 0; t < 2 * iterations - 1; ++t) {
    t % 2 == 0 ? normalise<false>(m, eps, sum) : normalise<true>(m, eps, sum);
    keep(t, sum);
  }
}

__device__ __forceinline__ Matrix comb_logits(const float (&mix)[kHyperOutputs], const HyperMapping& map) {
  Matrix m;
#pragma unroll
  for (int i = 0; i < 16; ++i) m.c[i / 4][i % 4] = fmaf(mix[8 + i], __ldg(map.scale + 2), __ldg(map.base + 8 + i));
  return m;
}

// 24 floats of a token, as six loads or stores.
__device__ __forceinline__ void load_outputs(const float* from, float (&to)[kHyperOutputs]) {
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const float4 v = reinterpret_cast<const float4*>(from)[i];
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}
template <int kCount>
__device__ __forceinline__ void store_outputs(const float (&from)[kCount], float* to) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i)
    reinterpret_cast<float4*>(to)[i] = make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
}

}  // namespace plumb::kernels::hyper
