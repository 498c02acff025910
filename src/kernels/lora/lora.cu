// A pair's matrices in the forms that products read: one packed for the epilogues, the other in three planes for the
// way down. Bound by memory for experts, by the launch for all others: hence one launch for both, which also leaves
// their addresses where kernels look for them.
#include "kernels/grouped_linear/weight_format.h"
#include "kernels/launch.cuh"
#include "kernels/lora/low_rank.cuh"
#include "kernels/lora/prepare.h"
#include "kernels/row_linear/planes.cuh"

namespace plumb::kernels::lora {
namespace {

constexpr int kThreads = 256;

// Four words: high and low parts of numbers 2 q, + 1 of eight of the rank, of outputs r and r + 8 of 16.
__device__ __forceinline__ void pack_item(const Factor& f, size_t i) {
  const int items = f.n * 2, lane = static_cast<int>(i % 32);  // of eight of the rank
  const int output = static_cast<int>(i % items / 32) * 16 + lane / 4;
  const size_t eight = i / items, group = eight / eights(f.rank);
  const int j = static_cast<int>(eight % eights(f.rank)) * 8 + lane % 4 * 2;
  Split parts[2] = {};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    if (j >= f.rank) break;
    const int row = f.gate_up ? grouped_linear::natural_row(output + 8 * t, f.n) : output + 8 * t;
    if (f.transposed) {
      const float* from = f.from + (group * f.rank + j) * f.n + row;
      parts[t] = split(make_float2(__ldg(from), __ldg(from + f.n)));
    } else {
      parts[t] = split(__ldg(reinterpret_cast<const float2*>(f.from + (group * f.n + row) * f.rank + j)));
    }
  }
  reinterpret_cast<uint4*>(f.packed)[i] = make_uint4(parts[0].high, parts[0].low, parts[1].high, parts[1].low);
}

// A thread an item: those of the factor, then those of the planes.
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Factor factor, const row_linear::Split planes, size_t factor_items, Addresses addresses) {
  const size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x;
  if (i == 0) {
    if (addresses.factor) *addresses.factor = factor.packed;
    if (addresses.planes) *addresses.planes = planes.to;
  }
  if (i < factor_items)
    pack_item(factor, i);
  else if (planes.to && i - factor_items < row_linear::items_of(planes))
    row_linear::split_item(planes, i - factor_items);
}

size_t items(const Factor& f) { return f.packed ? static_cast<size_t>(f.groups) * eights(f.rank) * f.n * 2 : 0; }

void check(const Factor& f) {
  require(f.groups > 0 && f.n > 0 && f.n % 32 == 0 && f.rank > 0 && f.rank % 4 == 0 &&
              (!f.gate_up || f.n % grouped_linear::kRecordRows == 0) && aligned(f.from, 8) && aligned(f.packed, 16),
          "lora: factor",
          "groups, n and rank must be positive, n a multiple of 32 (gate and up: of 256), the rank of 4, the matrix "
          "aligned to 8 bytes, the packed one to 16");
}

}  // namespace

size_t factor_bytes(int groups, int n, int rank) {
  return static_cast<size_t>(groups) * eights(rank) * n * kFactorWords * sizeof(uint32_t);
}

void prepare(const Factor& factor, const row_linear::Split& planes, const Addresses& addresses, cudaStream_t stream) {
  if (factor.packed) check(factor);
  if (planes.to) check_planes(planes);
  const size_t count = items(factor) + (planes.to ? row_linear::items_of(planes) : 0);
  prepare_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      factor, planes, items(factor), addresses);
  check_cuda(cudaGetLastError(), "lora: prepare");
}

void pack_factor(const float* from, int groups, int n, int rank, bool transposed, bool gate_up, uint32_t* packed,
                 cudaStream_t stream) {
  prepare({from, groups, n, rank, transposed, gate_up, packed}, {}, {}, stream);
}

}  // namespace plumb::kernels::lora
