// For tests/oracle: policy losses and sample weights of JSON lines on stdin, as JSON lines on
// stdout. Unknown log-probabilities are null on both sides.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>

#include "train/advantages.h"
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

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const json in = json::parse(line);
    std::cout << (in["kind"] == "policy" ? policy(in) : weights(in)).dump() << "\n";
  }
}
