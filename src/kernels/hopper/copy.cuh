// Moving data between global and shared memory on Hopper without a barrier: 16-byte asynchronous copies and bulk
// reductions. Copies that complete on an mbarrier are in tma.cuh.
#pragma once

#include <cstdint>

namespace plumb::kernels::hopper {

// ---- cp.async: 16 bytes from global to shared memory (bytes = 0 fills with zeros and reads nothing), or 4 ----
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives on an mbarrier when all copies that this thread has made so far have landed; one of the arrivals that the
// barrier was initialised with.
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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

}  // namespace plumb::kernels::hopper
