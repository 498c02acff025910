// Kernels made of Hopper's instructions in files that are also compiled for older GPUs (cmake/kernels.cmake): there
// they are empty, and stop whoever launches them.
#pragma once

namespace plumb::kernels::hopper {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasCode = false;
#define PLUMB_CLUSTER(blocks)
#else
constexpr bool kHasCode = true;
#define PLUMB_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

// Whether what a kernel keeps in shared memory, of fewer stages than on Hopper, fits into the least that a block has on
// a GPU of compute capability 8.0 or later.
template <typename Shared>
constexpr bool kFitsEverywhere = kHasCode || sizeof(Shared) <= 99 * 1024;

}  // namespace plumb::kernels::hopper
