// Rotation of interleaved pairs in registers.
#pragma once
#include <cuda_runtime.h>

namespace plumb::kernels {

// Four pairs, two a float4 of the table. direction: 1 forth, -1 back.
__device__ __forceinline__ void rotate_eight(float (&v)[8], const float2* angle, float direction) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(angle + i));
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
