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

}  // namespace plumb::kernels::hopper
