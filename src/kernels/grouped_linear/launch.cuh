// Launching with dynamic shared memory, and CUDA errors as exceptions.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace plumb::kernels {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <typename... Parameters, typename... Arguments>
void launch_with_shared(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const Arguments&... arguments) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "raising a kernel's shared memory");
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), "launching a kernel");
}

}  // namespace plumb::kernels
