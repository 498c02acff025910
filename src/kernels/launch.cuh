// Launching with dynamic shared memory, and errors as exceptions.
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

template <typename... Parameters, typename... Arguments>
void launch_with_shared(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const Arguments&... arguments) {
  require(shared_bytes <= shared_memory_limit(), "launching a kernel",
          "it needs " + std::to_string(shared_bytes) + " bytes of shared memory a block, this GPU has " +
              std::to_string(shared_memory_limit()));
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "raising a kernel's shared memory");
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), "launching a kernel");
}

}  // namespace plumb::kernels
