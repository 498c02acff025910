// A step of reinforcement learning over groups that share their prompts: prefix trees against one row part a sample.
// usage: tree_bench MODEL [RESULT.json]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "checkpoint/checkpoint.h"
#include "train/rl_step.h"

namespace plumb {
namespace {

constexpr int kGroup = 8, kRowTokens = 4096, kRounds = 5;
constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

std::vector<RlSample> make_group(const ModelConfig& c, int prompt, int answer) {
  Random random(1, 1);
  const auto token = [&] { return static_cast<int>(random.below(static_cast<uint32_t>(c.vocab_size))); };
  RlSample base;
  base.prompt = prompt;
  for (int i = 0; i < prompt; ++i) base.tokens.push_back(token());
  base.mask.assign(base.tokens.size(), 0);
  base.logprob.assign(base.tokens.size(), kUnknown);
  std::vector<RlSample> samples(kGroup, base);
  for (RlSample& s : samples)
    for (int i = 0; i < answer; ++i) s.tokens.push_back(token()), s.mask.push_back(1), s.logprob.push_back(-3);
  return samples;
}

double seconds_of(Trainee& t, const RlRows& rows) {
  const auto start = std::chrono::steady_clock::now();
  accumulate_rl_gradients(t, rows.rows, Numerics::fp32, {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

nlohmann::ordered_json measure(Trainee& t, int prompt, int answer) {
  const ModelConfig& c = t.weights->config();
  const std::vector<RlSample> samples = make_group(c, prompt, answer);
  const std::vector<SampleWeight> weights(samples.size(), {1, 1, true});
  const RlRows tree = make_rl_rows(plan_shape(c), samples, weights, {kRowTokens, 64, 1});
  const RlRows flat = make_rl_rows(plan_shape(c), samples, weights, {kRowTokens, kRowTokens + 1, 1});
  double best_tree = 1e9, best_flat = 1e9;
  for (int i = 0; i < kRounds; ++i) {  // in turns: what disturbs the machine disturbs both
    best_tree = std::min(best_tree, seconds_of(t, tree));
    best_flat = std::min(best_flat, seconds_of(t, flat));
  }
  return {{"prompt", prompt},
          {"answer", answer},
          {"tokens in the data", tree.logical_tokens},
          {"tokens computed", tree.physical_tokens},
          {"step, trees, s", best_tree},
          {"step, flat, s", best_flat},
          {"times as fast", best_flat / best_tree}};
}

void run(const std::string& model, const char* result) {
  auto weights = load_weights(Checkpoint::open(model));
  LoraKeys lora;
  auto trainee = lora_trainee(weights, fresh_adapter(weights->model, lora, 1));
  nlohmann::ordered_json figures = nlohmann::ordered_json::array();
  for (auto [prompt, answer] : {std::pair{512, 128}, {1024, 256}, {256, 256}, {64, 256}}) {
    figures.push_back(measure(*trainee, prompt, answer));
    std::printf("%s\n", figures.back().dump().c_str());
    std::fflush(stdout);
  }
  if (!result) return;
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%F", std::gmtime(&now));
  const nlohmann::ordered_json all = {
      {"name", "tree"},
      {"title", "Prefix trees against flat rows, a step of RL"},
      {"date", date},
      {"device", std::to_string(thread_count()) + " threads"},
      {"command", "make bench"},
      {"note", "Groups of 8 answers, LoRA on all targets of assets/tiny, rows of 4,096 tokens; best of 5 in turns."},
      {"figures", figures}};
  write_text(result, all.dump(2) + "\n");
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw plumb::UsageError("tree_bench", "needs a model", "tree_bench MODEL [RESULT.json]");
    plumb::run(argv[1], argc > 2 ? argv[2] : nullptr);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tree_bench: %s\n", e.what());
    return 1;
  }
}
