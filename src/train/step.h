// One optimizer step: forward and backward pass of each of its rows, in order, into the same gradients; then clipping,
// optimizer, and the router biases.
#pragma once
#include <vector>

#include "train/loss.h"
#include "train/optimizer.h"
#include "train/parameters.h"

namespace plumb {

// Coefficients of the losses besides the next token's; 0 = none. Only for a trainee whose weights are all trained.
struct LossWeights {
  double mtp = 0;      // of the mean loss of the MTP layer
  double balance = 0;  // sequence-wise balance loss of the router, a mean over documents, spec 4.6
  double indexer = 0;  // indexer's own loss over all visible entries, a mean over rows, spec 4.3
};

struct StepLosses {
  double loss = 0;     // mean over the trained tokens
  double mtp = 0;      // mean over the MTP layer's trained tokens
  double balance = 0;  // mean over documents and layers, without coefficient
  double indexer = 0;  // mean over rows and CSA layers, without coefficient
  int64_t tokens = 0, trained = 0;
  std::vector<std::vector<int64_t>> expert_rows;  // [layer][expert] rows routed to it
};

// What the layers of a row keep for the backward pass: all up to 2 GiB, beyond that their outputs.
Keep kept_of(const ModelConfig& config, int64_t rows);

// Adds the gradient of loss + weighted further losses to the trainee's gradients. Error: there is no trained token.
StepLosses accumulate_gradients(Trainee& trainee, const std::vector<TrainRow>& rows, Numerics numerics,
                                const LossWeights& weights);

// Mean negative log-probability of the trained tokens of `rows`; no gradients.
double evaluate(Trainee& trainee, const std::vector<TrainRow>& rows, Numerics numerics);

// bias_e += rate * sign(mean rows of an expert - rows of e), for every layer with a bias (spec 4.6). Only for a trainee
// whose weights are all trained.
void update_router_bias(Trainee& trainee, const std::vector<std::vector<int64_t>>& expert_rows, double rate);

// Clips the gradients to max_norm (0 = never) and moves the parameters. -> their norm before that. Error: it is not
// finite; nothing has moved then, and checkpoint, which may be "", is named as what is left.
double apply_gradients(Trainee& trainee, Optimizer& optimizer, double lr, double max_norm, int64_t step,
                       const std::string& checkpoint);
// Error: the loss of a step is not finite.
void require_finite_loss(double loss, int64_t step, const std::string& checkpoint);

// The factor that brings gradients of this norm down to max_norm; 1 if they are below, or if max_norm is 0.
double clip_factor(double norm, double max_norm);

}  // namespace plumb
