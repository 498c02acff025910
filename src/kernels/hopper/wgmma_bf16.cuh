// Tensor-core products of a warpgroup (wgmma) with bf16 operands and FP32 accumulators: D[64, n] += A[64, 16] B[16, n].
//
// Operands in shared memory are tiles of 64 columns (128 bytes a row) in the 128-byte swizzle, so one tile serves as
// K-major operand (its columns are contracted) and as MN-major operand (its rows are contracted): template arguments
// kMajorA, kMajorB. Accumulators: lane 4r + q of warp w holds columns 8i + 2q, 8i + 2q + 1 of rows 16w + r and 16w + r
// + 8 in d[4i + 2 * half + {0, 1}]. Bits do not depend on n or on where the operands are (tests/kernels).
#pragma once

#include <cstdint>

#include "kernels/hopper/wgmma.cuh"

namespace plumb::kernels::hopper {

constexpr int kRowsContracted = 1, kColumnsContracted = 0;  // MN-major, K-major in PTX's words

// Byte offset of 16-byte unit `unit` of row `row` in a tile of 128-byte rows.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t unit) {
  return row * 128 + ((unit ^ (row & 7)) << 4);
}
// panel_bytes: distance of neighbouring 64-column tiles, used where n spans several of them (MN-major only). Groups of
// eight rows lie 1,024 bytes apart. Steps of 16 contracted columns advance the address by 32, of 16 contracted rows by
// 2,048.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t panel_bytes = 0) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(panel_bytes >> 4) << 16) |
         (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

// clang-format off
#define PLUMB_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PLUMB_D16(d, i) PLUMB_D4(d, i), PLUMB_D4(d, i + 4), PLUMB_D4(d, i + 8), PLUMB_D4(d, i + 12)
#define PLUMB_D32(d, i) PLUMB_D16(d, i), PLUMB_D16(d, i + 16)
#define PLUMB_D64(d, i) PLUMB_D32(d, i), PLUMB_D32(d, i + 32)

template <int kMajorA, int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {  // n = 8
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %8;\n}"
      : PLUMB_D4(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));
}
template <int kMajorA, int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {  // n = 32
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %19, %20;\n}"
      : PLUMB_D16(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));
}
template <int kMajorA, int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {  // n = 64
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, %35, %36;\n}"
      : PLUMB_D32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));
}
template <int kMajorA, int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {  // n = 128
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, %67, %68;\n}"
      : PLUMB_D64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));
}
template <int kMajorA, int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {  // n = 256
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : PLUMB_D64(d, 0), PLUMB_D64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));
}
// n = 128, A from registers: a fragment of 16 columns, laid out as the accumulators.
template <int kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : PLUMB_D64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorB));
}
#undef PLUMB_D4
#undef PLUMB_D16
#undef PLUMB_D32
#undef PLUMB_D64
// clang-format on

}  // namespace plumb::kernels::hopper
