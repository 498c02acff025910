// Copies into shared memory by the copy engine, completing on an mbarrier, and the tensor maps that describe matrices
// to it. Source: PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor"; CUDA driver API, cuTensorMapEncodeTiled.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace plumb::kernels::hopper {

// Contiguous bytes; source, destination and size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Fetches the descriptor itself, so that the first copy does not wait for it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of the map whose first element is (inner, outer); elements outside of the matrix arrive as zeros.
__device__ __forceinline__ void copy_tensor_2d(uint32_t destination, const CUtensorMap* map, int inner, int outer,
                                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(destination),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_tensor_3d(uint32_t destination, const CUtensorMap* map, int inner, int middle,
                                               int outer, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier)
      : "memory");
}

// A tensor of up to three dimensions as its copies see it, the innermost first: elements, the bytes from one to the
// next in the outer dimensions (multiples of 16), and the box that a copy takes (at most 256 of each).
struct TensorShape {
  int rank;
  cuuint64_t size[3], stride[2];
  cuuint32_t box[3];
};
inline CUtensorMap tensor_map(const void* first, CUtensorMapDataType type, const TensorShape& s,
                              CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || !entry) throw std::runtime_error("the CUDA driver lacks cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  const cuuint32_t step[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, s.rank, const_cast<void*>(first), s.size, s.stride, s.box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string sizes = std::to_string(s.size[0]);
    for (int i = 1; i < s.rank; ++i) sizes += " x " + std::to_string(s.size[i]);
    throw std::runtime_error("cuTensorMapEncodeTiled refused a tensor of " + sizes + ": error " +
                             std::to_string(result));
  }
  return map;
}

// A matrix [rows, columns] read in boxes of box_rows x box_columns. The address and the length of a row in bytes are
// multiples of 16.
inline CUtensorMap matrix_map(const void* matrix, CUtensorMapDataType type, int element_bytes, int rows, int columns,
                              int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
  return tensor_map(matrix, type,
                    {2,
                     {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                     {static_cast<cuuint64_t>(columns) * element_bytes},
                     {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}},
                    swizzle);
}

// Bytes in boxes of box_rows x 128 that land in the 128-byte swizzle.
inline CUtensorMap byte_matrix_map(const uint8_t* matrix, int rows, int columns, int box_rows) {
  return matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, columns, box_rows, 128, CU_TENSOR_MAP_SWIZZLE_128B);
}
inline CUtensorMap float_matrix_map(const float* matrix, int rows, int columns, int box_rows, int box_columns) {
  return matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, rows, columns, box_rows, box_columns,
                    CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace plumb::kernels::hopper
