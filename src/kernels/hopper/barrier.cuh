// Synchronisation inside a CTA on Hopper: mbarriers, named barriers, proxy fences, register budgets. Each function is
// one PTX instruction (PTX ISA 8.0 and later, sections "mbarrier", "bar", "membar/fence", "setmaxnreg"); the names say
// what it is for.
#pragma once

#include <cstdint>

namespace plumb::kernels::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a counter of arrivals with a phase bit ----
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// After all barrier_init, before the other threads learn of the barriers (__syncthreads).
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of this parity has ended. Use n, counted from 0, of a barrier ends when wait(n & 1) returns;
// who waits for a buffer to be empty passes (n & 1) ^ 1, which lets the first use through.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra READY;\n bra WAIT;\nREADY:\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether that phase has ended, without waiting for long.
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred done;\n mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

// ---- named barriers (0 is __syncthreads) ----
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits for the others and returns whether the condition held for all.
__device__ __forceinline__ bool named_all(int id, int threads, bool condition) {
  uint32_t all;
  asm volatile(
      "{\n .reg .pred mine, all;\n setp.ne.u32 mine, %3, 0;\n bar.red.and.pred all, %1, %2, mine;\n selp.u32 %0, 1, 0, "
      "all;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(condition))
      : "memory");
  return all;
}

// ---- proxies: ordinary accesses before, accesses of tensor cores or bulk copies after ----
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup. The CTA owns what it started with: raising above that sum waits forever ----
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace plumb::kernels::hopper
