// What the GPU benchmarks share: buffers with random bf16 values, the median time of a launch, the copy rate of the
// machine, and the result file. A line of a memory-bound kernel: time, bytes that it must move over time, and percent
// of the copy rate measured in the same run.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

namespace gpu_bench {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    check(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
    check(cudaMemset(data, 0, n * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
};

// Normal numbers from a counter (Box-Muller on a hash).
__device__ inline float normal(size_t i, uint64_t seed) {
  uint64_t x = i * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull, x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 0.5f) * 2.3283064e-10f,
              v = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  return sqrtf(-2.f * logf(fminf(u, 1.f))) * cospif(2.f * v);
}
template <class T>
__global__ void fill_normal(T* out, size_t count, uint64_t seed, float deviation, float mean) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    out[i] = static_cast<T>(mean + deviation * normal(i, seed));
}
template <class T>
struct Normal : Buffer<T> {
  Normal(size_t n, int seed, float deviation = 1, float mean = 0) : Buffer<T>(n) {
    fill_normal<<<2048, 256>>>(this->data, n, seed, deviation, mean);
  }
};
using Bf16 = __nv_bfloat16;

inline double median_ms(int repeats, const std::function<void(int)>& work) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start)), check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {
    check(cudaEventRecord(start));
    work(i);
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(ms);
  }
  check(cudaEventDestroy(start)), check(cudaEventDestroy(stop));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Read and write together, TB/s.
inline double copy_tb_per_s() {
  constexpr size_t bytes = size_t{1} << 31;
  Buffer<uint8_t> from(bytes), to(bytes);
  const double ms =
      median_ms(9, [&](int) { check(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice)); });
  return 2.0 * bytes / ms * 1e-9;
}

class Report {
 public:
  Report(const char* name, const char* file) : name_(name), file_(file) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    check(cudaGetDeviceProperties(&device_, 0));
    copy_ = copy_tb_per_s();
    std::printf("%s: copy %.2f TB/s\n", device_.name, copy_);
  }
  void bytes(const char* what, double ms, double bytes) {
    const double rate = bytes / ms * 1e-9;
    std::printf("%-56s %8.4f ms  %6.2f TB/s  %5.1f %% of copy\n", what, ms, rate, rate / copy_ * 100);
    char line[256];
    std::snprintf(line, sizeof line, "{\"what\": \"%s\", \"ms\": %.4f, \"tb_per_s\": %.2f, \"percent_of_copy\": %.1f}",
                  what, ms, rate, rate / copy_ * 100);
    add(line);
  }
  void flops(const char* what, double ms, double flop, double peak_tflops) {
    const double rate = flop / ms * 1e-9;
    std::printf("%-56s %8.4f ms  %6.1f TFLOPS  %5.1f %% of tensor peak\n", what, ms, rate, rate / peak_tflops * 100);
    char line[256];
    std::snprintf(line, sizeof line,
                  "{\"what\": \"%s\", \"ms\": %.4f, \"tflops\": %.1f, \"percent_of_tensor_peak\": %.1f}", what, ms,
                  rate, rate / peak_tflops * 100);
    add(line);
  }
  void time(const char* what, double ms) {
    std::printf("%-56s %8.4f ms\n", what, ms);
    char line[256];
    std::snprintf(line, sizeof line, "{\"what\": \"%s\", \"ms\": %.4f}", what, ms);
    add(line);
  }
  int write() const {
    if (!file_) return 0;
    std::FILE* file = std::fopen(file_, "w");
    if (!file) return std::perror(file_), 1;
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof date, "%F", std::gmtime(&now));
    std::fprintf(file,
                 "{\n  \"name\": \"%s\",\n  \"date\": \"%s\",\n  \"device\": \"%s\",\n  \"command\": \"make "
                 "bench-gpu\",\n  \"copy_tb_per_s\": %.2f,\n  \"figures\": [\n%s\n  ]\n}\n",
                 name_, date, device_.name, copy_, lines_.c_str());
    return std::fclose(file) != 0;
  }
  double copy() const { return copy_; }
  int processors() const { return device_.multiProcessorCount; }

 private:
  void add(const char* line) { lines_ += (lines_.empty() ? "    " : ",\n    ") + std::string(line); }
  const char *name_, *file_;
  cudaDeviceProp device_;
  double copy_ = 0;
  std::string lines_;
};

}  // namespace gpu_bench
