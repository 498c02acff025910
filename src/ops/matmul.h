// The one matrix product behind `linear`, its gradients and LoRA: C[m,n] (+)= sum_k A[m,k] B[n,k] in FP32, one chain of
// fused multiply-adds an output over k = 0..K-1. The bits do not depend on m, on the tiling, on threads or on the width
// of the vector unit, because every output lives in one lane and meets its products one after the other.
#pragma once
#include <cstdint>

#include "ops/linear.h"

namespace plumb::ops {

// A: FP32 in memory; one of the two strides (in elements) is 1.
struct RowOperand {
  const float* data;
  int64_t row_stride, k_stride;
};

// B: a matrix [R, C] that may be packed, widened while it is used. Either its rows are the outputs and its columns the
// contraction (forward), or the other way round (gradients).
struct PanelOperand {
  const uint8_t* data;
  int64_t row_bytes;
  const uint8_t* scale;  // e8m0 codes of fp8 and fp4, else null
  int64_t scale_stride;  // scales a row of blocks
  WeightFormat format;
  bool outputs_are_rows;
  int64_t rows, columns;
};
PanelOperand panel_of(const Linear& w, bool outputs_are_rows);
PanelOperand panel_of(const float* x, int64_t ld, int64_t rows, int64_t columns, bool outputs_are_rows);

// c [m, n] with row stride ldc; n and k are those of `b`. accumulate: the chains start at c instead of 0.
void matmul(int64_t m, const RowOperand& a, const PanelOperand& b, float* c, int64_t ldc, bool accumulate);

// to[i] += scale * from[i], product and sum rounded each.
void add_scaled(const float* from, float scale, float* to, int64_t n);

// The widest vector unit of the machine is used; tests choose. Both give the same bits.
enum class VectorUnit { avx2, avx512 };
bool vector_unit_available(VectorUnit unit);
void use_vector_unit(VectorUnit unit);
VectorUnit vector_unit();

}  // namespace plumb::ops
