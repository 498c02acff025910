// Speed of sparse attention: forward and backward of a training row of 16,384 tokens, forward of decoding steps. One
// line each: time, TFLOPS (real keys only; 2 products forward, 5 backward, of 2 * heads * 512 a key) and percent of the
// ceiling measured in the same run. usage: sparse_attention_bench [RESULT.json]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/sparse_attention/sparse_attention.h"

namespace {

using namespace plumb::kernels;
constexpr int kDim = kAttentionDim, kHeads = 64;
constexpr float kScale = 0.044194174f;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) { check(cudaMalloc(&data, n * sizeof(T))); }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
};

// Normal numbers from a counter (Box-Muller on a hash).
__global__ void fill_normal(__nv_bfloat16* out, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint64_t x = i * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull, x ^= x >> 31;
    const float u = (static_cast<uint32_t>(x) + 0.5f) * 2.3283064e-10f,
                v = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
    out[i] = __float2bfloat16(sqrtf(-2.f * logf(fminf(u, 1.f))) * cospif(2.f * v));
  }
}
struct Normal : Buffer<__nv_bfloat16> {
  Normal(size_t n, int seed) : Buffer(n) { fill_normal<<<2048, 256>>>(data, n, seed); }
};

double median_ms(int repeats, const std::function<void(int)>& work) {
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
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// ---- ceilings ----
// Both operands in shared memory, 64 x 256 x 16 products, two warpgroups an SM: the tensor cores' rate on random data.
constexpr int kPeakSteps = 4096;
__global__ void __launch_bounds__(256, 1) peak_kernel(const uint4* random, float* out) {
  using namespace hopper;
  extern __shared__ __align__(1024) uint8_t tile[];  // 64 KB: 8 panels of 64 rows
  for (int i = threadIdx.x; i < 4096; i += 256) reinterpret_cast<uint4*>(tile)[i] = random[i];
  async_proxy_fence();
  __syncthreads();
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0;
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
double peak_tflops(int processors) {
  Normal random(32768, 9);
  Buffer<float> out(processors * 256);
  check(cudaFuncSetAttribute(peak_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  const double ms = median_ms(9, [&](int) {
    for (int i = 0; i < 4; ++i)
      peak_kernel<<<processors, 256, 65536>>>(reinterpret_cast<const uint4*>(random.data), out.data);
  });
  return 4.0 * processors * 2 * kPeakSteps * 2 * 64 * 256 * 16 / ms * 1e-9;
}
double copy_tb_per_s() {
  constexpr size_t bytes = size_t{1} << 31;
  Buffer<uint8_t> from(bytes), to(bytes);
  const double ms =
      median_ms(9, [&](int) { check(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice)); });
  return 2.0 * bytes / ms * 1e-9;
}

// ---- lists ----
struct Lists {
  std::vector<int> begin{0}, row;
  void end_query() { begin.push_back(static_cast<int>(row.size())); }
};
// Rows 0 .. queries - 1 are window keys, then compressed entries. full: every query has all `keys`, as if far behind
// the start.
Lists training_lists(int queries, int keys, bool full) {
  Lists lists;
  std::mt19937 random(7);
  const int entries = queries / 4;
  std::vector<char> selected(entries + 1, 0);
  int count = 0;
  for (int t = 0; t < queries; ++t) {
    const int start = std::max(t - 127, 0), visible = full ? entries : (t + 1) / 4;
    for (int s = 0; s < 128 && (full || start + s <= t); ++s) lists.row.push_back(start + s);
    if (keys == 256)
      for (int c = 0; c < 128 && (full || (c + 1) * 128 <= t + 1); ++c) lists.row.push_back(queries + c);
    if (keys == 640) {
      const int wanted = std::min(512, visible);
      if (visible > 512)  // 15 % of the selection changes from one query to the next
        for (int drop = 0; drop < 77 && count > 0;) {
          const int c = random() % visible;
          if (selected[c]) selected[c] = 0, --count, ++drop;
        }
      while (count < wanted) {
        const int c = random() % visible;
        if (!selected[c]) selected[c] = 1, ++count;
      }
      for (int c = 0; c < visible; ++c)
        if (selected[c]) lists.row.push_back(queries + c);
    }
    lists.end_query();
  }
  return lists;
}

// ---- lines and result file ----
std::string figures;
void report(const char* what, double ms, double tflops, double percent, const char* ceiling) {
  std::printf("%-44s %8.4f ms  %6.1f TFLOPS  %5.1f %% of %s\n", what, ms, tflops, percent, ceiling);
  char line[256];
  std::snprintf(line, sizeof line,
                "%s    {\"what\": \"%s\", \"ms\": %.4f, \"tflops\": %.1f, \"percent\": %.1f, \"of\": \"%s\"}",
                figures.empty() ? "" : ",\n", what, ms, tflops, percent, ceiling);
  figures += line;
}

void bench_training(int keys, bool full, double peak) {
  const int queries = 16384, rows = queries + queries / 4;
  const Lists lists = training_lists(queries, keys, full);
  Normal q(size_t{16384} * kHeads * kDim, 1), d_o(q.count, 3), o(q.count, 4), dq(q.count, 5),
      kv(static_cast<size_t>(rows) * kDim, 2);
  Buffer<int> begin(lists.begin), row(lists.row);
  Buffer<float> sink(std::vector<float>(kHeads, 0.5f)), lse(static_cast<size_t>(queries) * kHeads), dkv(kv.count),
      d_sink(kHeads);
  const double pairs = static_cast<double>(lists.row.size()) * kHeads * kDim;
  const SparseAttentionForward f{q.data, kv.data, {begin.data, row.data}, sink.data, o.data, lse.data, queries,
                                 kHeads, kScale};
  char what[64];
  double ms = median_ms(15, [&](int) { check(sparse_attention_forward(f, nullptr)); });
  std::snprintf(what, sizeof what, "forward, %d keys, %s", keys, full ? "full lists" : "causal row");
  report(what, ms, pairs * 4 / ms * 1e-9, pairs * 4 / ms * 1e-9 / peak * 100, "tensor peak");
  SparseAttentionBackward b{q.data,   kv.data, f.lists,     sink.data, o.data,  lse.data, d_o.data, dq.data,
                            dkv.data, false,   d_sink.data, nullptr,   queries, kHeads,   rows,     kScale};
  Buffer<uint8_t> workspace(sparse_attention_backward_workspace(b));
  b.workspace = workspace.data;
  ms = median_ms(9, [&](int) { check(sparse_attention_backward(b, nullptr)); });
  uint32_t repeated;
  check(cudaMemcpy(&repeated, workspace.data, 4, cudaMemcpyDeviceToHost));
  std::snprintf(what, sizeof what, "backward, %d keys, %s%s", keys, full ? "full lists" : "causal row",
                repeated ? ", repeated" : "");
  report(what, ms, pairs * 10 / ms * 1e-9, pairs * 10 / ms * 1e-9 / peak * 100, "tensor peak");
}

// Each query has its own sequence of 128 window rows and 2,048 entries; several layers' worth, so that L2 holds none of
// it.
void bench_decoding(int batch, double peak, double copy) {
  const int keys = 640, rows = 2176, layers = std::max(2, 256 / batch);
  Lists lists;
  std::mt19937 random(11);
  for (int t = 0; t < batch; ++t) {
    std::vector<int> chosen(2048);
    for (int c = 0; c < 2048; ++c) chosen[c] = 128 + c;
    std::shuffle(chosen.begin(), chosen.end(), random);
    std::sort(chosen.begin(), chosen.begin() + keys - 128);
    for (int s = 0; s < 128; ++s) lists.row.push_back(t * rows + s);
    for (int c = 0; c < keys - 128; ++c) lists.row.push_back(t * rows + chosen[c]);
    lists.end_query();
  }
  const size_t layer = static_cast<size_t>(batch) * rows * kDim;
  Normal q(static_cast<size_t>(batch) * kHeads * kDim, 1), o(q.count, 2), kv(layer * layers, 3);
  Buffer<int> begin(lists.begin), row(lists.row);
  Buffer<float> sink(std::vector<float>(kHeads, 0.5f)), lse(static_cast<size_t>(batch) * kHeads);
  SparseAttentionForward f{q.data, kv.data, {begin.data, row.data}, sink.data, o.data, lse.data, batch, kHeads, kScale};
  constexpr int kLaunches = 50;  // an event pair around one would time the launch
  const double ms = median_ms(9,
                              [&](int) {
                                for (int i = 0; i < kLaunches; ++i) {
                                  f.kv = kv.data + layer * (i % layers);
                                  check(sparse_attention_forward(f, nullptr));
                                }
                              }) /
                    kLaunches;
  const double flop = static_cast<double>(batch) * keys * kHeads * kDim * 4,
               bytes = static_cast<double>(batch) * (keys * 1024.0 + 131072);
  const double bound = std::max(flop / peak, bytes / copy) * 1e-9;
  char what[64];
  std::snprintf(what, sizeof what, "decoding, batch %d, %d keys", batch, keys);
  report(what, ms, flop / ms * 1e-9, bound / ms * 100, flop / peak > bytes / copy ? "tensor bound" : "copy bound");
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  const double copy = copy_tb_per_s(), peak = peak_tflops(device.multiProcessorCount);
  std::printf("%s: copy %.2f TB/s, bf16 tensor peak %.0f TFLOPS\n", device.name, copy, peak);
  for (int keys : {640, 256, 128})
    for (bool full : {true, false}) bench_training(keys, full, peak);
  for (int batch : {1, 64, 256}) bench_decoding(batch, peak, copy);
  if (argc < 2) return 0;
  std::FILE* file = std::fopen(argv[1], "w");
  if (!file) return std::perror(argv[1]), 1;
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%F", std::gmtime(&now));
  std::fprintf(file,
               "{\n  \"name\": \"sparse_attention\",\n  \"date\": \"%s\",\n  \"device\": \"%s\",\n  \"command\": "
               "\"make bench-gpu\",\n"
               "  \"copy_tb_per_s\": %.2f,\n  \"tensor_peak_tflops\": %.0f,\n  \"figures\": [\n%s\n  ]\n}\n",
               date, device.name, copy, peak, figures.c_str());
  return std::fclose(file) != 0;
}
