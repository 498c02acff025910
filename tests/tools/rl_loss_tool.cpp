// For tests/oracle: losses and sample weights of JSON lines on stdin, as JSON lines on stdout. Unknown
// log-probabilities are null on both sides.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>

#include "ops/head_divergence.h"
#include "train/advantages.h"
#include "train/dpo_loss.h"
#include "train/rl_loss.h"

using namespace plumb;
using nlohmann::json;

namespace {

float number(const json& v) { return v.is_null() ? std::numeric_limits<float>::quiet_NaN() : v.get<float>(); }

ImportanceLevel level_of(const std::string& name) {
  return name == "sequence"            ? ImportanceLevel::sequence
         : name == "average"           ? ImportanceLevel::average
         : name == "geometric_average" ? ImportanceLevel::geometric_average
                                       : ImportanceLevel::token;
}

json policy(const json& in) {
  RlLossOptions o;
  o.loss = in.value("ppo", false) ? PolicyLoss::ppo : PolicyLoss::cispo;
  o.level = level_of(in.value("level", "token"));
  o.epsilon = in.value("epsilon", -1.0);
  o.epsilon_high = in.value("epsilon_high", -1.0);
  o.max_ratio = in.value("max_ratio", 0.0);
  o.mask_ratio = in.value("mask_ratio", false);
  o.kl_coefficient = in.value("kl", 0.0);
  o.kl_source = in.value("kl_source", "current_learner") == "sample" ? KlSource::sample : KlSource::current_learner;
  o.kimi_tau = in.value("tau", 0.0);
  o.truncated_importance = in.value("truncated", 0.0);
  check(o);
  std::vector<RlToken> tokens;
  std::vector<float> logprob;
  for (const json& t : in["tokens"]) {
    tokens.push_back({number(t["old"]), number(t["original"]), number(t["reference"]), number(t["advantage"]),
                      number(t["weight"]), t["sequence"].get<int>()});
    logprob.push_back(number(t["new"]));
  }
  KlSum kl;
  add_kl(o, tokens, logprob.data(), kl);
  const RlLoss loss = rl_loss(o, tokens, logprob.data(), kl.mean(), in["scale"]);
  return {{"loss", loss.sum},
          {"gradient", loss.d_logprob},
          {"clipped", loss.stats.clipped},
          {"kl", loss.stats.kl},
          {"correlation", loss.stats.probability_correlation()}};
}

json weights(const json& in) {
  std::vector<RewardedSample> samples;
  for (const json& s : in["samples"]) samples.push_back({s["group"], s["reward"], s["tokens"]});
  GroupCounts counts;
  json advantage = json::array(), weight = json::array(), kept = json::array();
  for (const SampleWeight& w :
       sample_weights(samples, {in["scale_rewards"], in["normalize"], in["balance"]}, &counts)) {
    advantage.push_back(w.advantage);
    weight.push_back(w.weight);
    kept.push_back(w.kept);
  }
  return {{"advantage", advantage}, {"weight", weight}, {"kept", kept}, {"flat", counts.without_variance}};
}

Tensor matrix(const json& rows, int64_t columns) {
  Tensor t = Tensor::empty({static_cast<int64_t>(rows.size()), columns});
  for (size_t r = 0; r < rows.size(); ++r)
    for (int64_t i = 0; i < columns; ++i)
      t.f32()[static_cast<int64_t>(r) * columns + i] = rows[r][static_cast<size_t>(i)].get<float>();
  return t;
}
Linear linear(const json& rows) {
  Linear w;
  w.out = static_cast<int>(rows.size()), w.in = static_cast<int>(rows[0].size());
  w.data = matrix(rows, w.in);
  return w;
}
json list(const Tensor& t) { return std::vector<float>(t.f32(), t.f32() + t.numel()); }

json divergence(const json& in) {
  const auto kind = in["forward"] ? ops::Divergence::forward_kl : ops::Divergence::reverse_kl;
  const Linear head = linear(in["head"]), teacher_head = linear(in["teacher_head"]);
  const Tensor hidden = matrix(in["hidden"], head.in), taught = matrix(in["teacher_hidden"], teacher_head.in);
  const Tensor d = Tensor::of(in["d"].get<std::vector<float>>()), d_head = Tensor::zeros({head.out, head.in});
  Tensor value;
  const Tensor d_hidden =
      ops::head_divergence_backward(kind, d, {hidden, head}, {taught, teacher_head}, d_head, &value);
  return {{"value", list(value)}, {"d_hidden", list(d_hidden)}, {"d_head", list(d_head)}};
}

json dpo(const json& in) {
  const DpoOptions o{in["beta"], in["label_smoothing"]};
  json losses = json::array(), d_chosen = json::array(), d_rejected = json::array();
  std::vector<double> policy, reference;
  for (const json& p : in["pairs"]) {
    const PairLogprobs pair{p[0], p[1], p[2], p[3]};
    const PairLoss loss = dpo_loss(o, pair);
    losses.push_back(loss.loss), d_chosen.push_back(loss.d_chosen), d_rejected.push_back(loss.d_rejected);
    policy.insert(policy.end(), {pair.chosen, pair.rejected});
    reference.insert(reference.end(), {pair.reference_chosen, pair.reference_rejected});
  }
  const DpoFigures f = dpo_figures(o, policy, reference);
  return {{"losses", losses},
          {"d_chosen", d_chosen},
          {"d_rejected", d_rejected},
          {"loss", f.loss},
          {"rewards/chosen", f.reward_chosen},
          {"rewards/rejected", f.reward_rejected},
          {"rewards/accuracies", f.accuracy},
          {"rewards/margins", f.margin},
          {"logps/chosen", f.logp_chosen},
          {"logps/rejected", f.logp_rejected}};
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const json in = json::parse(line);
    const std::string kind = in["kind"];
    const json out = kind == "policy"       ? policy(in)
                     : kind == "divergence" ? divergence(in)
                     : kind == "dpo"        ? dpo(in)
                                            : weights(in);
    std::cout << out.dump() << "\n";
  }
}
