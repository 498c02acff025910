// Shared memory by 32-bit address, matrix stores, byte permutation, and values kept on the warp-uniform path.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace plumb::kernels::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_float(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// stmatrix: lane l names row l % 8 of matrix l / 8 (8 x 8 of 16 bits).
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// Two floats to a bf16 pair, nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// For a value that is the same in all lanes of the warp: a reduction's result arrives in a uniform register, and
// branches and addresses that depend on it stay on the uniform path (after a shuffle they would not).
__device__ __forceinline__ int uniform(int value) {
  return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(value)));
}

// threadIdx.x, read where it stands: what is derived from it in a loop is not moved out of the loop, where it would
// take a register, or a spill, all the way through.
__device__ __forceinline__ int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The lane's own value through an identity shuffle. Short of registers, the compiler otherwise derives such values from
// the thread index again in every round of a loop, and waits for the slow register that holds it.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

}  // namespace plumb::kernels::hopper
