#include "train/rl_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/log.h"

namespace plumb {
namespace {

struct Summary {
  double mean = 0, deviation = 0, least = 0, greatest = 0;
};
Summary summarise(const std::vector<double>& values) {
  Summary s;
  if (values.empty()) return s;
  for (double v : values) s.mean += v / static_cast<double>(values.size());
  for (double v : values) s.deviation += (v - s.mean) * (v - s.mean) / static_cast<double>(values.size());
  s.deviation = std::sqrt(s.deviation);
  const auto [least, greatest] = std::ranges::minmax_element(values);
  s.least = *least, s.greatest = *greatest;
  return s;
}

std::vector<double> rewards_of(const RlBatch& batch) {
  std::vector<double> rewards;
  for (const Score& s : batch.scores)
    if (!s.failed()) rewards.push_back(s.reward);
  return rewards;
}

int64_t policy_tokens(const LoggedSample& s) {
  int64_t n = 0;
  for (size_t i = 0; i < s.tokens.size(); ++i) n += s.policy_made(i);
  return n;
}

double share(int64_t part, size_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

int64_t failures(const RlBatch& batch) {
  return std::ranges::count_if(batch.scores, [](const Score& s) { return s.failed(); });
}
int64_t truncations(const RlBatch& batch) { return std::ranges::count_if(batch.samples, truncated); }

double per_second(int64_t n, double seconds) { return seconds > 0 ? static_cast<double>(n) / seconds : 0; }

}  // namespace

double mean_reward(const RlBatch& batch) { return summarise(rewards_of(batch)).mean; }

Metrics batch_metrics(const RlBatch& batch, const std::string& prefix, bool rewarded) {
  std::vector<double> lengths;
  for (const LoggedSample& s : batch.samples) lengths.push_back(static_cast<double>(policy_tokens(s)));
  const Summary length = summarise(lengths);
  const Metrics lengths_of_answers = {{prefix + "completion_tokens", length.mean},
                                      {prefix + "completion_tokens_min", length.least},
                                      {prefix + "completion_tokens_max", length.greatest},
                                      {prefix + "truncated", share(truncations(batch), batch.samples.size())}};
  if (!rewarded) return lengths_of_answers;
  const Summary reward = summarise(rewards_of(batch));
  Metrics m = {{prefix + "reward", reward.mean},
               {prefix + "reward_std", reward.deviation},
               {prefix + "reward_min", reward.least},
               {prefix + "reward_max", reward.greatest}};
  m.insert(m.end(), lengths_of_answers.begin(), lengths_of_answers.end());
  m.emplace_back(prefix + "failed", share(failures(batch), batch.scores.size()));
  std::map<std::string, std::vector<double>> parts;
  for (const Score& s : batch.scores)
    for (const auto& [name, value] : s.metrics) parts[name].push_back(value);
  for (const auto& [name, values] : parts) m.emplace_back(prefix + "reward/" + name, summarise(values).mean);
  return m;
}

Metrics step_metrics(const RlStepFigures& f, const RlBatch& batch) {
  const RlStats& s = f.result.stats;
  const double n = std::max<double>(1, static_cast<double>(s.tokens));
  const double kl_tokens = std::max<double>(1, static_cast<double>(s.kl_tokens));
  int64_t sampled = 0;
  for (const LoggedSample& sample : batch.samples) sampled += policy_tokens(sample);
  Metrics m = batch_metrics(batch, "", f.rewarded);
  const Metrics more = {{"loss", f.result.loss},
                        {"grad_norm", f.grad_norm},
                        {"learning_rate", f.learning_rate},
                        {"ratio", s.ratio / n},
                        {"ratio_max", s.largest_ratio},
                        {"clipped", static_cast<double>(s.clipped) / n},
                        {"mismatch_tokens", static_cast<double>(s.unequal)},
                        {"mismatch_max", s.largest_difference},
                        {"probs_corr", s.probability_correlation()},
                        {"steps_behind", static_cast<double>(f.steps_behind)},
                        {"trained_tokens", static_cast<double>(f.trained)},
                        {"logical_tokens", static_cast<double>(f.logical_tokens)},
                        {"physical_tokens", static_cast<double>(f.physical_tokens)},
                        {"sampled_tokens", static_cast<double>(sampled)},
                        {"sample_seconds", f.sample_seconds},
                        {"wait_seconds", f.wait_seconds},
                        {"train_seconds", f.train_seconds},
                        {"sampled_tokens_per_second", per_second(sampled, f.sample_seconds)},
                        {"trained_tokens_per_second", per_second(f.physical_tokens, f.train_seconds)}};
  m.insert(m.end(), more.begin(), more.end());
  if (f.uses_rewards) {
    m.emplace_back("groups", static_cast<double>(f.groups.groups));
    m.emplace_back("groups_without_variance", static_cast<double>(f.groups.without_variance));
  }
  if (f.distilled) m.emplace_back("teacher_kl", f.result.divergence);
  if (f.distilled && f.uses_rewards) m.emplace_back("policy_loss", f.result.policy_loss);
  if (s.kl_tokens > 0) {
    m.emplace_back("kl_reference", s.kl / kl_tokens);
    m.emplace_back("kl3_reference", s.kl3 / kl_tokens);
  }
  return m;
}

std::string progress_note(const RlStepFigures& f, const RlBatch& batch) {
  const RlStats& s = f.result.stats;
  int64_t sampled = 0;
  for (const LoggedSample& sample : batch.samples) sampled += policy_tokens(sample);
  const double samples = std::max<double>(1, static_cast<double>(batch.samples.size()));
  std::string note = f.rewarded ? fmt::format("reward {:.3f}, ", mean_reward(batch)) : "";
  note += fmt::format("mismatch {}", s.largest_difference);
  if (s.kl_tokens > 0) note += fmt::format(", KL {:.4f}", s.kl / static_cast<double>(s.kl_tokens));
  if (f.distilled) note += fmt::format(", teacher KL {:.4f}", f.result.divergence);
  return note + fmt::format(", {:.1f} tokens an answer, {:.0f} tokens/s", static_cast<double>(sampled) / samples,
                            per_second(sampled, f.sample_seconds));
}

void write_samples(JsonLines& file, int64_t step, const RlBatch& batch, const std::vector<SampleWeight>& weights,
                   const std::vector<std::vector<float>>& difference) {
  for (size_t i = 0; i < batch.tasks.size(); ++i) {
    const RolloutTask& task = batch.tasks[i];
    const LoggedSample& s = batch.samples[i];
    nlohmann::ordered_json line = {{"step", step},
                                   {"line", task.prompt->number},
                                   {"group", task.group},
                                   {"number", task.number},
                                   {"answer", batch.answers[i].text},
                                   {"finish_reason", batch.answers[i].finish_reason},
                                   {"turns", s.turn_end.size()},
                                   {"reward", batch.scores[i].reward},
                                   {"metrics", batch.scores[i].metrics},
                                   {"advantage", weights[i].advantage},
                                   {"trained", weights[i].kept},
                                   {"prompt_tokens", task.prompt->tokens},
                                   {"tokens", s.tokens},
                                   {"logprobs", s.logprob},  // NaN, of replies, becomes null
                                   {"difference", difference[i]}};
    if (batch.scores[i].failed()) line["failure"] = batch.scores[i].failure;
    file.write(line);
  }
}

void warn(int64_t step, const RlStepFigures& f, const RlBatch& batch) {
  const RlStats& s = f.result.stats;
  if (s.unequal > 0 && f.steps_behind == 0)
    log_warning(
        "step {}: {} of {} log-probabilities are not those that were recorded, by up to {}: a defect, please "
        "report it",
        step, s.unequal, s.tokens, s.largest_difference);
  if (f.uses_rewards && f.groups.without_variance == f.groups.groups)
    log_warning("step {}: all answers of every group have the same reward, nothing can be learned from them", step);
  if (const int64_t n = truncations(batch); 4 * n > static_cast<int64_t>(batch.samples.size()))
    log_warning("step {}: {} of {} answers were cut off: raise sampling.max_tokens, or reward shorter ones", step, n,
                batch.samples.size());
  if (const int64_t n = failures(batch); n > 0) {
    const auto first = std::ranges::find_if(batch.scores, [](const Score& score) { return score.failed(); });
    log_warning("step {}: {} of {} answers have no reward and are left out: {}", step, n, batch.scores.size(),
                first->failure);
  }
}

}  // namespace plumb
