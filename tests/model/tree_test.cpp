// A prefix tree through the model: every token has the bits that it has in its path alone, and gradients are the sums
// of those of the paths.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/philox.h"
#include "model/forward.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::random_model;
using testing::random_tokens;
using testing::tiny_config;

struct Forest {
  std::vector<TreeSegment> segments;
  std::vector<int> tokens_of_path(int s) const {
    std::vector<int> path;
    if (segments[s].parent >= 0) path = tokens_of_path(segments[s].parent);
    path.insert(path.end(), segments[s].tokens.begin(), segments[s].tokens.end());
    return path;
  }
};

Forest random_forest(const ModelConfig& c, uint64_t seed, int segments, int longest) {
  Random random(seed, 3);
  Forest f;
  for (int i = 0; i < segments; ++i) {
    const int parent = i == 0 ? -1 : static_cast<int>(random.below(i + 1)) - 1;
    const int length = static_cast<int>(random.below(longest + 1)) + (parent < 0);
    f.segments.push_back({parent, random_tokens(c, length, 1000 * seed + i), parent < 0 ? i : 0});
  }
  return f;
}

Tensor hidden_of(ResidentWeights& m, const SequencePlan& plan, Numerics n) {
  ForwardOptions o;
  o.numerics = n;
  return forward(m, plan, o).hidden;
}

// One pass over the tree, one over all its paths packed as documents.
void expect_bits_of_paths(ResidentWeights& m, const Forest& f, Numerics n) {
  const PlanShape shape = plan_shape(m.model);
  const SequencePlan plan = plan_trees(shape, f.segments);
  const Tensor tree = hidden_of(m, plan, n);
  std::vector<std::vector<int>> paths;
  for (size_t s = 0; s < f.segments.size(); ++s) paths.push_back(f.tokens_of_path(static_cast<int>(s)));
  const Tensor alone = hidden_of(m, plan_documents(shape, paths), n);
  int row = 0, end = 0;
  for (size_t s = 0; s < f.segments.size(); ++s) {
    const int count = static_cast<int>(f.segments[s].tokens.size());
    end += static_cast<int>(paths[s].size());
    const Tensor here = tree.rows(row, row + count), there = alone.rows(end - count, end);
    ASSERT_EQ(std::memcmp(here.raw(), there.raw(), here.bytes()), 0) << "segment " << s << " of " << paths[s].size();
    row += count;
  }
}

TEST(Trees, EveryTokenHasTheBitsOfItsPath) {
  auto m = random_model(tiny_config(), 1, WeightFormat::fp8);
  for (uint64_t seed = 0; seed < 460; ++seed)
    expect_bits_of_paths(*m, random_forest(m->model, seed, 2 + seed % 6, 24),
                         seed % 2 ? Numerics::released : Numerics::fp32);
}

TEST(Trees, BranchPointsAtEveryResidue) {
  auto m = random_model(tiny_config(), 2, WeightFormat::fp8);
  for (int prefix = 0; prefix <= 40; ++prefix) {
    Forest f{{{-1, random_tokens(m->model, prefix, 1), 0},
              {0, random_tokens(m->model, 19, 2), 0},
              {0, random_tokens(m->model, 3, 3), 0}}};
    expect_bits_of_paths(*m, f, prefix % 2 ? Numerics::fp32 : Numerics::released);
  }
}

TEST(Trees, AtTheReleasedRatios) {
  const ModelConfig c = testing::released_ratios_config();
  auto m = random_model(c, 3);
  for (int prefix : {1, 3, 125, 126, 127, 128, 129, 131, 254, 256, 383, 600}) {
    Forest f{{{-1, random_tokens(c, prefix, 1), 0},
              {0, random_tokens(c, 131, 2), 0},
              {0, random_tokens(c, 5, 3), 0},
              {1, random_tokens(c, 130, 4), 0}}};
    expect_bits_of_paths(*m, f, Numerics::released);
  }
}

// ---- Gradients

struct Sums {  // of all parameters that are trained, one after the other
  std::vector<double> value;
};

// Gradients of sum over rows of weight[row] . hidden[row], weights from `d`, for adapters and the embedding.
Sums gradients(ResidentWeights& m, Adapter& adapter, const SequencePlan& plan, const Tensor& d_hidden) {
  AdapterGrads grads;
  grads.layers.resize(adapter.layers.size());
  for (size_t l = 0; l < adapter.layers.size(); ++l)
    visit_lora(adapter.layers[l], grads.layers[l], [](const std::string&, LoraPair& p, LoraGrad& g) {
      if (p.defined()) g = {Tensor::zeros(p.a.shape()), Tensor::zeros(p.b.shape())};
    });
  const AdapterBatch batch{{{std::shared_ptr<Adapter>(&adapter, [](Adapter*) {}), {}, true, &grads}}};
  ForwardOptions o;
  o.numerics = Numerics::fp32;
  o.adapters = &batch;
  o.keep = Keep::streams;
  Gradients g;
  g.outer.embed = Tensor::zeros({m.model.vocab_size, m.model.hidden_size});
  const ForwardResult r = forward(m, plan, o);
  backward(m, plan, o, r, d_hidden, {}, g, {});
  Sums sums;
  const auto take = [&](const Tensor& t) { sums.value.insert(sums.value.end(), t.f32(), t.f32() + t.numel()); };
  take(g.outer.embed);
  for (size_t l = 0; l < adapter.layers.size(); ++l)
    visit_lora(adapter.layers[l], grads.layers[l], [&](const std::string&, LoraPair& p, LoraGrad& lg) {
      if (p.defined()) take(lg.a), take(lg.b);
    });
  return sums;
}

TEST(Trees, GradientsAreTheSumsOfThoseOfThePaths) {
  ModelConfig c = tiny_config();
  auto m = random_model(c, 5);
  auto adapter = random_adapter(c, 3, 6);
  for (uint64_t seed : {1, 2, 3}) {
    const Forest f = random_forest(c, 900 + seed, 6, 30);
    const SequencePlan plan = plan_trees(plan_shape(c), f.segments);
    Tensor d = Tensor::empty({plan.rows(), c.hidden_size});
    Random random(seed, 7);
    for (int64_t i = 0; i < d.numel(); ++i) d.f32()[i] = random.normal();
    const Sums tree = gradients(*m, *adapter, plan, d), again = gradients(*m, *adapter, plan, d);
    EXPECT_EQ(tree.value, again.value);

    Sums paths;
    paths.value.resize(tree.value.size());
    int row = 0;
    for (size_t s = 0; s < f.segments.size(); ++s) {
      const int count = static_cast<int>(f.segments[s].tokens.size());
      const std::vector<int> path = f.tokens_of_path(static_cast<int>(s));
      const int length = static_cast<int>(path.size());
      if (count == 0) continue;
      Tensor d_path = Tensor::zeros({length, c.hidden_size});
      std::memcpy(d_path.rows(length - count, length).raw(), d.rows(row, row + count).raw(),
                  d.rows(row, row + count).bytes());
      const Sums one = gradients(*m, *adapter, plan_documents(plan_shape(c), {path}), d_path);
      for (size_t i = 0; i < one.value.size(); ++i) paths.value[i] += one.value[i];
      row += count;
    }
    double error = 0, norm = 0;
    for (size_t i = 0; i < tree.value.size(); ++i) {
      error += std::pow(tree.value[i] - paths.value[i], 2);
      norm += std::pow(paths.value[i], 2);
    }
    // FP32 sums of a few hundred terms in another order.
    EXPECT_LT(std::sqrt(error / norm), 1e-5);
  }
}

}  // namespace
}  // namespace plumb
