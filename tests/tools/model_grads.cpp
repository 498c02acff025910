// For tests/oracle: gradients of the mean next-token loss of one token list with respect to every parameter, or to an
// adapter. usage: model_grads MODEL IDS(comma separated) OUT.safetensors NUMERICS OUT: loss [1], logits [S,V],
// grad.<released name>.
#include <cstdio>
#include <sstream>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "model/forward.h"
#include "ops/head.h"

using namespace plumb;

namespace {

struct Allocate {
  std::vector<std::pair<std::string, Tensor>>& out;
  void operator()(const std::string& name, Linear& w, Tensor& g) const {
    out.emplace_back("grad." + name, g = Tensor::zeros({w.out, w.in}));
  }
  void operator()(const std::string& name, Tensor& w, Tensor& g) const {
    out.emplace_back("grad." + name, g = Tensor::zeros(w.shape()));
  }
  void buffer(const std::string&, Tensor&) const {}
};

void run(const std::string& folder, const std::string& list, const std::string& path, const char* numerics) {
  std::vector<int> ids;
  std::stringstream in(list);
  for (std::string part; std::getline(in, part, ',');) ids.push_back(std::stoi(part));
  auto store = load_weights(Checkpoint::open(folder));
  const ModelConfig& c = store->model;
  std::vector<std::pair<std::string, Tensor>> out;
  Gradients g;
  visit_outer(store->outer_weights, g.outer, Allocate{out});
  g.layers.resize(c.num_hidden_layers);
  for (int l = 0; l < c.num_hidden_layers; ++l)
    visit_layer("layers." + std::to_string(l) + ".", c.is_hash_layer(l), store->layers[l], g.layers[l], Allocate{out});

  const SequencePlan plan = plan_documents(plan_shape(c), {ids});
  ForwardOptions o;
  o.numerics = numerics_from_name(numerics);
  o.keep = Keep::streams;
  const ForwardResult r = forward(*store, plan, o);
  out.emplace_back("logits", ops::head_logits(r.hidden, store->outer().head).value);
  const int64_t n = static_cast<int64_t>(ids.size());
  std::vector<int> target(ids.begin() + 1, ids.end());
  target.push_back(0);
  Tensor logprob = ops::head_logprobs(r.hidden, store->outer().head, target), d = Tensor::zeros({n});
  double loss = 0;
  for (int64_t i = 0; i + 1 < n; ++i)
    loss -= logprob.f32()[i] / double(n - 1), d.f32()[i] = -1.0f / static_cast<float>(n - 1);
  out.emplace_back("loss", Tensor::of<float>({static_cast<float>(loss)}));
  Tensor d_hidden = ops::head_logprobs_backward(d, r.hidden, store->outer().head, target, g.outer.head);
  backward(*store, plan, o, r, d_hidden, {}, g, {});
  write_safetensors(path, out);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 5) throw UsageError("model_grads", "needs MODEL IDS OUT NUMERICS");
    run(argv[1], argv[2], argv[3], argv[4]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
