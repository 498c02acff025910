// A training step and decoding of a checkpoint, timed on request: bench/compare_hf.py runs it beside another library.
//
// step_bench MODEL [threads] reads one command a line and answers each with one line of JSON:
//   forward N        hidden rows of N tokens and their log-probabilities
//   full N           a step over N tokens: loss and the gradient of every parameter
//   lora N           the same for a rank-8 adapter on attention, shared and routed experts
//   lora_dense N     the same without the routed experts
//   decode B P N     B greedy sequences side by side: prompts of P tokens, N new ones each
// Tokens come from the generator in `tokens`, so that the other side can make the same ones.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <sstream>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "checkpoint/checkpoint.h"
#include "model/forward.h"
#include "ops/head.h"
#include "rollout/generate.h"

namespace plumb {
namespace {

constexpr int kRank = 8;
constexpr float kScale = 4;  // alpha 32

// s <- (1103515245 s + 12345) mod 2^31, token = (s >> 8) mod vocabulary.
std::vector<int> tokens(int count, int vocab, uint32_t seed) {
  std::vector<int> ids;
  for (uint32_t s = seed; static_cast<int>(ids.size()) < count;) {
    s = (s * 1103515245u + 12345u) & 0x7fffffffu;
    ids.push_back(static_cast<int>((s >> 8) % static_cast<uint32_t>(vocab)));
  }
  return ids;
}

LoraPair random_pair(Random& random, int64_t out, int64_t in) {
  LoraPair p{Tensor::empty({kRank, in}), Tensor::empty({out, kRank}), kScale};
  for (const Tensor& t : {p.a, p.b})
    for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = 0.01f * random.normal();
  return p;
}

// wo_a is left out: PEFT cannot adapt a grouped projection.
std::shared_ptr<Adapter> make_adapter(const ResidentWeights& weights, bool routed) {
  Random random(3);
  auto adapter = std::make_shared<Adapter>();
  adapter->rank = kRank, adapter->alpha = kRank * kScale;
  const auto pair = [&](const Linear& w) { return random_pair(random, w.out, w.in); };
  for (const LayerWeights& w : weights.layers) {
    LayerLora& l = adapter->layers.emplace_back();
    l.wq_a = pair(w.attn.wq_a), l.wq_b = pair(w.attn.wq_b), l.wkv = pair(w.attn.wkv), l.wo_b = pair(w.attn.wo_b);
    if (w.kind != LayerKind::window)
      l.compressor_wkv = pair(w.attn.compressor.wkv), l.compressor_wgate = pair(w.attn.compressor.wgate);
    l.shared_w1 = pair(w.shared.w1), l.shared_w3 = pair(w.shared.w3), l.shared_w2 = pair(w.shared.w2);
    for (const ExpertWeights& e : w.experts) {
      if (!routed) break;
      l.experts.gate_up.push_back(random_pair(random, 2 * e.w1.out, e.w1.in));
      l.experts.down.push_back(pair(e.w2));
    }
  }
  return adapter;
}

struct AllocateGradients {
  void operator()(const std::string&, Linear& w, Tensor& g) const { g = Tensor::zeros({w.out, w.in}); }
  void operator()(const std::string&, Tensor& w, Tensor& g) const { g = Tensor::zeros(w.shape()); }
  void buffer(const std::string&, Tensor&) const {}
};
Gradients zero_grads(ResidentWeights& weights) {
  Gradients g;
  visit_outer(weights.outer_weights, g.outer, AllocateGradients{});
  for (LayerWeights& w : weights.layers)
    visit_layer("", w.router.tid2eid.defined(), w, g.layers.emplace_back(), AllocateGradients{});
  return g;
}

struct Bench {
  std::shared_ptr<ResidentWeights> weights;
  std::shared_ptr<Adapter> all, dense;

  // Forward pass of n tokens and, if `backward_wanted`, the way back. -> mean next-token loss
  double step(int n, const AdapterBatch* adapters, Gradients* gradients) {
    const ModelConfig& c = weights->model;
    const std::vector<int> ids = tokens(n, c.vocab_size, 1);
    const SequencePlan plan = plan_documents(plan_shape(c), {ids});
    ForwardOptions o;
    o.numerics = Numerics::fp32;
    o.adapters = adapters;
    if (gradients) o.keep = Keep::all;
    const ForwardResult r = forward(*weights, plan, o);
    std::vector<int> target(ids.begin() + 1, ids.end());
    target.push_back(0);  // its weight is 0
    const Linear& head = weights->outer().head;
    Tensor logprob, d = Tensor::full({n}, -1.0f / static_cast<float>(n - 1));
    d.f32()[n - 1] = 0;
    if (!gradients) {
      logprob = ops::head_logprobs(r.hidden, head, target);
    } else {
      const Tensor d_hidden = ops::head_logprobs_backward(d, r.hidden, head, target, gradients->outer.head, &logprob);
      backward(*weights, plan, o, r, d_hidden, {}, *gradients, {});
    }
    double loss = 0;
    for (int i = 0; i < n; ++i) loss += double{d.f32()[i]} * logprob.f32()[i];
    return loss;
  }

  double full(int n) {
    Gradients g = zero_grads(*weights);
    return step(n, nullptr, &g);
  }
  double lora(int n, const std::shared_ptr<Adapter>& adapter) {
    AdapterGrads grads = zero_grads(*adapter);
    AdapterBatch batch;
    batch.parts.push_back({adapter, {}, true, &grads});
    Gradients frozen;
    return step(n, &batch, &frozen);
  }

  std::vector<int> decode(int sequences, int prompt, int count) {
    std::vector<GenerationRequest> requests(sequences);
    for (int i = 0; i < sequences; ++i) {
      requests[i].prompt = tokens(prompt, weights->model.vocab_size, static_cast<uint32_t>(i) + 1);
      requests[i].sampling.max_tokens = count, requests[i].sampling.temperature = 0;
    }
    GenerateOptions o;
    o.numerics = Numerics::fp32, o.batch = sequences;
    std::vector<int> ids;
    for (const Generation& g : generate(*weights, requests, o))
      for (const GeneratedToken& t : g.tokens) ids.push_back(t.id);
    return ids;
  }
};

// Wall and processor time: the latter says something on a busy machine too.
struct Times {
  double wall, processor;
};
template <class Body>
Times timed(Body&& body) {
  const auto begin = std::chrono::steady_clock::now();
  const std::clock_t clock = std::clock();
  body();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
          static_cast<double>(std::clock() - clock) / CLOCKS_PER_SEC};
}
std::string json(const Times& t) {
  return fmt::format("\"seconds\": {:.6f}, \"processor_seconds\": {:.6f}", t.wall, t.processor);
}

std::string answer(Bench& bench, const std::string& line) {
  std::istringstream in(line);
  std::string what;
  int a = 0, b = 0, c = 0;
  in >> what >> a >> b >> c;
  if (what == "decode") {
    std::vector<int> ids;
    const Times t = timed([&] { ids = bench.decode(a, b, c); });
    return fmt::format("{{{}, \"tokens\": [{}]}}", json(t), fmt::join(ids, ","));
  }
  double loss = 0;
  const Times t = timed([&] {
    if (what == "forward")
      loss = bench.step(a, nullptr, nullptr);
    else if (what == "full")
      loss = bench.full(a);
    else if (what == "lora")
      loss = bench.lora(a, bench.all);
    else if (what == "lora_dense")
      loss = bench.lora(a, bench.dense);
    else
      fail("step_bench", "unknown command " + line, "see the top of step_bench.cpp");
  });
  return fmt::format("{{{}, \"loss\": {}}}", json(t), loss);
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw plumb::UsageError("step_bench", "needs MODEL [threads]");
    if (argc > 2) plumb::set_thread_count(std::max(1, std::atoi(argv[2])));
    plumb::Bench bench{plumb::load_weights(plumb::Checkpoint::open(argv[1])), nullptr, nullptr};
    bench.all = plumb::make_adapter(*bench.weights, true), bench.dense = plumb::make_adapter(*bench.weights, false);
    for (std::string line; std::getline(std::cin, line);) std::cout << plumb::answer(bench, line) << std::endl;
    return 0;
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
