// Device buffers and random inputs for the GPU tests.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace gpu_test {

using Bf16 = __nv_bfloat16;

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    check(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
    poison();
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) { upload(host); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void upload(const std::vector<T>& host) {
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void poison() { check(cudaMemset(data, 0xff, count * sizeof(T))); }  // NaN
  std::vector<T> host() const {
    std::vector<T> copy(count);
    check(cudaMemcpy(copy.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline double value(Bf16 x) { return __bfloat162float(x); }
inline double value(float x) { return x; }
inline double round_bf16(double x) { return __bfloat162float(__float2bfloat16(static_cast<float>(x))); }

inline std::vector<float> normal_floats(size_t count, int seed, float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, deviation);
  std::vector<float> values(count);
  for (float& x : values) x = draw(random);
  return values;
}
inline std::vector<Bf16> normal_bf16(size_t count, int seed, float deviation = 1) {
  std::vector<Bf16> values;
  values.reserve(count);
  for (float x : normal_floats(count, seed, deviation)) values.push_back(__float2bfloat16(x));
  return values;
}

// |a - b| / |b|; NaN anywhere gives NaN, which no comparison passes.
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(value(a[i])) - b[i];
    difference += d * d, size += static_cast<double>(b[i]) * b[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// Keeps part of the GPU busy on a stream of its own, so that a test's kernels meet different neighbours in every run.
__global__ void other_work(float* data, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    for (int k = 0; k < 50; ++k) data[i] = data[i] * 0.5f + k;
}
struct OtherWork {
  cudaStream_t stream;
  Buffer<float> data{1 << 22};
  OtherWork() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~OtherWork() { cudaStreamDestroy(stream); }
  void start(int run) { other_work<<<20 + run, 256, 0, stream>>>(data.data, 1 << 22); }
};

}  // namespace gpu_test
