// Numerics profiles. Values are held in FP32; a rounding point replaces a tensor by values that a narrower format can
// hold. The points and their order: spec/released_oracle.md section 4, docs/numerics.md. Backward: straight-through
// (nothing to do).
#pragma once
#include <cstdint>

#include "base/tensor.h"

namespace plumb {

enum class Numerics : uint8_t {
  fp32,      // no rounding at all
  bf16,      // the bf16 points only
  released,  // the arithmetic of the published inference code: bf16, FP8 activations and keys, Hadamard + FP4 index
};
Numerics numerics_from_name(const char* name);  // "fp32", "bf16", "released"; anything else: Error
const char* numerics_name(Numerics n);

// Every place where a value is rounded, in the order in which a row meets them; names as in the spec (hc.pre ->
// hc_pre).
enum class Point : uint8_t {
  hc_pre,
  norm_block,
  act_wq_a,
  out_wq_a,
  norm_q,
  act_wq_b,
  out_wq_b,
  norm_qhead,
  rope_q,
  act_wkv,
  out_wkv,
  norm_kv,
  rope_kv,
  sim_kv,
  pool_ckv,
  norm_ckv,
  rope_ckv,
  sim_ckv,
  act_iwq_b,
  out_iwq_b,
  rope_iq,
  had_iq,
  sim_iq,
  pool_ik,
  norm_ik,
  rope_ik,
  had_ik,
  sim_ik,
  out_iw,
  attn_p,
  out_attn,
  rope_o,
  out_wo_a,
  act_wo_b,
  out_wo_b,
  hc_post,
  act_w13,
  out_w13,
  hid_w2,
  act_w2,
  out_w2,
  act_s13,
  out_s13,
  hid_s2,
  act_s2,
  out_s2,
  moe_sum,
  hc_head,
  norm_final,
  norm_mtp,
  act_mtp,
  out_mtp,
  mtp_sum,
  none,  // never rounds: for products without a point (router, mHC mapping, compressor projections, LM head)
};
enum class PointKind : uint8_t { keep, bf16, fp8x128, fp8x64, fp4x32 };

const char* point_name(Point p);  // "hc.pre", ...

// Where an op rounds its result; by default nowhere.
struct RoundAt {
  Numerics numerics = Numerics::fp32;
  Point point = Point::none;
};

// What the profile does at a point. had_* of `keep` means: no Hadamard transform at all.
PointKind point_kind(Numerics n, Point p);

namespace ops {

// In place on [rows, width] (row stride ld): rounds channels [0, width) of every row; blocks start at channel 0, the
// last may be short. Scales are powers of two, spec 2.2.
void round_point(Numerics n, Point p, float* x, int64_t rows, int64_t width, int64_t ld);
void round_point(Numerics n, Point p, const Tensor& x);  // last dimension = width
inline void round_point(const RoundAt& at, const Tensor& x) { round_point(at.numerics, at.point, x); }

}  // namespace ops
}  // namespace plumb
