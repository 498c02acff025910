// Samples, rows and runs on the small random model.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "support/tiny_model.h"
#include "train/loss.h"
#include "train/parameters.h"

namespace plumb::testing {

// Samples of these lengths with random tokens; the first third of each is not trained.
inline std::vector<Sample> random_samples(const ModelConfig& c, const std::vector<int>& lengths, uint64_t seed = 5) {
  std::vector<Sample> samples;
  for (int n : lengths) {
    Sample s;
    s.tokens = random_tokens(c, n, seed + samples.size());
    s.mask.assign(n, 1);
    for (int i = 0; i <= n / 3; ++i) s.mask[i] = 0;
    s.line = static_cast<int>(samples.size()) + 1;
    samples.push_back(s);
  }
  return samples;
}

inline std::vector<TrainRow> make_rows(const ModelConfig& c, const std::vector<Sample>& samples,
                                       const std::vector<Row>& rows) {
  std::vector<TrainRow> list;
  for (const Row& r : rows) list.push_back(make_row(plan_shape(c), samples, r));
  return list;
}

inline LoraKeys lora_keys(int rank = 2, double alpha = 4) {
  LoraKeys k;
  k.rank = rank, k.alpha = alpha;
  return k;
}

// A trainee with an adapter whose B is not zero, so that every gradient is.
inline std::unique_ptr<Trainee> random_lora_trainee(const ModelConfig& c, uint64_t seed,
                                                    WeightFormat format = WeightFormat::f32) {
  return lora_trainee(random_model(c, seed, format), random_adapter(c, 2, seed));
}

// All gradients (or masters) one after the other.
inline std::vector<float> flat(const Trainee& t, Tensor Parameter::*which) {
  std::vector<float> all;
  for (const Parameter& p : t.parameters) {
    const Tensor& x = p.*which;
    all.insert(all.end(), x.f32(), x.f32() + x.numel());
  }
  return all;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace plumb::testing
