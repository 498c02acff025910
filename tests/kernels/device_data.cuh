// What the tests of the kernels share: device memory, random data, comparisons, and products in FP64. bf16 values are
// their bits.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/float_formats.cpp"  // all of base that the GPU tests need; they build without its library
#include "kernels/launch.cuh"

namespace plumb::kernels {

inline void check(cudaError_t error) { check_cuda(error, "CUDA"); }

// ---- Device memory, poisoned so that an element nobody wrote shows -------------------------------------------------
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    poison();
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) { set(v); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  void poison() { fill(0xff); }  // NaN
  void fill(int byte) { check_cuda(cudaMemset(data_, byte, count_ * sizeof(T)), "cudaMemset"); }
  void set(const std::vector<T>& v) {
    check_cuda(cudaMemcpy(data_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to device");
  }
  std::vector<T> host() const {
    std::vector<T> v(count_);
    check_cuda(cudaDeviceSynchronize(), "kernel");
    check_cuda(cudaMemcpy(v.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from device");
    return v;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// ---- Random data ---------------------------------------------------------------------------------------------------
// bf16 rows of very different sizes.
inline std::vector<uint16_t> random_rows(int rows, int k, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(static_cast<size_t>(rows) * k);
  for (int r = 0; r < rows; ++r) {
    const float size = std::ldexp(1.0f, static_cast<int>(random() % 12) - 6);
    for (int c = 0; c < k; ++c) x[static_cast<size_t>(r) * k + c] = float_to_bf16(normal(random) * size);
  }
  return x;
}
inline std::vector<float> random_floats(size_t count, float size, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> v(count);
  for (auto& x : v) x = normal(random);
  return v;
}
inline std::vector<uint16_t> random_bf16(size_t count, float size, int seed) {
  std::vector<uint16_t> v(count);
  const auto values = random_floats(count, size, seed);
  std::transform(values.begin(), values.end(), v.begin(), float_to_bf16);
  return v;
}

// ---- Products in FP64 ----------------------------------------------------------------------------------------------
__device__ inline double to_double(float v) { return v; }
__device__ inline double to_double(uint16_t bf16) { return __uint_as_float(static_cast<uint32_t>(bf16) << 16); }

// A matrix as a product sees it: element (i, l) lies at i * row_stride + l * k_stride.
template <typename T>
struct Operand {
  const T* data;
  int64_t row_stride, k_stride;
};
template <typename A, typename B>
__global__ void reference_kernel(Operand<A> a, Operand<B> b, int rows, int columns, int k, double* sum,
                                 double* magnitude) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= static_cast<int64_t>(rows) * columns) return;
  const A* x = a.data + i / columns * a.row_stride;
  const B* w = b.data + i % columns * b.row_stride;
  double total = 0, size = 0;
  for (int l = 0; l < k; ++l) {
    const double term = to_double(x[l * a.k_stride]) * to_double(w[l * b.k_stride]);
    total += term, size += fabs(term);
  }
  sum[i] = total, magnitude[i] = size;
}
struct Reference {
  std::vector<double> sum, magnitude;  // of the terms, and of their magnitudes
};
template <typename A, typename B>
Reference reference_product(Operand<A> a, Operand<B> b, int rows, int columns, int k) {
  const size_t count = static_cast<size_t>(rows) * columns;
  Buffer<double> sum(count), magnitude(count);
  reference_kernel<<<static_cast<unsigned>((count + 127) / 128), 128>>>(a, b, rows, columns, k, sum.get(),
                                                                        magnitude.get());
  return {sum.host(), magnitude.host()};
}
// The largest |result - sum| / magnitude; NaN counts as infinite.
inline double worst_error(const std::vector<float>& result, const Reference& r) {
  double worst = result.size() == r.sum.size() ? 0 : INFINITY;
  for (size_t i = 0; i < r.sum.size(); ++i) {
    const double error = std::fabs(result[i] - r.sum[i]);
    if (!(error <= worst * r.magnitude[i])) worst = std::isnan(error) ? INFINITY : error / (r.magnitude[i] + 1e-300);
  }
  return worst;
}

// ---- Comparisons ---------------------------------------------------------------------------------------------------
inline double value(uint16_t bf16) { return bf16_to_float(bf16); }
inline double value(float x) { return x; }
inline double value(double x) { return x; }

// ||result - expected|| / ||expected||; NaN anywhere gives NaN, which no comparison passes.
template <typename A, typename B>
double relative_error(const std::vector<A>& result, const std::vector<B>& expected) {
  EXPECT_EQ(result.size(), expected.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = value(result[i]) - value(expected[i]);
    error += difference * difference, size += value(expected[i]) * value(expected[i]);
  }
  return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}
inline std::vector<float> from_bf16(const std::vector<uint16_t>& v) {
  std::vector<float> f(v.size());
  std::transform(v.begin(), v.end(), f.begin(), bf16_to_float);
  return f;
}

inline size_t differences(const auto& a, const auto& b) {
  size_t found = a.size() == b.size() ? 0 : std::max(a.size(), b.size());
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) found += a[i] != b[i];
  return found;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// ---- Other work ----------------------------------------------------------------------------------------------------
// Keeps part of the GPU busy on a stream of its own, so that a test's kernels meet different neighbours in every run.
static __global__ void other_work(float* data, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    for (int k = 0; k < 50; ++k) data[i] = data[i] * 0.5f + k;
}
class OtherWork {
 public:
  OtherWork() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~OtherWork() { cudaStreamDestroy(stream_); }
  void start(int run) {
    other_work<<<20 + run, 256, 0, stream_>>>(data_.get(), static_cast<int>(data_.size()));
    check_cuda(cudaGetLastError(), "other work");
  }

 private:
  cudaStream_t stream_;
  Buffer<float> data_{1 << 22};
};

}  // namespace plumb::kernels
