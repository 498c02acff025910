// Tokens from logits: the most likely ones, and one drawn by weight. The same bits on the host and on a device.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "ops/head.h"

namespace plumb::ops {

struct TokenLogit {
  int token = 0;
  float logit = 0;
  bool operator==(const TokenLogit&) const = default;
};

// The `count` most likely tokens (all of them, if there are fewer) of logits [vocab], most likely first, ties: lower
// token.
std::vector<int> most_likely(std::span<const float> logits, size_t count);

// Logits [n], in place, to weights relative to `highest`: exp((logit - highest) / temperature), temperature > 0, and 0
// for what is below min_p.
void weights_of(std::span<float> logits, float highest, float temperature, float min_p);
// Weights are added up in runs of 256, and runs in order: by total_of, and by draw, which then looks into one run.
double total_of(std::span<const float> weight);
// The first weight behind which the sum is above u (0 to 1) times the total; never one that is 0.
size_t draw(std::span<const float> weight, double total, double u);

// A token of row `row` out of all that have a weight. Temperature 0: the most likely one, ties: lower token.
struct Draw {
  int row = 0;
  float temperature = 1, min_p = 0;
  double u = 0;  // 0 to 1
};
struct Drawn {
  TokenLogit token;
  double total = 0;  // of the row's weights; temperature 0: not known
};
// One for each draw, which may name a row more than once. No logit is NaN.
std::vector<Drawn> draw_tokens(const Logits& logits, const std::vector<Draw>& draws);

// Of each row, most likely first: [rows * count]. count: 1 .. kMostLikely, at most the vocabulary.
constexpr int kMostLikely = 64;
std::vector<TokenLogit> most_likely_tokens(const Logits& logits, int count);

}  // namespace plumb::ops
