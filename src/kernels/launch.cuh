// Launching with dynamic shared memory, launches that overlap, and errors as exceptions.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/device.h"

namespace plumb::kernels {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// What a caller got wrong. `where` names the function.
inline void require(bool condition, const char* where, const std::string& message) {
  if (!condition) throw std::invalid_argument(std::string(where) + ": " + message);
}
inline bool aligned(const void* p, uintptr_t bytes) { return p && reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <typename Kernel>
void raise_shared_limit(Kernel* kernel, int shared_bytes) {
  require(shared_bytes <= shared_memory_limit(), "launching a kernel",
          "it needs " + std::to_string(shared_bytes) + " bytes of shared memory a block, this GPU has " +
              std::to_string(shared_memory_limit()));
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "raising a kernel's shared memory");
}

template <typename... Parameters, typename... Arguments>
void launch_with_shared(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const Arguments&... arguments) {
  raise_shared_limit(kernel, shared_bytes);
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), "launching a kernel");
}

struct LaunchShape {
  dim3 blocks;
  int threads, shared_bytes = 0;
  int cluster = 1;  // blocks that run together, a divisor of blocks.x
};

// A launch that may begin while the one before it on the stream still runs (programmatic dependent launch; on GPUs
// without it, and after anything but a kernel, an ordinary launch). Kernels that are launched so follow three rules
// (hopper/launch_order.cuh):
//   1. Every thread calls wait_for_earlier_launches. Before that the kernel writes no global memory, and reads none
//      that the launch directly before it may have written.
//   2. let_next_launch_begin comes after the wait.
//   3. No thread ends before its wait.
// By 2, the launch directly before had passed its own wait when this one began, and by 1 and 3 it had waited for all
// that came before it: whatever is older than the launch directly before may be read at once. Weights are; so is a work
// list with a launch between. By 3, a launch that is complete leaves none before it running, so that an ordinary
// launch, a copy or an event behind it waits for everything, as ever.
template <typename... Parameters, typename... Arguments>
void launch_dependent(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                      const Arguments&... arguments) {
  if (shape.shared_bytes > 0) raise_shared_limit(kernel, shape.shared_bytes);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks, config.blockDim = dim3(shape.threads), config.stream = stream;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.attrs = attributes;
  if (is_hopper()) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a kernel");
}

}  // namespace plumb::kernels
