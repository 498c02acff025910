#include "ops/parameters.h"

#include "kernels/optimizer/optimizer.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

namespace opt = kernels::optimizer;

const opt::Tensor* pieces_of(const ParameterTable& table) {
  return reinterpret_cast<const opt::Tensor*>(table.pieces.raw());
}

}  // namespace

ParameterTable parameter_table(const std::vector<ParameterTensors>& parameters) {
  std::vector<opt::Tensor> tensors;
  for (const ParameterTensors& p : parameters)
    tensors.push_back({f32(p.weight), f32(p.gradient), f32(p.first), f32(p.second), p.weight.numel()});
  std::vector<opt::Tensor> pieces = opt::pieces_of(tensors);
  const int64_t bytes = static_cast<int64_t>(pieces.size() * sizeof(opt::Tensor));
  const Tensor host = Tensor::over(reinterpret_cast<std::byte*>(pieces.data()), {bytes}, DType::u8, nullptr);
  return {to_device(host), static_cast<int>(pieces.size())};
}

double gradient_norm(const ParameterTable& table) {
  const Tensor sums = workspace(table.count * sizeof(double)), norm = workspace(sizeof(double));
  opt::gradient_norm(pieces_of(table), table.count, 1, reinterpret_cast<double*>(sums.raw()),
                     reinterpret_cast<double*>(norm.raw()), kStream);
  double value = 0;
  copy_bytes(Tensor::over(reinterpret_cast<std::byte*>(&value), {sizeof(double)}, DType::u8, nullptr), norm);
  return value;
}

void adamw(const ParameterTable& table, const AdamWStep& s) {
  opt::AdamW options;
  options.beta1 = s.beta1, options.beta2 = s.beta2, options.eps = s.eps, options.weight_decay = s.weight_decay;
  options.learning_rate = s.learning_rate, options.gradient_scale = s.gradient_scale, options.step = s.step;
  opt::adamw(pieces_of(table), table.count, options, nullptr, false, kStream);
}

}  // namespace plumb::ops::gpu
