// mma.sync: products of 16 x 8, K = 16, bf16 operands, FP32 accumulators, a warp each; and the loads from shared memory
// that bring operands into their places. With lane = 4 r + q:
//   d[2 h + b]  row r + 8 h, column 2 q + b
//   a0 .. a3    rows r, r + 8, r, r + 8; K 2 q, + 1 (a0, a1) and 2 q + 8, + 9 (a2, a3)
//   b0, b1      column r; K 2 q, + 1 and 2 q + 8, + 9
// So the accumulators of two neighbouring products (16 columns), rounded, are the operand a of a product over those
// columns.
#pragma once
#include <cstdint>

namespace plumb::kernels::hopper {

// d += a b.
__device__ __forceinline__ void multiply_16x8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with K = 32 and e4m3 operands: a byte of K where the other has two, so the registers are named alike. Sums
// are FP32, unlike those of wgmma.
__device__ __forceinline__ void multiply_16x8_fp8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16 bits: lane l names row l % 8 of matrix l / 8, its own words are row r, columns 2 q, + 1 of
// each; transposed: rows 2 q, + 1, column r.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

}  // namespace plumb::kernels::hopper
