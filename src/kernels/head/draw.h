// What sampling takes from logits that are on the GPU: the most likely tokens, and tokens drawn from the whole
// vocabulary. Nothing synchronises with the host. Arguments that a caller can get wrong raise std::invalid_argument;
// CUDA errors raise std::runtime_error.
#pragma once
#include "kernels/head/head.h"

namespace plumb::kernels::head {

struct TokenLogit {
  int token;
  float logit;
};

// The `count` (1 .. kMostBest, at most the vocabulary) largest logits of each row, the largest first, equal ones: the
// lower token first, NaN last. Follows `logits` with the same workspace. -> [rows, count].
constexpr int kMostBest = 64;
void best(const float* logits, int rows, int vocabulary, int count, TokenLogit* result, const void* workspace,
          cudaStream_t stream);

// A token of row `row`. Its weight is exp((logit - highest) / temperature), or 0 if that is below min_p; temperature 0
// means the first token whose logit is `highest`. u: where in the sum of the weights, above 0 and below 1.
struct Draw {
  double u;
  int row;
  float temperature, min_p;
  float highest;  // logit of the row
};
// logits: FP32 [rows of them, vocabulary], a multiple of 8 tokens, none NaN. draws, result: device, [count]. Weights,
// their sums and the choice have the bits of ops/draw.h on the host: weights are added up in runs of kDrawRun, each
// by eight sums in double, and runs in order.
constexpr int kDrawRun = 256;
struct Drawn {
  TokenLogit found;
  double total;  // of the row's weights; temperature 0: 0
};
void draw(const float* logits, int vocabulary, const Draw* draws, int count, Drawn* result, cudaStream_t stream);

}  // namespace plumb::kernels::head
