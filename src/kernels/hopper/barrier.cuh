// Synchronisation inside a CTA on Hopper: mbarriers, named barriers, proxy fences, register budgets. Each function is
// one PTX instruction (PTX ISA 8.0 and later, sections "mbarrier", "bar", "membar/fence", "setmaxnreg"); the names say
// what it is for. A barrier is named by its 32-bit shared-memory address, or by a pointer where it is a struct's
// member.
#pragma once
#include <cstdint>

#include "kernels/hopper/shared_memory.cuh"

namespace plumb::kernels::hopper {

// ---- mbarrier: threads and the copy engine meet on a counter of arrivals with a phase bit ----
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialisations visible to the copy engine; a block barrier must follow for the other threads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Predicated, not branched around: a branch that one lane takes costs the warp some 40 cycles.
__device__ __forceinline__ void barrier_arrive_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{ .reg .pred take; setp.ne.b32 take, %1, 0;\n"
      "@take mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}

// One arrival that also announces how many bytes the copy engine will still deliver in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity has completed; a fresh barrier counts as having completed parity 1. Use n,
// counted from 0, of a barrier ends when wait(n & 1) returns; who waits for a buffer to be empty passes (n & 1) ^ 1,
// which lets the first use through.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that phase has ended, without waiting for long.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred done;\n mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  barrier_init(shared_address(barrier), arrivals);
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) { barrier_arrive(shared_address(barrier)); }
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait(shared_address(barrier), parity);
}
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
  return barrier_test(shared_address(barrier), parity);
}

// ---- rings of buffers ----
// Position in a ring of kDepth slots, kDepth a power of two, from the count of steps passed: slot and mbarrier parity
// are bit fields of the count, cheap uniform arithmetic without state that a branch could make divergent.
template <int kDepth>
__device__ __forceinline__ uint32_t ring_slot(uint32_t step) {
  static_assert((kDepth & (kDepth - 1)) == 0);
  return step % kDepth;
}
template <int kDepth>
__device__ __forceinline__ uint32_t ring_parity(uint32_t step) {
  static_assert((kDepth & (kDepth - 1)) == 0);
  return step / kDepth & 1;
}

// Position in a ring of any depth; carried along, so it must be updated by all threads alike.
template <int kDepth>
struct RingPosition {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ RingPosition after(int count) const {  // count < kDepth
    const bool wraps = slot + count >= kDepth;
    return {wraps ? slot + count - kDepth : slot + count, wraps ? parity ^ 1 : parity};
  }
};

// ---- named barriers: one of the 16 of the hardware (0 is __syncthreads), for `threads` threads of the block ----
__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as there without waiting.
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits for the others and returns whether the condition held for all.
__device__ __forceinline__ bool group_all(int id, int threads, bool condition) {
  uint32_t all;
  asm volatile(
      "{\n .reg .pred mine, all;\n setp.ne.u32 mine, %3, 0;\n bar.red.and.pred all, %1, %2, mine;\n selp.u32 %0, 1, 0, "
      "all;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(condition))
      : "memory");
  return all;
}

// ---- proxies: makes ordinary shared-memory stores visible to the tensor cores and the copy engine ----
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup. The CTA owns what it started with: raising above that sum waits forever ----
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace plumb::kernels::hopper
