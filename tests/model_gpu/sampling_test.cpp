// Tokens drawn on the GPU against the sampler on the host, which has the same logits: equal on bits, whatever is asked
// for.
#include <array>

#include "base/philox.h"
#include "model_gpu_testing.h"
#include "rollout/sampler.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

Tensor random_bf16(int64_t rows, int64_t width, float size, uint64_t seed) {
  Random g(seed);
  const Tensor x = Tensor::empty({rows, width});
  for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = size * g.normal();
  return to_device_bf16(x);
}

// Every kind of row: those drawn on the device, those that must come to the host.
SamplingParams params_of(int i, int vocab) {
  SamplingParams p;
  p.seed = 100 + i;
  p.temperature = std::array{1.0f, 0.0f, 0.3f, 1.7f, 100.0f}[i % 5];
  p.min_p = i % 7 == 3 ? 0.05f : 0;
  p.top_logprobs = std::array{0, 1, 20, 0, 64, 100}[i % 6];
  if (i % 11 == 5) p.top_k = std::array{3, 64, 65, 1}[i % 4];
  if (i % 5 == 3) p.top_p = std::array{0.8f, 0.95f, 0.2f, 0.999999f}[i % 4];
  if (i % 13 == 6) p.logit_bias = {{i % vocab, 4.0f}};
  if (i % 17 == 8) p.presence_penalty = 1;
  if (i % 19 == 9) p.processed_logprobs = true;
  if (i % 23 == 10) p.min_tokens = 5, p.stop_tokens = {1, 2};
  return p;
}

void check(int rows, int vocab, float size) {
  const Tensor hidden = random_bf16(rows, 128, 1, 1);
  const Linear head{random_bf16(vocab, 128, size, 2), {}, WeightFormat::bf16, vocab, 128};
  const ops::Logits logits = ops::head_logits(hidden, head);
  const Tensor values = to_host(logits.value);
  std::vector<SamplingParams> params;
  std::vector<std::vector<int>> tokens;
  for (int i = 0; i < rows; ++i) params.push_back(params_of(i, vocab)), tokens.push_back({1, i % vocab, 3, i % 5});
  std::vector<SampledRow> asked;
  for (int i = 0; i < rows; ++i) asked.push_back({&params[i], static_cast<uint64_t>(i), tokens[i], 2});
  const std::vector<GeneratedToken> found = sample_tokens(logits, asked);
  ASSERT_EQ(found.size(), params.size());
  for (int i = 0; i < rows; ++i) {
    const std::span<const float> row(values.f32() + int64_t{i} * vocab, static_cast<size_t>(vocab));
    const GeneratedToken expected = sample_token(row, logits.normaliser[i], params[i], i, tokens[i], 2);
    ASSERT_EQ(found[i], expected) << "row " << i << ": token " << found[i].id << ", not " << expected.id;
  }
}

TEST(ModelGpu, SamplingHasTheBitsOfTheHostSmall) {
  check(60, 64, 0.2f);
  check(300, 1280, 0.3f);
}
TEST(ModelGpu, SamplingHasTheBitsOfTheHost) { check(256, 129280, 0.15f); }

TEST(ModelGpu, SamplingRefusesNaN) {
  const Linear head{random_bf16(64, 128, 1, 2), {}, WeightFormat::bf16, 64, 128};
  const ops::Logits logits = ops::head_logits(to_device_bf16(Tensor::full({1, 128}, NAN)), head);
  const SamplingParams p;
  EXPECT_THROW(sample_tokens(logits, {{&p, 0, {}, 0}}), std::exception);
}

}  // namespace
}  // namespace plumb
