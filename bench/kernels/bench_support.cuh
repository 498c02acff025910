// What the benchmarks of the kernels share: random data made on the device, timing, the ceilings of the machine
// (measured in the same run), lines of a table and the result file. A line: time, operations or bytes that must be
// moved over time, and percent of the ceiling.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/launch.cuh"

namespace plumb::bench {

using plumb::kernels::check_cuda;
inline void check(cudaError_t error) { check_cuda(error, "CUDA"); }

// ---- Random data ---------------------------------------------------------------------------------------------------
__device__ inline uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdULL, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ inline float normal(uint64_t x) {
  const float u = (hash(2 * x) + 1.0f) * 2.3283064e-10f, v = hash(2 * x + 1) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}
__device__ inline void assign(uint16_t& to, float v) { to = __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ inline void assign(float& to, float v) { to = v; }
template <typename T>
__global__ void normal_kernel(T* out, size_t count, float size, float mean, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x)
    assign(out[i], mean + normal((seed << 40) + i) * size);
}

template <typename T>
class Array {
 public:
  explicit Array(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, count * sizeof(T)), "cudaMemset");
  }
  // bf16 or FP32, normally distributed.
  Array(size_t count, float size, uint64_t seed, float mean = 0) : Array(count) {
    normal_kernel<<<2048, 256>>>(data_, count, size, mean, seed);
    check_cuda(cudaDeviceSynchronize(), "random data");
  }
  explicit Array(const std::vector<T>& v) : Array(v.size()) {
    check_cuda(cudaMemcpy(data_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// ---- Timing --------------------------------------------------------------------------------------------------------
// Medians of several programs run in turn, so that the clock, which the power limit pulls down, is the same for all.
inline std::vector<double> medians_ms(int repeats, const std::vector<std::function<void()>>& runs) {
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start), "event"), check_cuda(cudaEventCreate(&stop), "event");
  std::vector<std::vector<double>> times(runs.size());
  for (int i = 0; i < repeats + 2; ++i)
    for (size_t r = 0; r < runs.size(); ++r) {
      check_cuda(cudaEventRecord(start), "record");
      runs[r]();
      check_cuda(cudaEventRecord(stop), "record");
      check_cuda(cudaEventSynchronize(stop), "kernel");
      float ms;
      check_cuda(cudaEventElapsedTime(&ms, start, stop), "time");
      if (i >= 2) times[r].push_back(ms);
    }
  cudaEventDestroy(start), cudaEventDestroy(stop);
  std::vector<double> medians;
  for (auto& t : times) {
    std::sort(t.begin(), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  return medians;
}
inline double median_ms(int repeats, const std::function<void()>& run) { return medians_ms(repeats, {run})[0]; }
// Many short launches as one graph: no gaps between them. -> ms of one.
inline double graph_ms(int launches, const std::function<void(int, cudaStream_t)>& run) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check_cuda(cudaStreamCreate(&stream), "stream");
  run(0, stream);  // sets attributes outside of the capture
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < launches; ++i) run(i, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "graph");
  check_cuda(cudaDeviceSynchronize(), "kernel");
  const double ms = median_ms(9, [&] { check_cuda(cudaGraphLaunch(executable, nullptr), "graph"); });
  cudaGraphExecDestroy(executable), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return ms / launches;
}
// Copies of a kernel's data between which its launches take turns, so that no launch finds its data in the L2 cache
// (50 MB), nor that of the launch before still to be written back in a time of its own.
inline int cold_copies(double bytes) { return 1 + static_cast<int>(4e8 / bytes); }
// As part of a run of launches whose data is not in the cache; run(copy, stream). -> ms of one.
inline double cold_ms(int copies, const std::function<void(int, cudaStream_t)>& run) {
  const int launches = (15 / copies + 1) * copies;
  return graph_ms(launches, [&](int i, cudaStream_t stream) { run(i % copies, stream); });
}
// fresh: a few launches after a rest; sustained: many in a row, when the power limit has pulled the clock down.
struct Timing {
  double fresh, sustained;
};
inline Timing measure(const std::function<void()>& run, int sustained_launches = 30) {
  run();
  check_cuda(cudaDeviceSynchronize(), "kernel");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double fresh = median_ms(5, run);
  return {fresh, median_ms(sustained_launches, run)};
}

// ---- Ceilings ------------------------------------------------------------------------------------------------------
// Both operands in shared memory, products of 64 x 256 x 16, two warpgroups a multiprocessor, random data.
constexpr int kPeakSteps = 4096;
static __global__ void __launch_bounds__(256, 1) peak_kernel(const uint4* random, float* out) {
  using namespace kernels::hopper;
  extern __shared__ __align__(1024) uint8_t tile[];
  for (int i = threadIdx.x; i < 4096; i += 256) reinterpret_cast<uint4*>(tile)[i] = random[i];
  async_proxy_fence();
  __syncthreads();
  float d[128] = {};
  const uint32_t base = shared_address(tile);
  for (int step = 0; step < kPeakSteps; step += 4) {
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<kColumnsContracted, kRowsContracted>(d, tile_descriptor(base + k * 32),
                                                 tile_descriptor(base + 4 * 8192 + k * 2048, 8192), true);
    product_commit();
    product_wait<1>();
  }
  product_wait<0>();
  pin(d);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}

// 16 bytes a lane, four of them in flight.
static __global__ void __launch_bounds__(256) plain_copy_kernel(const uint4* from, uint4* to, size_t units) {
  const size_t first = blockIdx.x * size_t{1024} + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i * 256 < units) v[i] = from[first + i * 256];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i * 256 < units) to[first + i * 256] = v[i];
}

class Report {
 public:
  // name: of the benchmark and its result file.
  explicit Report(const char* name) : name_(name) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    cudaDeviceProp device;
    check_cuda(cudaGetDeviceProperties(&device, 0), "device");
    device_ = device.name;
    {
      const Array<uint16_t> random(32768, 1, 9);
      const Array<float> out(device.multiProcessorCount * 256);
      check_cuda(cudaFuncSetAttribute(peak_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536), "peak");
      const double ms = median_ms(9, [&] {
        for (int i = 0; i < 4; ++i)
          peak_kernel<<<device.multiProcessorCount, 256, 65536>>>(reinterpret_cast<const uint4*>(random.get()),
                                                                  out.get());
      });
      peak_ = 4.0 * device.multiProcessorCount * 2 * kPeakSteps * 2 * 64 * 256 * 16 / ms * 1e-9;
    }
    constexpr size_t bytes = size_t{1} << 30;
    const Array<uint16_t> from(bytes / 2, 1, 1), to(bytes / 2);
    copy_ = 2.0 * bytes * 1e-9 /
            median_ms(9, [&] { cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice); });
    std::printf("%s: copy %.2f TB/s, bf16 tensor peak %.0f TFLOPS\n", device_.c_str(), copy_, peak_);
    figure("ceiling: copy", copy_, "TB/s"), figure("ceiling: bf16 products", peak_, "TFLOPS");
  }
  // Arithmetic-bound work. ceiling: TFLOPS, 0 for the measured bf16 peak.
  void product(const std::string& what, double flop, Timing t, double ceiling = 0) {
    if (ceiling == 0) ceiling = peak_;
    const double fresh = flop / t.fresh * 1e-9, sustained = flop / t.sustained * 1e-9;
    std::printf("%-58s fresh %8.3f ms %5.0f TFLOPS %3.0f %%, sustained %8.3f ms %5.0f TFLOPS %3.0f %%\n", what.c_str(),
                t.fresh, fresh, 100 * fresh / ceiling, t.sustained, sustained, 100 * sustained / ceiling);
    figure(what + ", fresh", fresh, "TFLOPS", t.fresh, 100 * fresh / ceiling);
    figure(what + ", sustained", sustained, "TFLOPS", t.sustained, 100 * sustained / ceiling);
  }
  // The same, timed as part of a run of launches.
  void product(const std::string& what, double flop, double ms) {
    const double rate = flop / ms * 1e-9;
    std::printf("%-58s %9.4f ms %5.0f TFLOPS %3.0f %% of the bf16 peak\n", what.c_str(), ms, rate, 100 * rate / peak_);
    figure(what, rate, "TFLOPS", ms, 100 * rate / peak_);
  }
  // Memory-bound work: bytes read and written.
  void bytes(const std::string& what, double bytes, double ms) {
    const double rate = bytes / ms * 1e-9;
    std::printf("%-58s %9.4f ms %5.2f TB/s %3.0f %% of the copy rate\n", what.c_str(), ms, rate, 100 * rate / copy_);
    figure(what, rate, "TB/s", ms, 100 * rate / copy_);
  }
  // The same, timed by cold_ms; and as percent of the rate that a plain copy of as many bytes reaches, timed alike.
  void cold(const std::string& what, double bytes, double ms) {
    const double rate = bytes / ms * 1e-9, ceiling = copy_of(bytes);
    std::printf("%-58s %9.4f ms %5.2f TB/s %3.0f %% of the copy rate, %3.0f %% of a copy of this size (%.2f TB/s)\n",
                what.c_str(), ms, rate, 100 * rate / copy_, 100 * rate / ceiling, ceiling);
    figure(what, rate, "TB/s", ms, 100 * rate / copy_, 100 * rate / ceiling);
  }
  void time(const std::string& what, double ms) {
    std::printf("%-58s %9.2f us\n", what.c_str(), ms * 1e3);
    figure(what, ms * 1e3, "us", ms);
  }
  void ratio(const std::string& what, double percent) {
    std::printf("%-58s %9.1f %%\n", what.c_str(), percent);
    figure(what, percent, "%");
  }
  void write(int argc, char** argv) const {
    if (argc < 2) return;
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
    std::FILE* file = std::fopen(argv[1], "w");
    if (!file) throw std::runtime_error(std::string("cannot write ") + argv[1]);
    std::fprintf(file,
                 "{\n  \"name\": \"%s\",\n  \"date\": \"%s\",\n  \"device\": \"%s\",\n"
                 "  \"command\": \"make bench-gpu\",\n  \"figures\": [\n%s\n  ]\n}\n",
                 name_, date, device_.c_str(), figures_.c_str());
    std::fclose(file);
  }
  double peak() const { return peak_; }  // TFLOPS
  double copy() const { return copy_; }  // TB/s

 private:
  // TB/s of the driver's copy or of plain_copy_kernel, whichever is faster; bytes read and written.
  double copy_of(double bytes) {
    const size_t half = static_cast<size_t>(bytes / 32) * 16;
    if (const auto known = copies_.find(half); known != copies_.end()) return known->second;
    const int copies = cold_copies(bytes);
    const Array<uint8_t> from(half * copies), to(half * copies);
    normal_kernel<<<2048, 256>>>(reinterpret_cast<uint16_t*>(from.get()), half * copies / 2, 1.f, 0.f, 1);
    const double driver = cold_ms(copies, [&](int i, cudaStream_t stream) {
      cudaMemcpyAsync(to.get() + i * half, from.get() + i * half, half, cudaMemcpyDeviceToDevice, stream);
    });
    const double plain = cold_ms(copies, [&](int i, cudaStream_t stream) {
      plain_copy_kernel<<<static_cast<unsigned>((half / 16 + 1023) / 1024), 256, 0, stream>>>(
          reinterpret_cast<const uint4*>(from.get() + i * half), reinterpret_cast<uint4*>(to.get() + i * half),
          half / 16);
    });
    return copies_[half] = 2e-9 * half / std::min(driver, plain);
  }
  void figure(const std::string& what, double value, const char* unit, double ms = 0, double percent = 0,
              double percent_of_size = 0) {
    char line[320];
    int length = std::snprintf(line, sizeof line, "%s    {\"name\": \"%s\", \"value\": %.4g, \"unit\": \"%s\"",
                               figures_.empty() ? "" : ",\n", what.c_str(), value, unit);
    if (ms > 0) length += std::snprintf(line + length, sizeof line - length, ", \"ms\": %.4g", ms);
    if (percent > 0)
      length += std::snprintf(line + length, sizeof line - length, ", \"percent_of_ceiling\": %.1f", percent);
    if (percent_of_size > 0)
      length += std::snprintf(line + length, sizeof line - length, ", \"percent_of_same_size\": %.1f", percent_of_size);
    std::snprintf(line + length, sizeof line - length, "}");
    figures_ += line;
  }
  const char* name_;
  std::string device_, figures_;
  double peak_ = 0, copy_ = 0;
  std::map<size_t, double> copies_;
};

}  // namespace plumb::bench
