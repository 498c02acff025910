#include "train/optimizer.h"

#include "base/error.h"
#include "base/parallel.h"

namespace plumb {

OptimizerOptions optimizer_options(const RunConfig& config) {
  const TrainKeys& t = config.train;
  OptimizerOptions o;
  o.adamw = {t.beta1, t.beta2, t.eps, t.weight_decay};
  o.use_muon = config.command == RunCommand::pretrain && config.pretrain.optimizer == "muon";
  o.muon = {config.pretrain.muon_momentum, t.weight_decay};
  return o;
}

Optimizer::Optimizer(const Trainee& trainee, const OptimizerOptions& options) : options_(options) {
  if (trainee.on_device.count > 0) {  // two pieces of memory for all: there may be tens of thousands of parameters
    PLUMB_CHECK(!options.use_muon);
    const int64_t total = parameter_count(trainee);
    const Tensor first = Tensor::zeros({total}, DType::f32, Space::device), second = zeros_like(first);
    std::vector<ops::ParameterTensors> parameters;
    int64_t at = 0;
    for (const Parameter& p : trainee.parameters) {
      const int64_t end = at + p.master.numel();
      moments_.push_back({first.rows(at, end).view(p.master.shape()), second.rows(at, end).view(p.master.shape())});
      parameters.push_back({p.master, p.grad, moments_.back().first, moments_.back().second});
      at = end;
    }
    on_device_ = ops::parameter_table(parameters);
    return;
  }
  for (const Parameter& p : trainee.parameters) {
    Moments& m = moments_.emplace_back();
    m.first = Tensor::zeros(p.master.shape());
    if (!by_muon(p)) m.second = Tensor::zeros(p.master.shape());
  }
}

void Optimizer::step(Trainee& trainee, double lr, double grad_scale, int64_t step) {
  if (on_device_.count > 0) {
    const AdamWOptions& o = options_.adamw;
    return ops::adamw(on_device_, {o.beta1, o.beta2, o.eps, o.weight_decay, lr, grad_scale, step});
  }
  // Parameters side by side: inside one the products of Muon are too small for several threads.
  parallel_for(static_cast<int64_t>(moments_.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Parameter& p = trainee.parameters[i];
      const Moments& m = moments_[i];
      if (by_muon(p))
        muon_step(p.master, p.grad, m.first, p.blocks, options_.muon, lr, grad_scale);
      else
        adamw_step(p.master, p.grad, m.first, m.second, options_.adamw, lr, grad_scale, step);
    }
  });
  publish(trainee);
}

std::vector<std::pair<std::string, Tensor>> Optimizer::state(const Trainee& trainee) const {
  std::vector<std::pair<std::string, Tensor>> list;
  for (size_t i = 0; i < moments_.size(); ++i) {
    const Parameter& p = trainee.parameters[i];
    list.emplace_back((by_muon(p) ? "muon." : "adam_m.") + p.name, moments_[i].first);
    if (!by_muon(p)) list.emplace_back("adam_v." + p.name, moments_[i].second);
  }
  return list;
}

}  // namespace plumb
