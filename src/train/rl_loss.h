// Policy losses of reinforcement learning on log-probabilities: values and gradients, nothing of the model. Names and
// defaults are those of the reference trainer (section 4.2); GSPO is PPO at the level of sequences.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace plumb {

enum class PolicyLoss : uint8_t { cispo, ppo };
// What the ratio new/old of a token is made of: its own, that of its sequence (geometric mean over the trained tokens),
// or a mean of both.
enum class ImportanceLevel : uint8_t { token, sequence, average, geometric_average };
enum class KlSource : uint8_t { current_learner, sample };

struct RlLossOptions {
  PolicyLoss loss = PolicyLoss::cispo;
  ImportanceLevel level = ImportanceLevel::token;
  double epsilon = -1, epsilon_high = -1;  // the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; < 0: the loss's
                                           // default (CISPO 1 and 4; PPO 0.2 and epsilon)
  double max_ratio = 0;                    // ratios above are cut to it before anything else; 0 = none
                                           // (max_negative_advantage_importance_sampling_weight)
  bool mask_ratio = false;                 // tokens outside the clip range are left out instead (mask_prob_ratio)
  double kl_coefficient = 0;               // > 0: advantage += coefficient * (mean kl - kl), kl against the reference
  KlSource kl_source = KlSource::current_learner;  // kl = new - reference, or old - reference
  double kimi_tau = 0;                             // advantage -= tau * (new - old)
  double truncated_importance = 0;                 // > 0: factor min(old / original, this)
};
// Error: names the option and its range.
void check(const RlLossOptions& o);

// A trained token. Log-probabilities that are unknown are NaN: old = new then (ratio 1), no reference means no KL,
// no original means a factor of 1.
struct RlToken {
  float old_logprob;  // under the policy that the ratio is against
  float original;     // as the sampler recorded it
  float reference;    // under the reference model
  float advantage = 0;
  float weight = 1;  // 0: not part of the policy loss (only distilled)
  int sequence = 0;  // tokens of a sequence are neighbours
};

struct RlStats {                                 // sums over tokens, so that those of several rows add up
  int64_t tokens = 0, clipped = 0, unequal = 0;  // unequal: new and original differ in at least one bit
  double ratio = 0, largest_ratio = 0;
  double difference = 0, largest_difference = 0;  // |new - original|
  double kl = 0, kl3 = 0;                         // new - reference, and exp(-(new - ref)) + (new - ref) - 1
  int64_t kl_tokens = 0;
  double old = 0, fresh = 0, old2 = 0, fresh2 = 0, product = 0;  // of probabilities, for their correlation
  int64_t pairs = 0;
  void add(const RlStats& other);
  double probability_correlation() const;  // of exp(old) and exp(new); 1 if there is nothing to correlate
};

struct RlLoss {
  double sum = 0;                // of weight * loss over the tokens, times scale
  std::vector<float> d_logprob;  // [tokens] its gradient with respect to logprob
  RlStats stats;
};

// The mean over tokens with a reference and a weight of the kl that shapes advantages. It must run over the whole
// optimizer step, so that the loss does not depend on how sequences were packed into rows. 0 without one.
struct KlSum {
  double sum = 0;
  int64_t tokens = 0;
  double mean() const { return tokens > 0 ? sum / static_cast<double>(tokens) : 0; }
};
// logprob: may be nullptr if the source is the sample.
void add_kl(const RlLossOptions& o, const std::vector<RlToken>& tokens, const float* logprob, KlSum& sum);

// logprob [tokens]: of the model in training. scale: 1 / trained tokens of the whole step. Exponents are kept within
// +-20, where the gradient of a ratio ends.
RlLoss rl_loss(const RlLossOptions& o, const std::vector<RlToken>& tokens, const float* logprob, double mean_kl,
               double scale);

}  // namespace plumb
