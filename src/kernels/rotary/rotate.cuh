// Rotation of interleaved pairs in registers.
#pragma once
#include <cuda_runtime.h>

namespace plumb::kernels {

struct Angles {  // of four pairs: cosine and sine of two in a float4
  float4 two[2];
};
__device__ __forceinline__ Angles load_angles(const float2* table) {
  const float4* from = reinterpret_cast<const float4*>(table);
  return {{__ldg(from), __ldg(from + 1)}};
}
// direction: 1 forth, -1 back.
__device__ __forceinline__ void rotate_eight(float (&v)[8], const Angles& angles, float direction) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float4 a = angles.two[i / 2];
    const float cosine[2] = {a.x, a.z}, sine[2] = {a.y * direction, a.w * direction};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float even = v[2 * (i + k)], odd = v[2 * (i + k) + 1];
      v[2 * (i + k)] = __fmul_rn(even, cosine[k]) - __fmul_rn(odd, sine[k]);
      v[2 * (i + k) + 1] = __fmul_rn(even, sine[k]) + __fmul_rn(odd, cosine[k]);
    }
  }
}

}  // namespace plumb::kernels
