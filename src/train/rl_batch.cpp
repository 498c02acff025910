#include "train/rl_batch.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/hash.h"
#include "rollout/cache_size.h"

namespace plumb {
namespace {

using nlohmann::json;

EngineOptions engine_options(const RunConfig& config, const WeightStore& weights) {
  const ModelConfig& model = weights.config();
  EngineOptions o;
  o.numerics = numerics_from_name(config.model.numerics.c_str());
  o.max_running = static_cast<int>(config.sampling.max_running), o.prefill_chunk = 0;
  set_step_sizes(o, weights.space());
  if (config.sampling.max_running == 0)  // no more than a step has
    o.max_running =
        static_cast<int>(std::min<int64_t>(o.max_running, config.rl.groups_per_step * config.rl.group_size));
  const int longest = static_cast<int>(std::min<int64_t>(config.data.row_tokens, model.max_position_embeddings));
  // Room for every running sample at full length, and as much again for common beginnings.
  const PlanShape shape = plan_shape(model);
  const PagePools size{page_positions(shape), PagePool(0), PagePool(0)};
  o.entry_pages = 2 * o.max_running * size.pages(longest);
  o.key_pages = 2 * o.max_running * most_key_pages(size.positions, shape.window, o.prefill_chunk, longest);
  return o;
}

// All that decides what is sampled: a log that was written for something else is not gone on with.
uint64_t fingerprint(const std::vector<RolloutTask>& tasks, const BatchRequest& r, const RunConfig& config) {
  uint64_t h = hash_text(r.adapter);
  for (const RolloutTask& t : tasks) {
    h = hash_text(t.prompt->line, h);
    h = hash_bytes(t.prompt->tokens.data(), t.prompt->tokens.size() * sizeof(int), h);
  }
  const SamplingParams& s = r.sampling;
  const double numbers[] = {static_cast<double>(r.group_size),
                            static_cast<double>(r.first_key),
                            static_cast<double>(s.max_tokens),
                            s.temperature,
                            s.top_p,
                            static_cast<double>(s.top_k),
                            s.min_p,
                            static_cast<double>(s.seed),
                            static_cast<double>(config.sampling.max_turns),
                            static_cast<double>(config.data.row_tokens),
                            static_cast<double>(r.routed)};
  return hash_text(config.model.numerics, hash_bytes(numbers, sizeof numbers, h));
}

std::string score_to_text(const Score& s) {
  json j = {{"reward", s.reward}, {"metrics", s.metrics}};
  if (s.failed()) j["failure"] = s.failure;
  return j.dump(-1, ' ', false, json::error_handler_t::replace);  // a program may have said anything
}
Score score_from_text(const std::string& text) {
  const json j = json::parse(text);
  return {j["reward"].get<double>(), j["metrics"].get<std::map<std::string, double>>(), j.value("failure", "")};
}

// The sum of both: a run may have an environment, rewards, or both.
Score add(const Score& a, const Score& b) {
  if (a.failed() || b.failed()) return a.failed() ? a : b;
  Score sum = a;
  sum.reward += b.reward;
  sum.metrics.insert(b.metrics.begin(), b.metrics.end());
  return sum;
}

}  // namespace

BatchSampler::BatchSampler(WeightStore& weights, std::shared_ptr<AdapterRegistry> registry, const RunConfig& config,
                           const Tokenizer* tokenizer, const Scorer& scorer, Environment* environment,
                           std::function<bool()> stop)
    : config_(config),
      tokenizer_(tokenizer),
      scorer_(scorer),
      environment_(environment),
      stop_(std::move(stop)),
      engine_(weights, engine_options(config, weights), std::move(registry)) {}

RlBatch BatchSampler::sample(const BatchRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  RlBatch batch;
  for (size_t g = 0; g < request.prompts.size(); ++g)
    for (int n = 0; n < request.group_size; ++n)
      batch.tasks.push_back({request.prompts[g], static_cast<int>(g), n, request.first_key + batch.tasks.size()});
  std::shared_ptr<Conversations> conversations;
  if (environment_) {
    conversations =
        std::make_shared<Conversations>(*environment_, batch.tasks, *tokenizer_, request.sampling.stop_tokens,
                                        static_cast<int>(config_.data.row_tokens));
    for (size_t i = 0; i < batch.tasks.size(); ++i) batch.tasks[i].prompt = &conversations->prompt(i);
    batch.conversations = conversations;  // owns the prompts
  }
  RolloutLog log(request.log, batch.tasks.size(), fingerprint(batch.tasks, request, config_));
  RolloutOptions options;
  options.sampling = request.sampling;
  options.adapter = request.adapter;
  options.max_turns = static_cast<int>(config_.sampling.max_turns);
  options.row_tokens = static_cast<int>(config_.data.row_tokens);
  options.routed = request.routed;
  if (environment_)
    options.reply = [&](size_t i, int turn, const LoggedSample& s) { return conversations->reply(i, turn, s); };
  const auto last_answer = [&](size_t i, const LoggedSample& s) {
    return read_answer(s, s.turn_end.size() - 1, *batch.tasks[i].prompt, tokenizer_, request.sampling.stop_tokens);
  };
  options.score = [&](size_t i, const LoggedSample& s) {
    RewardSample sample = reward_sample(batch.tasks[i]);
    sample.answer = last_answer(i, s);
    Score score = scorer_.score(sample);
    if (conversations) score = add(conversations->close(i, s), score);
    return score_to_text(score);
  };
  sample_rollouts(engine_, batch.tasks, options, log, [&] {
    if (stop_ && stop_()) fail("sampling", "was stopped");
  });
  for (size_t i = 0; i < batch.tasks.size(); ++i) {
    batch.samples.push_back(log[i]);
    batch.answers.push_back(last_answer(i, log[i]));
    batch.scores.push_back(score_from_text(*log[i].reward));
  }
  batch.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return batch;
}

}  // namespace plumb
