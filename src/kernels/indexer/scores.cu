#include "kernels/indexer/scores.h"

#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/device.h"
#include "kernels/hopper/shared_memory.cuh"

namespace plumb::kernels {
namespace indexer {
namespace {

// A thread has four channels.
__global__ void __launch_bounds__(256) values_kernel(const uint8_t* records, int64_t vectors, uint2* values) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  const int64_t vector = i / (kIndexDim / 4);
  const int place = static_cast<int>(i % (kIndexDim / 4));
  if (vector >= vectors) return;
  const uint8_t* record = records + vector * kIndexRecordBytes;
  const IndexTail& tail = *reinterpret_cast<const IndexTail*>(record + kIndexDim);
  const float power = __uint_as_float((tail.exponents >> 8 * (place / 8) & 255) << 23);
  const uint32_t codes = reinterpret_cast<const uint32_t*>(record)[place];
  float v[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    __nv_fp8_e4m3 code;
    code.__x = static_cast<__nv_fp8_storage_t>(codes >> 8 * k);
    v[k] = static_cast<float>(code) * power;
  }
  values[i] = make_uint2(hopper::pack_bf16(v[0], v[1]), hopper::pack_bf16(v[2], v[3]));
}

}  // namespace
}  // namespace indexer

cudaError_t index_values(const void* records, int64_t vectors, void* values, cudaStream_t stream) {
  if (vectors < 0) return cudaErrorInvalidValue;
  if (vectors == 0) return cudaSuccess;
  indexer::values_kernel<<<static_cast<unsigned>((vectors * (kIndexDim / 4) + 255) / 256), 256, 0, stream>>>(
      static_cast<const uint8_t*>(records), vectors, static_cast<uint2*>(values));
  return cudaGetLastError();
}

cudaError_t index_scores(const IndexSelection& s, int first_group, int groups, int columns, float* scores,
                         cudaStream_t stream) {
  using namespace indexer;
  if (groups <= 0 || s.entries <= 0) return cudaErrorInvalidValue;
  // Few groups: several blocks share a group's tiles. Scores do not notice.
  const int splits = std::clamp(2 * multiprocessors() / groups, 1, std::max(1, columns / kIndexTile / 4));
  const Arguments a{s.w, s.device, scores, first_group, first_group + groups, s.groups->rows, columns, s.topk};
  if (!is_hopper()) return scores_portable(s, a, splits, stream);
  return s.form == IndexForm::record ? scores_of_records(s, a, splits, stream) : scores_of_bf16(s, a, splits, stream);
}

}  // namespace plumb::kernels
