// mbarrier: the barrier in shared memory on which threads and the copy engine meet. Shared memory is named by 32-bit
// addresses throughout (shared_memory.cuh). Source: PTX ISA, "mbarrier".
#pragma once
#include <cstdint>

namespace plumb::kernels::hopper {

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

// Waits until the phase with this parity has completed. A fresh barrier counts as having completed parity 1.
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

// bar.sync on one of the 16 hardware barriers, for `threads` threads of the block.
__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

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

}  // namespace plumb::kernels::hopper
