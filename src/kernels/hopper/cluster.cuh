// Blocks of a cluster: one copy feeds several, memory and barriers of another block are reached by its rank.
// Source: PTX ISA, "cp.async.bulk.tensor" (multicast), "cp.async.bulk", "st.async", "mapa", "barrier.cluster".
#pragma once
#include <cuda.h>

#include <cstdint>

namespace plumb::kernels::hopper {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster. Needed before the first access to another block's shared memory, and before
// a block ends that others may still write to. Relaxed: orders no memory, and spares the fence that release costs (a
// membar of the whole device); enough where nothing written before is read after, as when memory is free again.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Arrives on the barrier that lies at `barrier` in the shared memory of block `rank`. Orders no ordinary accesses for
// that block: release at cluster scope is a membar of the whole device, which waits for all stores of the warp, at
// every arrival. Enough where the tensor cores have read what the copy engine will overwrite.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// barrier_wait for a barrier on which threads of other blocks arrive.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// 16 bytes to what lies at `address` in the shared memory of block `rank`; a cluster_sync must follow.
__device__ __forceinline__ void store_16_at(uint32_t address, uint32_t rank, uint4 v) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.b32 [there], {%2, %3, %4, %5}; }" ::"r"(address),
      "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// The float that lies at `address` in the shared memory of block `rank`, after a cluster_sync.
__device__ __forceinline__ float load_float_at(uint32_t address, uint32_t rank) {
  float v;
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there]; }"
      : "=f"(v)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

// A float to what lies at `address` in the shared memory of block `rank`, whose `barrier` receives the four bytes: no
// fence, which an arrival there after an ordinary store would need.
__device__ __forceinline__ void send_float(uint32_t address, uint32_t rank, float value, uint32_t barrier) {
  asm volatile(
      "{ .reg .b32 there, signal;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 signal, %3, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [signal]; }" ::"r"(address),
      "r"(rank), "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}

// The same for 16 bytes.
__device__ __forceinline__ void send_16(uint32_t address, uint32_t rank, uint4 v, uint32_t barrier) {
  asm volatile(
      "{ .reg .b32 there, signal;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 signal, %6, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%2, %3, %4, %5}, [signal]; }" ::"r"(
          address),
      "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// Contiguous bytes of this block's shared memory to `destination` in that of block `rank`, whose `barrier` receives the
// bytes. Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bulk_at(uint32_t destination, uint32_t rank, uint32_t source, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "{ .reg .b32 there, signal;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 signal, %4, %1;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%2], %3, [signal]; }" ::"r"(
          destination),
      "r"(rank), "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// copy_tensor_2d to the same place in all blocks of `mask`; each block's own barrier receives the bytes.
__device__ __forceinline__ void copy_tensor_2d_to_all(uint32_t destination, const CUtensorMap* map, int inner,
                                                      int outer, uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(mask)
      : "memory");
}

}  // namespace plumb::kernels::hopper
