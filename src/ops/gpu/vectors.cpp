#include "ops/vectors.h"

#include "kernels/indexer/indexer.h"
#include "kernels/norm/norm.h"
#include "kernels/rotary/rotary.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/support.h"
#include "ops/norm.h"

namespace plumb::ops::gpu {
namespace {

kernels::VectorNorm norm_of(const VectorSteps& steps, const Tensor& weight) {
  if (!steps.normed) return kernels::VectorNorm::none;
  return weight.defined() ? kernels::VectorNorm::weighted : kernels::VectorNorm::plain;
}

kernels::VectorStorage storage_of(const VectorSteps& steps) {
  const PointKind kind = point_kind(steps.numerics, steps.storage);
  return kind == PointKind::fp8x64   ? kernels::VectorStorage::fp8
         : kind == PointKind::fp4x32 ? kernels::VectorStorage::fp4_record
                                     : kernels::VectorStorage::plain;
}

}  // namespace

RotaryTable rotary_table(const std::vector<int>& position, const std::vector<float>& freq) {
  const int rows = static_cast<int>(position.size());
  if (2 * freq.size() != kernels::kRotaryChannels)
    fail("rotary table", std::to_string(2 * freq.size()) + " rotated channels",
         "the GPU kernels rotate 64; use kernels = \"reference\"");
  RotaryTable t;
  t.rows = rows, t.pairs = static_cast<int64_t>(freq.size());
  t.device = empty({rows, t.pairs, 2}, DType::f32);
  if (rows == 0) return t;
  const Tensor positions = upload(position), frequencies = upload(freq);
  check(kernels::rotary_table(i32(positions), f32(frequencies), rows, t.device.raw(), kStream), "rotary table");
  return t;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps, const RoundAt& at) {
  require_kind(at, PointKind::bf16, "rms_norm");
  Tensor y = empty(x.shape(), DType::bf16);
  const int rows = static_cast<int>(x.size(0)), width = static_cast<int>(x.size(1));
  check(kernels::rms_norm({bf16(x), f32(weight), bf16(y), nullptr, nullptr, rows, width, eps}, kStream), "rms_norm");
  return y;
}

Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, float eps, const Tensor& dweight) {
  if (dweight.defined()) not_on_gpu("training of a norm");
  Tensor dx = empty(x.shape(), DType::bf16);
  const int rows = static_cast<int>(x.size(0)), width = static_cast<int>(x.size(1));
  check(kernels::rms_norm_backward({bf16(x), bf16(dy), f32(weight), bf16(dx), nullptr, nullptr, rows, width, eps},
                                   kStream),
        "rms_norm_backward");
  return dx;
}

Tensor finish_vectors(const Tensor& x, const Tensor& weight, const RotaryTable& table, const VectorSteps& steps) {
  require_kind({steps.numerics, steps.rope}, PointKind::bf16, "finish_vectors");
  const bool records = storage_of(steps) == kernels::VectorStorage::fp4_record;
  const Tensor y =
      records ? empty({x.size(0), x.size(1), kernels::kIndexRecordBytes}, DType::u8) : empty(x.shape(), DType::bf16);
  const int rows = static_cast<int>(x.size(0)), vectors = static_cast<int>(x.size(1)),
            width = static_cast<int>(x.size(2));
  check(kernels::finish_vectors({bf16(x), f32(weight), table.device.raw(), nullptr, y.raw(), rows, vectors, width,
                                 norm_of(steps, weight), storage_of(steps), steps.eps},
                                kStream),
        "finish_vectors");
  return y;
}

Tensor finish_vectors_backward(const Tensor& d_y, const Tensor& x, const Tensor& weight, const RotaryTable& table,
                               const VectorSteps& steps, const Tensor& dweight) {
  if (dweight.defined()) not_on_gpu("training of a norm");
  const int rows = static_cast<int>(d_y.size(0)), vectors = static_cast<int>(d_y.size(1)),
            width = static_cast<int>(d_y.size(2));
  check(kernels::finish_vectors_backward(
            {steps.normed ? bf16(x) : nullptr, bf16(d_y), f32(weight), table.device.raw(), bf16(d_y), nullptr, nullptr,
             rows, vectors, width, norm_of(steps, weight), storage_of(steps), steps.eps},
            kStream),
        "finish_vectors_backward");
  return d_y;
}

}  // namespace plumb::ops::gpu
