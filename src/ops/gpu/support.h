// What the ops on the GPU share: the stream, errors, and typed views of device tensors.
#pragma once
#include <cuda_runtime_api.h>

#include "base/error.h"
#include "base/tensor.h"
#include "ops/numerics.h"

namespace plumb::ops::gpu {

// All work of the program is enqueued on one stream, in order of the calls: memory that an op frees may be given to the
// next one at once. While a thread records (recording.h), what its ops enqueue goes to the recording instead.
struct Stream {
  operator cudaStream_t() const;
};
inline constexpr Stream kStream;

// Error if a CUDA call failed; `what` names it.
void check(cudaError_t error, const char* what);

inline Tensor empty(Shape shape, DType type) { return Tensor::empty(std::move(shape), type, Space::device); }
inline Tensor zeros(Shape shape, DType type) { return Tensor::zeros(std::move(shape), type, Space::device); }
// Memory for a kernel's own use, until the tensor is gone.
inline Tensor workspace(size_t bytes) { return empty({static_cast<int64_t>(bytes)}, DType::u8); }

// Addresses of device tensors; null for undefined ones.
template <class T>
T* device(const Tensor& t) {
  return t.defined() ? t.device<T>() : nullptr;
}
inline uint16_t* bf16(const Tensor& t) { return device<uint16_t>(t); }
inline float* f32(const Tensor& t) { return device<float>(t); }
inline int* i32(const Tensor& t) { return device<int32_t>(t); }
inline uint8_t* bytes(const Tensor& t) { return device<uint8_t>(t); }

// A copy of host numbers on the device.
template <class T>
Tensor upload(const std::vector<T>& values) {
  return to_device(Tensor::of(values));
}

// The rounding that the kernel does by itself is the one that was asked for. Error otherwise: the kernels compute the
// `released` profile only.
void require_kind(const RoundAt& at, PointKind kind, const char* op);
[[noreturn]] void not_on_gpu(const char* what);

}  // namespace plumb::ops::gpu
