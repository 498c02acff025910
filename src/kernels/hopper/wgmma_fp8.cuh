// The FP8 (e4m3 x e4m3 -> FP32) warpgroup product m64nNk32 and what surrounds it. Source: PTX ISA, "wgmma".
//
// d: the N/2 accumulators of this thread. Thread t of the warpgroup holds, of columns 8 j + 2 (t % 4) + {0, 1}, row
// 16 (t / 32) + t % 32 / 4 in d[4 j + {0, 1}] and the row 8 below in d[4 j + {2, 3}].
// a: the 64-row operand, as four registers (of 32 k the bytes 4 (t % 4) + 0..3 of both rows, then the same + 16) or as
// a shared-memory descriptor; b: descriptor of the operand with N rows. Both K-major.
#pragma once
#include <cstdint>

#include "kernels/hopper/wgmma.cuh"

namespace plumb::kernels::hopper {

// Operand in shared memory, rows of 128 bytes in the 128-byte swizzle: 8-row groups lie 1,024 bytes apart. The low word
// counts in 16 bytes, so `swizzled_low(start) + bytes / 16` moves the operand: one addition, on the uniform path.
__device__ __forceinline__ uint32_t swizzled_low(uint32_t address) { return (address >> 4) | (1u << 16); }
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t low) {
  return static_cast<uint64_t>((1024u >> 4) | (1u << 30)) << 32 | low;
}
// The same without swizzle: blocks of 8 rows x 16 bytes; the distances of neighbouring blocks in bytes.
__device__ __forceinline__ uint64_t plain_operand(uint32_t address, uint32_t along_k, uint32_t along_rows) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(along_k >> 4) << 16) |
         (static_cast<uint64_t>(along_rows >> 4) << 32);
}

// The instruction names every accumulator: operand lists for 4, 8, ... 64 of them, each the previous one and its
// sequel.
#define WGMMA_D4 "%0, %1, %2, %3"
#define WGMMA_D8 WGMMA_D4 ", %4, %5, %6, %7"
#define WGMMA_D16 WGMMA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D32 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D64                                                                    \
  WGMMA_D32                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_O4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_O8(i) WGMMA_O4(i), WGMMA_O4(i + 4)
#define WGMMA_O16(i) WGMMA_O8(i), WGMMA_O8(i + 8)
#define WGMMA_O32(i) WGMMA_O16(i), WGMMA_O16(i + 16)
#define WGMMA_O64(i) WGMMA_O32(i), WGMMA_O32(i + 32)
// count = columns / 2; p0.. are the numbers of the operands after the accumulators.
#define WGMMA_SHAPE(columns, count, p0, p1, p2, p3, p4, p5)                                                         \
  template <>                                                                                                       \
  struct Fp8Product<columns> {                                                                                      \
    static __device__ __forceinline__ void rows_from_registers(float* d, const uint32_t* a, uint64_t b, int keep) { \
      asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #p5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns  \
                   "k32.f32.e4m3.e4m3 {" WGMMA_D##count "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4        \
                                                        ", keep, 1, 1; }"                                           \
                   : WGMMA_O##count(0)                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                \
    }                                                                                                               \
    static __device__ __forceinline__ void rows_from_shared(float* d, uint64_t a, uint64_t b, int keep) {           \
      asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #p2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns  \
                   "k32.f32.e4m3.e4m3 {" WGMMA_D##count "}, %" #p0 ", %" #p1 ", keep, 1, 1; }"                      \
                   : WGMMA_O##count(0)                                                                              \
                   : "l"(a), "l"(b), "r"(keep));                                                                    \
    }                                                                                                               \
  };

// keep = 0 overwrites the accumulators, 1 adds to them.
template <int kColumns>
struct Fp8Product;
WGMMA_SHAPE(8, 4, 4, 5, 6, 7, 8, 9)
WGMMA_SHAPE(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_SHAPE(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(128, 64, 64, 65, 66, 67, 68, 69)

#undef WGMMA_SHAPE
#undef WGMMA_O64
#undef WGMMA_O32
#undef WGMMA_O16
#undef WGMMA_O8
#undef WGMMA_O4
#undef WGMMA_D64
#undef WGMMA_D32
#undef WGMMA_D16
#undef WGMMA_D8
#undef WGMMA_D4

}  // namespace plumb::kernels::hopper
