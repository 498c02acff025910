// The optimizer of a run: AdamW for all parameters, or Muon for matrices and AdamW for the rest.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "train/adamw.h"
#include "train/muon.h"
#include "train/parameters.h"

namespace plumb {

struct OptimizerOptions {
  AdamWOptions adamw;
  bool use_muon = false;
  MuonOptions muon;
};
OptimizerOptions optimizer_options(const RunConfig& config);

class Optimizer {
 public:
  Optimizer(const Trainee& trainee, const OptimizerOptions& options);
  // Moves all masters by their gradients times grad_scale, then publishes them. step from 1.
  void step(Trainee& trainee, double lr, double grad_scale, int64_t step);
  // The moments, named "adam_m.NAME", "adam_v.NAME", "muon.NAME"; they share memory with the optimizer.
  std::vector<std::pair<std::string, Tensor>> state(const Trainee& trainee) const;

 private:
  struct Moments {
    Tensor first, second;  // second: AdamW only
  };
  bool by_muon(const Parameter& p) const { return options_.use_muon && p.blocks > 0; }
  OptimizerOptions options_;
  std::vector<Moments> moments_;
  ops::ParameterTable on_device_;  // if the parameters are there
};

}  // namespace plumb
