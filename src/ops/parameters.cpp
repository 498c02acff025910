#include "ops/parameters.h"

#include "base/error.h"
#include "ops/gpu/dispatch.h"

namespace plumb::ops {
namespace {
void require_device(const Tensor& t) { PLUMB_CHECK(t.on_device(), "parameters in the host's memory: train/adamw.h"); }
}  // namespace

ParameterTable parameter_table(const std::vector<ParameterTensors>& parameters) {
  PLUMB_CHECK(!parameters.empty());
  require_device(parameters[0].weight);
  PLUMB_ON_GPU(parameters[0].weight, parameter_table(parameters));
  return {};
}

double gradient_norm(const ParameterTable& table) {
  require_device(table.pieces);
  PLUMB_ON_GPU(table.pieces, gradient_norm(table));
  return 0;
}

void adamw(const ParameterTable& table, const AdamWStep& step) {
  require_device(table.pieces);
  PLUMB_ON_GPU(table.pieces, adamw(table, step));
}

}  // namespace plumb::ops
