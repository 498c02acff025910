// The device's side of launch_dependent (kernels/launch.cuh), whose contract says where these two stand.
// Source: PTX ISA, "griddepcontrol".
#pragma once

namespace plumb::kernels::hopper {

// Waits until the launches before this one are complete and what they wrote can be read. All threads call it.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have called this (a thread of each is enough) or ended, the next launch may begin. After the wait.
__device__ __forceinline__ void let_next_launch_begin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for a kernel that has nothing to do before.
__device__ __forceinline__ void take_turn() {
  wait_for_earlier_launches();
  let_next_launch_begin();
}

}  // namespace plumb::kernels::hopper
