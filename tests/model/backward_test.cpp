// Gradients of the whole model that transformers cannot check: adapters, MTP, the indexer's loss, several adapters in a
// batch. The function values are FP32, so a central difference along a random direction is compared (its error shrinks
// with the number of parameters that move together); step and tolerance are chosen where halving the step no longer
// changes the difference.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "base/philox.h"
#include "model/forward.h"
#include "ops/head.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::random_model;
using testing::random_tokens;
using testing::tiny_config;

struct Problem {
  std::shared_ptr<ResidentWeights> model;
  std::vector<std::vector<int>> documents;
  SequencePlan plan;
  ForwardOptions options;
};

Problem make_problem(uint64_t seed) {
  Problem p;
  ModelConfig c = tiny_config();
  c.index_topk = 100;     // no discrete choice between entries flips under a small step
  c.num_hash_layers = 6;  // nor one between experts
  c.swiglu_limit = 0;     // and there is no kink at the clamp (test_hf.py has the clamp's gradient)
  p.model = random_model(c, seed);
  p.documents = {random_tokens(c, 23, seed), random_tokens(c, 35, seed + 1)};
  p.plan = plan_documents(plan_shape(c), p.documents);
  p.options.numerics = Numerics::fp32;
  p.options.keep = Keep::streams;
  return p;
}

std::vector<int> next_tokens(const std::vector<std::vector<int>>& documents, int shift) {
  std::vector<int> target;
  for (const auto& d : documents)
    for (size_t i = 0; i + (shift == 2 ? 1 : 0) < d.size(); ++i)
      target.push_back(i + shift < d.size() ? d[i + shift] : -1);
  return target;
}

// Mean log-probability of the next tokens (rows without one have weight 0), and the gradient at the hidden rows if
// wanted.
double objective(const Tensor& hidden, const Linear& head, std::vector<int> target, Tensor* d_hidden = nullptr) {
  Tensor weight = Tensor::zeros({hidden.size(0)});
  double sum = 0;
  for (size_t i = 0; i < target.size(); ++i)
    if (target[i] < 0)
      target[i] = 0;
    else
      weight.f32()[i] = 1.0f / static_cast<float>(target.size());
  const Tensor logprob = ops::head_logprobs(hidden, head, target);
  for (int64_t i = 0; i < logprob.numel(); ++i) sum += double(weight.f32()[i]) * logprob.f32()[i];
  if (d_hidden) *d_hidden = ops::head_logprobs_backward(weight, hidden, head, target, {});
  return sum;
}

// grad . direction against (f(x + h direction) - f(x - h direction)) / 2h.
void check_direction(const Tensor& x, const Tensor& grad, const std::function<double()>& f, const std::string& name,
                     uint64_t seed) {
  Random g(seed, std::hash<std::string>()(name));
  const Tensor keep = x.clone();
  std::vector<float> direction(x.numel());
  double expected = 0, norm = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    direction[i] = g.normal();
    expected += double(grad.f32()[i]) * direction[i];
    norm += double(grad.f32()[i]) * grad.f32()[i];
  }
  norm = std::sqrt(norm);
  const double step = 1e-4;
  auto at = [&](double t) {
    for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = static_cast<float>(keep.f32()[i] + t * direction[i]);
    return f();
  };
  const double slope = (at(step) - at(-step)) / (2 * step);
  std::memcpy(x.raw(), keep.raw(), keep.bytes());
  // FP32 noise of the objective, 3e-7, over the step; curvature: a few per mille of the gradient's norm.
  EXPECT_NEAR(slope, expected, 3e-7 / step + 0.01 * norm) << name << " norm " << norm;
}

TEST(Backward, AdapterGradients) {
  Problem p = make_problem(1);
  auto adapter = random_adapter(p.model->model, 3, 2);
  AdapterGrads grads = zero_grads(*adapter);
  AdapterBatch batch{{{adapter, {}, true, &grads}}};
  p.options.adapters = &batch;
  const Linear& head = p.model->outer().head;
  auto run = [&] { return objective(forward(*p.model, p.plan, p.options).hidden, head, next_tokens(p.documents, 1)); };
  const ForwardResult r = forward(*p.model, p.plan, p.options);
  Tensor d_hidden;
  objective(r.hidden, head, next_tokens(p.documents, 1), &d_hidden);
  Gradients frozen;
  backward(*p.model, p.plan, p.options, r, d_hidden, {}, frozen, {});
  int checked = 0;
  for (size_t l = 0; l < adapter->layers.size(); ++l)
    visit_lora(adapter->layers[l], grads.layers[l], [&](const std::string& name, LoraPair& pair, LoraGrad& g) {
      if (name.find("experts.") != std::string::npos && name.find(".1.") == std::string::npos &&
          name.find("shared") == std::string::npos)
        return;
      if (!pair.defined()) return;
      const std::string full = std::to_string(l) + "." + name;
      check_direction(pair.a, g.a, run, full + ".A", 5);
      check_direction(pair.b, g.b, run, full + ".B", 6);
      ++checked;
    });
  EXPECT_GT(checked, 60);
}

TEST(Backward, EachAdapterOfABatchGetsTheGradientOfItsOwnRows) {
  Problem p = make_problem(3);
  std::shared_ptr<Adapter> adapters[2] = {random_adapter(p.model->model, 2, 4), random_adapter(p.model->model, 3, 5)};
  const Linear& head = p.model->outer().head;
  auto gradients = [&](const SequencePlan& plan, const std::vector<std::vector<int>>& documents, AdapterBatch& batch) {
    ForwardOptions o = p.options;
    o.adapters = &batch;
    const ForwardResult r = forward(*p.model, plan, o);
    Tensor d_hidden = Tensor::empty(r.hidden.shape());
    const std::vector<int> target = next_tokens(documents, 1);
    std::vector<int> safe = target;
    Tensor weight = Tensor::zeros({r.hidden.size(0)});
    for (size_t i = 0; i < target.size(); ++i) target[i] < 0 ? safe[i] = 0, 0 : (weight.f32()[i] = 0.25f, 0);
    d_hidden = ops::head_logprobs_backward(weight, r.hidden, head, safe, {});
    Gradients frozen;
    backward(*p.model, plan, o, r, d_hidden, {}, frozen, {});
  };
  AdapterGrads mixed[2] = {zero_grads(*adapters[0]), zero_grads(*adapters[1])};
  AdapterBatch both;
  int row = 0;
  for (int a = 0; a < 2; ++a) {
    std::vector<int> rows;
    for (size_t i = 0; i < p.documents[a].size(); ++i) rows.push_back(row++);
    both.parts.push_back({adapters[a], rows, false, &mixed[a]});
  }
  gradients(p.plan, p.documents, both);
  for (int a = 0; a < 2; ++a) {
    AdapterGrads alone = zero_grads(*adapters[a]);
    AdapterBatch one{{{adapters[a], {}, true, &alone}}};
    gradients(plan_documents(plan_shape(p.model->model), {p.documents[a]}), {p.documents[a]}, one);
    for (size_t l = 0; l < alone.layers.size(); ++l) {
      LayerLora pairs = adapters[a]->layers[l];
      std::vector<std::pair<Tensor, Tensor>> got;
      visit_lora(pairs, alone.layers[l], [&](const std::string&, LoraPair&, LoraGrad& g) {
        got.push_back({g.a, g.b});
      });
      size_t i = 0;
      visit_lora(pairs, mixed[a].layers[l], [&](const std::string& name, LoraPair& pair, LoraGrad& g) {
        if (!pair.defined()) return void(++i);
        EXPECT_EQ(std::memcmp(g.a.raw(), got[i].first.raw(), g.a.bytes()), 0) << a << " " << l << " " << name;
        EXPECT_EQ(std::memcmp(g.b.raw(), got[i].second.raw(), g.b.bytes()), 0) << a << " " << l << " " << name;
        ++i;
      });
    }
  }
}

struct AllGrads {
  std::vector<std::pair<std::string, std::pair<Tensor, Tensor>>> list;  // name, (weight, gradient)
  void operator()(const std::string& name, Linear& w, Tensor& g) { add(name, w.data, g); }
  void operator()(const std::string& name, Tensor& w, Tensor& g) { add(name, w, g); }
  void add(const std::string& name, const Tensor& w, Tensor& g) {
    list.push_back({name, {w, g = Tensor::zeros(w.shape())}});
  }
  void buffer(const std::string&, Tensor&) {}
};

AllGrads allocate(ResidentWeights& m, Gradients& g) {
  AllGrads all;
  visit_outer(m.outer_weights, g.outer, all);
  g.layers.resize(m.layers.size());
  for (size_t l = 0; l < m.layers.size(); ++l)
    visit_layer("layers." + std::to_string(l) + ".", m.model.is_hash_layer(static_cast<int>(l)), m.layers[l],
                g.layers[l], all);
  g.mtp.resize(m.mtps.size());
  for (size_t j = 0; j < m.mtps.size(); ++j) visit_mtp("mtp." + std::to_string(j) + ".", m.mtps[j], g.mtp[j], all);
  return all;
}

TEST(Backward, MtpLossReachesItsOwnParametersAndTheBackbone) {
  Problem p = make_problem(7);
  const MtpInput input = plan_mtp(plan_shape(p.model->model), p.documents);
  const Linear& head = p.model->outer().head;
  auto run = [&] {
    const ForwardResult r = forward(*p.model, p.plan, p.options);
    return objective(mtp_forward(*p.model, 0, input, r.streams.back(), p.options), head, next_tokens(p.documents, 2));
  };
  Gradients g;
  AllGrads all = allocate(*p.model, g);
  const ForwardResult r = forward(*p.model, p.plan, p.options);
  Tensor d_hidden, d_last = Tensor::zeros(r.streams.back().shape());
  objective(mtp_forward(*p.model, 0, input, r.streams.back(), p.options), head, next_tokens(p.documents, 2), &d_hidden);
  AuxiliaryResults results;
  mtp_backward(*p.model, 0, input, r.streams.back(), p.options, d_hidden, d_last, g, {}, results);
  backward(*p.model, p.plan, p.options, r, Tensor::zeros(r.hidden.shape()), d_last, g, {});
  int checked = 0;
  for (auto& [name, pair] : all.list) {
    const bool own = name.starts_with("mtp.0.") && name.find("experts.") == std::string::npos;
    const bool trunk = name == "embed.weight" || name == "layers.5.attn.wq_a.weight" ||
                       name == "layers.1.attn.compressor.wkv.weight" || name == "layers.2.hc_ffn_fn" ||
                       name == "layers.3.ffn.experts.2.w2.weight";
    if (own || trunk) check_direction(pair.first, pair.second, run, name, 8), ++checked;
  }
  EXPECT_GT(checked, 25);
}

// B11, T5, T6: the indexer's loss moves the indexer only; without it the indexer gets exact zeros.
TEST(Backward, IndexerLossReachesTheIndexerOnly) {
  Problem p = make_problem(9);
  auto gradients = [&](float coefficient) {
    Gradients g;
    AllGrads all = allocate(*p.model, g);
    const ForwardResult r = forward(*p.model, p.plan, p.options);
    Tensor d_hidden;
    objective(r.hidden, p.model->outer().head, next_tokens(p.documents, 1), &d_hidden);
    AuxiliaryLosses aux;
    aux.indexer = {coefficient, false, 58};
    const AuxiliaryResults results = backward(*p.model, p.plan, p.options, r, d_hidden, {}, g, aux);
    EXPECT_EQ(results.indexer > 0, coefficient > 0);
    return all;
  };
  const AllGrads off = gradients(0), on = gradients(0.5f);
  int indexer = 0;
  for (size_t i = 0; i < off.list.size(); ++i) {
    const auto& [name, pair] = off.list[i];
    const Tensor &without = pair.second, &with = on.list[i].second.second;
    if (name.find(".indexer.") == std::string::npos) {
      EXPECT_EQ(std::memcmp(without.raw(), with.raw(), with.bytes()), 0) << name;
      continue;
    }
    double size = 0;
    for (int64_t k = 0; k < with.numel(); ++k) {
      EXPECT_EQ(without.f32()[k], 0) << name;
      size += std::fabs(with.f32()[k]);
    }
    EXPECT_GT(size, 0) << name;
    ++indexer;
  }
  EXPECT_EQ(indexer, 2 * 6);  // two csa layers, six parameters each
}

// The gradient of the indexer's own loss, by differences of the loss itself (its teacher does not depend on the
// indexer).
TEST(Backward, IndexerGradientsFollowItsLoss) {
  Problem p = make_problem(10);
  auto loss = [&](Gradients& g) {
    const ForwardResult r = forward(*p.model, p.plan, p.options);
    AuxiliaryLosses aux;
    aux.indexer = {1.0f, false, 10};
    return backward(*p.model, p.plan, p.options, r, Tensor::zeros(r.hidden.shape()), {}, g, aux).indexer / 10;
  };
  Gradients g;
  AllGrads all = allocate(*p.model, g);
  loss(g);
  for (auto& [name, pair] : all.list)
    if (name.find(".indexer.") != std::string::npos) {
      auto run = [&] {
        Gradients scratch;
        allocate(*p.model, scratch);
        return loss(scratch);
      };
      check_direction(pair.first, pair.second, run, name, 11);
    }
}

// Two runs; and some that keep what their layers computed instead of recomputing it.
TEST(Backward, RepeatsAndKeptLayersGiveTheSameBits) {
  Problem p = make_problem(12);
  p.options.numerics = Numerics::released;
  auto gradients = [&](Keep keep) {
    p.options.keep = keep;
    Gradients g;
    AllGrads all = allocate(*p.model, g);
    const ForwardResult r = forward(*p.model, p.plan, p.options);
    Tensor d_hidden;
    objective(r.hidden, p.model->outer().head, next_tokens(p.documents, 1), &d_hidden);
    backward(*p.model, p.plan, p.options, r, d_hidden, {}, g, {});
    return all;
  };
  const AllGrads a = gradients(Keep::streams);
  for (const AllGrads& b : {gradients(Keep::streams), gradients(Keep::outputs), gradients(Keep::all)})
    for (size_t i = 0; i < a.list.size(); ++i) {
      const Tensor &one = a.list[i].second.second, &other = b.list[i].second.second;
      EXPECT_EQ(std::memcmp(one.raw(), other.raw(), one.bytes()), 0) << a.list[i].first;
    }
}

}  // namespace
}  // namespace plumb
