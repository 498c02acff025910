// The router against the formulas on the CPU. Tests named Small* also run under compute-sanitizer.
#include "kernels/router/router.h"

#include <gtest/gtest.h>

#include "device_data.cuh"

namespace plumb::kernels::router {
namespace {

double sqrt_softplus(double z) { return std::sqrt(std::log1p(std::exp(-std::fabs(z))) + std::max(z, 0.0)); }

struct Routed {
  std::vector<int> expert;
  std::vector<float> weight, score;
};
Routed run(const std::vector<float>& logits, const Sizes& s, const Choice& choice) {
  const Buffer<float> logits_device(logits);
  Buffer<int> expert(s.rows * s.slots);
  Buffer<float> weight(s.rows * s.slots), score(s.rows * s.experts);
  route(logits_device.get(), s, choice, expert.get(), weight.get(), score.get(), nullptr);
  return {expert.host(), weight.host(), score.host()};
}

// The best by a full sort. Scores come from the device (checked against FP64 apart), so that a tie stays a tie.
std::vector<int> sorted_choice(const float* score, const std::vector<float>& bias, const Sizes& s) {
  std::vector<int> order(s.experts);
  for (int e = 0; e < s.experts; ++e) order[e] = e;
  const auto value = [&](int e) { return bias.empty() ? score[e] : score[e] + bias[e]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return value(a) > value(b) || (std::isnan(value(b)) && !std::isnan(value(a)));
  });
  order.resize(s.slots);
  return order;
}

void check_route(const Sizes& s, bool biased) {
  auto logits = random_floats(static_cast<size_t>(s.rows) * s.experts, 2, 1);
  for (size_t i = 0; i < logits.size(); i += 3) logits[i] = std::round(logits[i]);  // ties
  for (int e = 0; e < s.experts; ++e) logits[e] = -200.0f - static_cast<float>(e);  // a row whose scores underflow
  std::vector<float> bias = biased ? random_floats(s.experts, 0.1f, 2) : std::vector<float>{};
  if (biased) bias[s.experts / 2] = NAN;
  const Buffer<float> bias_device(bias);
  const Routed r = run(logits, s, {biased ? bias_device.get() : nullptr, nullptr, nullptr, 0, 1.5f});
  for (size_t i = 0; i < logits.size(); ++i)  // at most the last bit: two libraries' FP64 functions
    ASSERT_NEAR(r.score[i], sqrt_softplus(logits[i]), 1.2e-7 * r.score[i] + 1e-44) << logits[i];
  for (int row = 0; row < s.rows; ++row) {
    const float* score = r.score.data() + static_cast<size_t>(row) * s.experts;
    const auto chosen = sorted_choice(score, bias, s);
    float total = 0;
    for (const int e : chosen) total += score[e];
    for (int j = 0; j < s.slots; ++j) {
      ASSERT_EQ(r.expert[row * s.slots + j], chosen[j]) << "row " << row << " slot " << j;
      ASSERT_EQ(r.weight[row * s.slots + j], score[chosen[j]] / (total + 1e-20f) * 1.5f) << "row " << row;
    }
  }
}
TEST(Router, SmallChoosesLikeAFullSort) {
  for (const bool biased : {false, true})
    for (const Sizes s : {Sizes{40, 256, 6}, {3, 8, 8}, {9, 384, 6}, {2, 500, 16}, {5, 1, 1}})
      check_route(s, biased && s.experts > s.slots);
}
TEST(Router, ChoosesLikeAFullSort) { check_route({16384, 256, 6}, true); }

TEST(Router, SmallHashLayers) {
  const Sizes s{50, 16, 3};
  const auto logits = random_floats(s.rows * s.experts, 1, 3);
  const int vocabulary = 20;
  std::vector<int> token(s.rows), table(vocabulary * s.slots);
  for (int r = 0; r < s.rows; ++r) token[r] = r * 7 % vocabulary;
  token[5] = -1, token[6] = vocabulary;
  for (int i = 0; i < vocabulary * s.slots; ++i) table[i] = (i / s.slots * 5 + i % s.slots * 3) % s.experts;
  const Buffer<int> token_device(token), table_device(table);
  const Routed r = run(logits, s, {nullptr, token_device.get(), table_device.get(), vocabulary, 2.5f});
  for (int row = 0; row < s.rows; ++row) {
    const bool known = token[row] >= 0 && token[row] < vocabulary;
    float total = 0;
    for (int j = 0; known && j < s.slots; ++j) total += r.score[row * s.experts + table[token[row] * s.slots + j]];
    for (int j = 0; j < s.slots; ++j) {
      const int e = known ? table[token[row] * s.slots + j] : -1;
      ASSERT_EQ(r.expert[row * s.slots + j], e);
      ASSERT_EQ(r.weight[row * s.slots + j], known ? r.score[row * s.experts + e] / (total + 1e-20f) * 2.5f : 0.0f);
    }
  }
}

// Against central differences in FP64 (step 1e-5: truncation 1e-10, cancellation 1e-11 of values near 1).
TEST(Router, SmallGradientsAgainstFiniteDifferences) {
  const Sizes s{64, 32, 4};
  auto logits = random_floats(s.rows * s.experts, 3, 4);
  for (int e = 0; e < s.experts; ++e) logits[e] -= 60;  // a row far below zero
  const Routed r = run(logits, s, {nullptr, nullptr, nullptr, 0, 1.5f});
  const auto d_weight = random_floats(s.rows * s.slots, 1, 5);
  const Buffer<float> d_device(d_weight), logits_device(logits);
  const Buffer<int> expert(r.expert);
  Buffer<float> d_logit(s.rows * s.slots);
  route_backward(d_device.get(), logits_device.get(), expert.get(), s, 1.5f, d_logit.get(), nullptr);
  const auto result = d_logit.host();
  for (int row = 0; row < s.rows; ++row) {
    const auto loss = [&](int changed, double by) {
      double total = 1e-20, sum = 0;
      double score[16];
      for (int j = 0; j < s.slots; ++j) {
        score[j] = sqrt_softplus(logits[row * s.experts + r.expert[row * s.slots + j]] + (j == changed ? by : 0));
        total += score[j];
      }
      for (int j = 0; j < s.slots; ++j) sum += d_weight[row * s.slots + j] * score[j] / total * 1.5;
      return sum;
    };
    for (int j = 0; j < s.slots; ++j)
      ASSERT_NEAR(result[row * s.slots + j], (loss(j, 1e-5) - loss(j, -1e-5)) / 2e-5, 1e-6) << "row " << row;
  }

  // The same numbers in another order, named by row_of_slot.
  const int pairs = s.rows * s.slots;
  std::vector<int> row_of_slot(pairs);
  std::vector<float> moved(pairs);
  for (int i = 0; i < pairs; ++i) moved[row_of_slot[i] = i * 7 % pairs] = d_weight[i];  // 7 and 256 are coprime
  const Buffer<float> moved_device(moved);
  const Buffer<int> slots_device(row_of_slot);
  Buffer<float> again(pairs);
  route_backward(moved_device.get(), logits_device.get(), expert.get(), s, 1.5f, again.get(), nullptr,
                 slots_device.get());
  EXPECT_EQ(differences(again.host(), result), 0u);

  const int k = 200;
  const auto gate = random_bf16(s.experts * k, 0.1f, 6);
  const Buffer<uint16_t> gate_device(gate);
  const std::vector<float> before(s.rows * k, 0.25f);
  for (const bool add : {false, true}) {
    const Buffer<float> dx(before);
    route_backward_input(d_logit.get(), expert.get(), s, gate_device.get(), k, add, dx.get(), nullptr);
    const auto v = dx.host();
    for (int row = 0; row < s.rows; ++row)
      for (int c = 0; c < k; ++c) {
        double sum = add ? 0.25 : 0;
        for (int j = 0; j < s.slots; ++j)
          sum += double{result[row * s.slots + j]} * bf16_to_float(gate[r.expert[row * s.slots + j] * k + c]);
        ASSERT_NEAR(v[row * k + c], sum, 1e-6);  // FP32 sums of four terms below 1
      }
  }
}

// Against FP64; bound: a chain of FP32 multiply-adds over an expert's rows, half an ulp of the running sum each.
TEST(Router, SmallGradientOfTheGate) {
  const Sizes s{300, 7, 3};
  const int k = 1032;
  std::vector<int> expert(s.rows * s.slots), first(s.experts + 1, 0), source, row_of_slot(s.rows * s.slots, -1);
  for (int i = 0; i < s.rows * s.slots; ++i) expert[i] = (i / s.slots + 2 * (i % s.slots)) % 5;  // 5 and 6: nobody's
  expert[4] = -1;
  for (int e = 0; e < s.experts; ++e) {
    for (int i = 0; i < s.rows * s.slots; ++i)
      if (expert[i] == e) row_of_slot[i] = static_cast<int>(source.size()), source.push_back(i / s.slots);
    first[e + 1] = static_cast<int>(source.size());
  }
  const auto d_logit = random_floats(s.rows * s.slots, 1, 7);
  const auto x = random_bf16(s.rows * k, 1, 8);
  const Buffer<float> d_device(d_logit), d_gate(std::vector<float>(s.experts * k, 0.25f));
  const Buffer<int> first_device(first), source_device(source), slots_device(row_of_slot);
  const Buffer<uint16_t> x_device(x);
  route_backward_gate(d_device.get(), {first_device.get(), source_device.get(), slots_device.get()}, s, x_device.get(),
                      k, d_gate.get(), nullptr);
  const auto v = d_gate.host();
  for (int e = 0; e < s.experts; ++e)
    for (int c = 0; c < k; ++c) {
      double sum = 0.25, magnitude = 0.25;
      for (int i = 0; i < s.rows * s.slots; ++i)
        if (expert[i] == e) {
          const double term = double{d_logit[i]} * bf16_to_float(x[i / s.slots * k + c]);
          sum += term, magnitude += std::fabs(term);
        }
      ASSERT_NEAR(v[e * k + c], sum, magnitude * (s.rows + 1) * 0x1p-24) << "expert " << e << " column " << c;
    }
}

}  // namespace
}  // namespace plumb::kernels::router
