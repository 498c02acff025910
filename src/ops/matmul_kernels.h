// Inner loops of matmul, compiled once for each vector unit (matmul_avx2.cpp, matmul_avx512.cpp) from
// matmul_simd.h. Internal to matmul.cpp.
#pragma once
#include "ops/matmul.h"

namespace plumb::ops {

constexpr int kMaxRows = 8;    // rows of A that a tile may have
constexpr int kFewRows = 8;    // up to here B is not written to a panel
constexpr int kMaxLanes = 32;  // outputs of a panel
constexpr int kBlockK = 256;   // k of a panel: [256][32] FP32 is 32 KiB, near the first-level cache
constexpr int kStreamLanes =
    4;  // `few_rows` walks at most this many vectors of outputs at once, to hide a chain's latency

struct MatmulKernels {
  int rows, lanes;  // of a full tile

  // panel [k1-k0][lanes] = B[n0 + lane, k]; lanes at or beyond the last output hold any finite or other value.
  void (*widen)(const PanelOperand& b, int64_t n0, int64_t k0, int64_t k1, float* panel);

  // c [rows, valid] (+)= a [k][rows] (interleaved) times panel [k][lanes], whose rows lie `stride` floats apart.
  void (*tile)(int rows, const float* a, const float* panel, int64_t stride, int64_t k, float* c, int64_t ldc,
               int valid, bool load);

  // Outputs n0..n1 of 1 to kFewRows rows of x over all k, for operands whose rows are the outputs.
  void (*few_rows)(int rows, const float* x, int64_t ldx, const PanelOperand& b, int64_t n0, int64_t n1, float* c,
                   int64_t ldc, bool load);
};
extern const MatmulKernels avx2_kernels, avx512_kernels;

struct E8m0Table {
  float value[256];
};
extern const E8m0Table e8m0;  // code -> 2^(code-127)

}  // namespace plumb::ops
