// Moving data between global and shared memory on Hopper: 16-byte asynchronous copies, bulk copies, bulk reductions,
// and the stores that bring registers into the layouts of tile.cuh.
#pragma once

#include <cstdint>

#include "kernels/hopper/barrier.cuh"

namespace plumb::kernels::hopper {

// ---- cp.async: 16 bytes from global to shared memory; bytes = 0 fills with zeros and reads nothing ----
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- bulk reductions: multiples of 16 bytes, addresses aligned to 16 ----
// global[i] += shared[i] for 32-bit integers: the order of such additions cannot be seen in the result.
__device__ __forceinline__ void bulk_add_s32(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {  // shared memory may be written again
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {  // writes are done
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- registers to shared memory ----
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared2(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
// Stores four 8x8 matrices of 16-bit values transposed: lane i of each group of eight gives the address of stored row
// i.
__device__ __forceinline__ void store_transposed4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

}  // namespace plumb::kernels::hopper
