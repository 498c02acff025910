// The two packed weight formats of the released checkpoints (spec/model.md 2.2): FP8 e4m3 in blocks of 128x128 and FP4
// e2m1 in groups of 32 inputs, each with one power-of-two scale (e8m0) a block. Blocks at the end may be partial.
#pragma once
#include <string>

#include "base/tensor.h"

namespace plumb {

// A weight matrix as stored. The dtype of `data` is its format:
//   f32, bf16  [out, in], no scale
//   f8_e4m3    [out, in],   scale f8_e8m0 [ceil(out/128), ceil(in/128)]
//   i8 (FP4)   [out, in/2], scale f8_e8m0 [out, ceil(in/32)]; low nibble = even input
struct Weight {
  Tensor data, scale;
};

inline constexpr int64_t fp8_block = 128, fp4_group = 32;

enum class Codec { f32, bf16, fp8, fp4 };
const char* codec_name(Codec c);  // "fp32", "bf16", "fp8", "fp4"
DType data_dtype(Codec c);
Shape data_shape(Codec c, int64_t out, int64_t in);
Shape scale_shape(Codec c, int64_t out, int64_t in);  // empty for f32 and bf16
Codec codec_of(DType data);                           // u8 counts as FP4, like i8; other dtypes are an Error

// -> f32 [out, in]. Scales must hold no NaN (see find_nan_scale).
Tensor decode(const Weight& w);

// f32 [out, in] -> the format. The scale of a block is the smallest power of two that keeps it within the format's
// range, values round to nearest even: a weight that came from decode() gets its values back. The number of inputs of
// FP4 must be even. NaN and infinities are refused with the name `where`.
Weight encode(const Tensor& w, Codec codec, const std::string& where);

// Index of the first scale that is NaN (code 255), -1 if there is none.
int64_t find_nan_scale(const Tensor& scale);

}  // namespace plumb
