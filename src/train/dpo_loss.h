// The loss of direct preference optimization (Rafailov et al. 2023, with the label smoothing of cDPO) on
// log-probabilities of whole answers: value and gradient, nothing of the model. Names as in TRL.
#pragma once
#include <vector>

namespace plumb {

struct DpoOptions {
  double beta = 0.1;
  double label_smoothing = 0;  // probability that a pair is the wrong way round, below 1/2
};

// Sums over the tokens of an answer that count, under the policy and under the reference.
struct PairLogprobs {
  double chosen, rejected, reference_chosen, reference_rejected;
};

struct PairLoss {
  double loss;  // -(1 - s) log sigmoid(margin) - s log sigmoid(-margin), s the label smoothing
  double reward_chosen, reward_rejected;  // beta * (policy - reference); their difference is the margin
  double d_chosen, d_rejected;            // gradient of the loss with respect to the policy's log-probabilities
};
PairLoss dpo_loss(const DpoOptions& options, const PairLogprobs& pair);

// Means over pairs, under the names that TRL logs.
struct DpoFigures {
  double loss = 0;
  double reward_chosen = 0, reward_rejected = 0;  // rewards/chosen, rewards/rejected
  double accuracy = 0;                            // rewards/accuracies: share of pairs with a margin above 0
  double margin = 0;                              // rewards/margins
  double logp_chosen = 0, logp_rejected = 0;      // logps/chosen, logps/rejected
};
// policy, reference [2 * pairs]: of the chosen and the rejected answer of each pair. 0 without pairs.
DpoFigures dpo_figures(const DpoOptions& options, const std::vector<double>& policy,
                       const std::vector<double>& reference);

}  // namespace plumb
