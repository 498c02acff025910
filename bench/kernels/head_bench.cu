// Speed of the LM head, [129280, 4096]: loss and gradients of 16,384 rows, logits and the best 20 when decoding.
// usage: head_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/head/draw.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels::head;

constexpr int kRows = 16384, kVocabulary = 129280, kWidth = 4096, kChunk = 4096;

}  // namespace

int main(int argc, char** argv) {
  Report report("head");
  const Array<uint16_t> hidden(size_t{kRows} * kWidth, 1, 1), matrix(size_t{kVocabulary} * kWidth, 0.03f, 2);
  std::vector<int> targets(kRows);
  for (int r = 0; r < kRows; ++r) targets[r] = static_cast<int>(r * 7919LL % kVocabulary);
  const Array<int> target(targets);
  const Array<TokenLogit> best_tokens(256 * 20);
  const Array<Drawn> drawn(256);
  const Array<float> log_probability(kRows), factor(kRows, 1, 3);
  const Array<Normaliser> normaliser(kRows);
  const Array<uint8_t> workspace(
      std::max(workspace_bytes(kRows, kVocabulary), backward_workspace_bytes(kChunk, kVocabulary)));
  const Weight weight{matrix.get(), kVocabulary, kWidth};
  const double flop = 2.0 * kRows * kVocabulary * kWidth;

  const auto forward = [&] {
    log_probabilities(hidden.get(), kRows, weight, target.get(), log_probability.get(), normaliser.get(),
                      workspace.get(), nullptr);
  };
  report.product("log-probabilities, 16384 rows", flop, measure(forward, 15));
  {
    const Array<float> d_hidden(size_t{kRows} * kWidth);
    const auto backward = [&](float* d_weight) {
      log_probabilities_backward(factor.get(), hidden.get(), kRows, weight, target.get(), normaliser.get(), kChunk,
                                 d_hidden.get(), d_weight, workspace.get(), nullptr);
    };
    report.product("gradient of the rows (logits again, then d_hidden)", 2 * flop,
                   measure([&] { backward(nullptr); }, 9));
    const Array<float> d_weight(size_t{kVocabulary} * kWidth, 0, 4);
    report.product("gradients of the rows and of the weight", 3 * flop, measure([&] { backward(d_weight.get()); }, 5));
  }
  const Array<float> l(size_t{256} * kVocabulary);
  for (const int rows : {1, 16, 64, 256}) {
    report.bytes("logits, decoding " + std::to_string(rows) + " rows",
                 2.0 * kVocabulary * kWidth + 4.0 * rows * kVocabulary, graph_ms(4, [&](int, cudaStream_t stream) {
                   logits(hidden.get(), rows, weight, l.get(), normaliser.get(), workspace.get(), stream);
                 }));
    report.time("the best 20 of " + std::to_string(rows) + " rows", graph_ms(10, [&](int, cudaStream_t stream) {
                  best(l.get(), rows, kVocabulary, 20, best_tokens.get(), workspace.get(), stream);
                }));
    std::vector<Draw> wanted;
    for (int row = 0; row < rows; ++row) wanted.push_back({(row + 0.5) / rows, row, 1, 0, 10});
    const Array<Draw> draws(wanted);
    report.time("a token drawn from each of " + std::to_string(rows) + " rows",
                graph_ms(10, [&](int, cudaStream_t stream) {
                  draw(l.get(), kVocabulary, draws.get(), rows, drawn.get(), stream);
                }));
  }
  report.write(argc, argv);
}
