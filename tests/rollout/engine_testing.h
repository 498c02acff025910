// Random work for the engine, random circumstances under which it is done, and the comparison with the training pass.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "base/philox.h"
#include "ops/head.h"
#include "rollout/engine.h"
#include "support/tiny_model.h"

namespace plumb::testing {

// What a request got.
struct Outcome {
  Request request;
  std::vector<GeneratedToken> tokens;
  std::string text, stop_string;
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top;
  std::vector<VersionSpan> versions;
  Tensor routed;
  int cached_tokens = 0;
  Finish finish = Finish::none;  // none: cancelled
};

// A layer of each kind, small: thousands of schedules take seconds.
inline ModelConfig small_config() {
  ModelConfig c = tiny_config();
  c.hidden_size = 16, c.num_hidden_layers = 3, c.num_nextn_predict_layers = 0, c.num_hash_layers = 1;
  c.layer_kinds = {LayerKind::csa, LayerKind::hca, LayerKind::window};
  c.num_attention_heads = 2, c.q_lora_rank = 8, c.o_lora_rank = 8, c.index_n_heads = 2, c.index_head_dim = 8;
  c.moe_intermediate_size = 16, c.n_routed_experts = 4;
  return c;
}

// Ratios and window of the released model: pages of 128 positions.
inline ModelConfig released_ratios(ModelConfig c) {
  c.hca_ratio = 128, c.sliding_window = 128;
  return c;
}

// One byte a token: letters and digits first (ids 0 to 61), then all others.
inline Tokenizer letters() {
  std::string order, vocab;
  for (int pass = 0; pass < 2; ++pass)
    for (int b = 0; b < 256; ++b)
      if ((b < 128 && std::isalnum(b) != 0) == (pass == 0)) order += static_cast<char>(b);
  for (int id = 0; id < 256; ++id) {
    const int b = static_cast<unsigned char>(order[id]);
    const bool printable = (33 <= b && b <= 126) || (161 <= b && b <= 172) || 174 <= b;  // GPT-2's byte alphabet
    int unprintable = 256;
    for (int u = 0; u < b; ++u) unprintable += !((33 <= u && u <= 126) || (161 <= u && u <= 172) || 174 <= u);
    char escaped[16];
    std::snprintf(escaped, sizeof(escaped), "\\u%04x", printable ? b : unprintable);
    vocab += (id ? ", \"" : "\"") + std::string(escaped) + "\": " + std::to_string(id);
  }
  return Tokenizer::parse(R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": null, "post_processor": null, "decoder": {"type": "ByteLevel"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "merges": [], "vocab": {)" +
                              vocab + "}}}",
                          "letters.json");
}

// Adapters a1, a2, ... of different ranks, in a registry that keeps every version.
inline std::shared_ptr<AdapterRegistry> some_adapters(const ModelConfig& c, int count) {
  auto registry = std::make_shared<AdapterRegistry>(1 << 20);
  for (int i = 1; i <= count; ++i) registry->publish("a" + std::to_string(i), random_adapter(c, 1 + i, 40 + i));
  return registry;
}

// What random_work chooses from.
struct WorkLimits {
  int most = 8;          // requests
  int adapters = 4;      // names a1, a2, ...
  int page = 16;         // prompts end around multiples of 4 up to a few pages
  int most_tokens = 22;  // of an answer
  bool shared = true;    // prompts begin alike
};

inline Request random_request(const ModelConfig& c, const WorkLimits& limits, Random& g, uint64_t seed) {
  Request r;
  const int boundary = g.below(3) == 0 ? limits.page * static_cast<int>(1 + g.below(3))
                                       : 4 * static_cast<int>(g.below(std::min(limits.page, 80)));
  const int length = std::max(1, boundary - 1 + static_cast<int>(g.below(3)));
  r.prompt = random_tokens(c, length, g.next_u32());
  if (limits.shared && g.below(3) > 0) {  // begins like others, maybe to the end
    const std::vector<int> base = random_tokens(c, 4 * limits.page, seed * 4 + g.below(2));
    const size_t alike = std::min({r.prompt.size(), base.size(), size_t{1 + g.below(4)} * limits.page + g.below(3)});
    std::copy_n(base.begin(), alike, r.prompt.begin());
  }
  SamplingParams& p = r.sampling;
  p.seed = seed;
  p.max_tokens = 1 + static_cast<int>(g.below(limits.most_tokens));
  p.temperature = g.below(4) == 0 ? 0.0f : 1.0f;
  if (g.below(2)) p.stop_tokens = {3, 17};
  if (g.below(4) == 0) p.repetition_penalty = 1.2f, p.presence_penalty = 0.5f;
  if (g.below(4) == 0) p.top_k = 5, p.top_p = 0.9f;
  if (g.below(4) == 0) r.stop_strings = {"Q", std::string(1, static_cast<char>('a' + g.below(26))) + "z"};
  p.top_logprobs = static_cast<int>(g.below(3));
  r.priority = g.below(4) == 0 ? static_cast<int>(g.below(3)) : 0;
  r.prompt_logprobs = g.below(4) == 0;
  r.prompt_top_logprobs = r.prompt_logprobs && g.below(3) == 0 ? 2 : 0;
  r.routed_experts = g.below(3) == 0;
  if (r.prompt_logprobs && g.below(4) == 0) p.max_tokens = 0;
  const int adapter = static_cast<int>(g.below(limits.adapters + 1));
  if (adapter > 0) r.adapter = "a" + std::to_string(adapter);
  if (adapter > 0 && g.below(2)) r.adapter_version = 1;
  return r;
}

// Prompts and answers around the multiples of 4 and of the page, past the window; every option now and then; groups of
// answers to one prompt.
inline std::vector<Request> random_work(const ModelConfig& c, const WorkLimits& limits, uint64_t seed) {
  Random g(seed, 1);
  std::vector<Request> work(1 + g.below(limits.most));
  WorkLimits some = limits;
  some.adapters = static_cast<int>(g.below(limits.adapters + 1));
  for (size_t i = 0; i < work.size(); ++i) {
    const bool again = i > 0 && limits.shared && g.below(4) == 0;
    work[i] = again ? work[i - 1] : random_request(c, some, g, seed);
    work[i].key = i;
  }
  return work;
}

// The smallest cache in which the longest request can run alone.
inline void set_least_pages(EngineOptions& o, const std::vector<Request>& work, const PlanShape& shape) {
  const int positions = page_positions(shape);
  o.entry_pages = o.key_pages = 0;
  for (const Request& r : work) {
    const int total = static_cast<int>(r.prompt.size()) + std::max(1, r.sampling.max_tokens);
    o.entry_pages = std::max(o.entry_pages, (total + positions - 1) / positions);
    o.key_pages = std::max(o.key_pages, most_key_pages(positions, shape.window, o.prefill_chunk, total));
  }
}

// Sizes of steps and of the cache, which is the smallest one plus a little or a lot.
inline EngineOptions random_circumstances(const std::vector<Request>& work, const PlanShape& shape, uint64_t seed) {
  Random g(seed, 2);
  EngineOptions o;
  o.numerics = seed % 2 ? Numerics::fp32 : Numerics::released;
  o.max_running = work.size() > 16 ? 64 : 1 + static_cast<int>(g.below(16));
  o.prefill_chunk = 1 + static_cast<int>(g.below(g.below(2) ? 6 : 40));
  if (shape.window > 16) o.prefill_chunk *= 5;
  o.token_budget = o.max_running + static_cast<int>(g.below(40));
  o.prefix_cache = g.below(4) > 0;
  static const Tokenizer tokenizer = letters();
  o.tokenizer = tokenizer;
  set_least_pages(o, work, shape);
  const uint32_t more = work.size() > 16 ? 400 : g.below(3) == 0 ? 60 : shape.window > 16 ? 2 : 5;
  o.entry_pages += static_cast<int>(g.below(more)), o.key_pages += static_cast<int>(g.below(more));
  return o;
}

// Runs the work with random arrivals and, where asked for, random cancels. `each` sees the engine after every step.
template <class Each>
std::vector<Outcome> run_schedule(Engine& engine, const std::vector<Request>& work, uint64_t seed, bool cancels,
                                  Each&& each) {
  Random g(seed, 3);
  std::vector<Outcome> outcomes;
  std::map<RequestId, size_t> index;
  const uint32_t at_once = work.size() > 16 ? 70 : 4;
  while (outcomes.size() < work.size() || !engine.idle()) {
    for (uint32_t arrivals = g.below(at_once); arrivals > 0 && outcomes.size() < work.size(); --arrivals) {
      const Request& r = work[outcomes.size()];
      index[engine.submit(r)] = outcomes.size();
      outcomes.emplace_back().request = r;
    }
    for (Event& e : engine.step()) {
      Outcome& o = outcomes[index.at(e.request)];
      if (o.tokens.empty()) {
        o.prompt_logprobs = e.prompt_logprobs, o.prompt_top = e.prompt_top;
        o.cached_tokens = e.cached_tokens;
      }
      if (e.token.id >= 0) o.tokens.push_back(e.token);
      o.text += e.text, o.stop_string = e.stop_string, o.versions = e.versions;
      o.finish = e.finish, o.routed = e.routed;
      if (e.finish == Finish::error) ADD_FAILURE() << e.error;
    }
    if (cancels && !outcomes.empty() && g.below(12) == 0) engine.cancel(1 + g.below(outcomes.size()));
    each(engine);
  }
  return outcomes;
}

// What the engine says of a finished sequence, and the same sequence as a document of training.
inline std::vector<int> document_of(const Outcome& o) {
  std::vector<int> document = o.request.prompt;
  for (const GeneratedToken& t : o.tokens) document.push_back(t.id);
  return document;
}

// Which rows of the packed documents were computed with which adapter.
inline AdapterBatch adapters_of(const std::vector<Outcome>& outcomes, const AdapterRegistry& registry) {
  AdapterBatch batch;
  int row = 0;
  for (const Outcome& o : outcomes) {
    const int rows = static_cast<int>(document_of(o).size());
    for (int t = 0; t < rows; ++t, ++row) {
      if (o.request.adapter.empty()) continue;
      const auto span = std::ranges::find_if(o.versions.rbegin(), o.versions.rend(),
                                             [&](const VersionSpan& v) { return v.first <= t; });
      const auto adapter = registry.version(o.request.adapter, span->version)->adapter;
      auto part = std::ranges::find_if(batch.parts, [&](auto& p) { return p.adapter == adapter; });
      if (part == batch.parts.end()) part = batch.parts.insert(part, {adapter, {}, false, nullptr});
      part->rows.push_back(row);
    }
  }
  return batch;
}

// Numbers of one outcome that differ from those of the training pass; `first` is its first row there.
inline int mismatches_of(const Outcome& o, int first, const Tensor& logprobs, const ops::Logits& logits,
                         const Taps& taps) {
  int bad = 0;
  const int prompt = static_cast<int>(o.request.prompt.size());
  const auto wrong = [&](const TokenLogprob& t, int64_t row) {
    return t.logprob != ops::log_probability(logits.value.rows(row, row + 1).f32()[t.id], logits.normaliser[row]);
  };
  for (size_t i = 0; i < o.tokens.size(); ++i) {
    const int64_t row = first + prompt - 1 + static_cast<int64_t>(i);
    bad += o.tokens[i].logprob != logprobs.f32()[row];
    for (const TokenLogprob& t : o.tokens[i].top) bad += wrong(t, row);
  }
  for (size_t i = 0; i < o.prompt_logprobs.size(); ++i)
    bad += o.prompt_logprobs[i] != logprobs.f32()[first + static_cast<int64_t>(i)];
  for (size_t i = 0; i < o.prompt_top.size(); ++i)
    for (const TokenLogprob& t : o.prompt_top[i]) bad += wrong(t, first + static_cast<int64_t>(i));
  if (!o.routed.defined()) return bad;
  const int64_t layers = o.routed.size(1), width = o.routed.size(2);
  for (int64_t i = 0; i < o.routed.numel(); ++i) {
    const int64_t row = i / (layers * width), layer = i / width % layers;
    const Tensor& chosen = taps.values.at("routed." + std::to_string(layer));
    bad += o.routed.ptr<int32_t>()[i] != chosen.ptr<int64_t>()[(first + row) * width + i % width];
  }
  return bad;
}

// Numbers that the engine gave and the training pass over the finished sequences, packed into one row, does not.
// Cancelled requests never told which versions of a changing adapter they used; those are left out.
inline int mismatches(WeightStore& m, Numerics n, const std::vector<Outcome>& all, const AdapterRegistry& registry) {
  std::vector<Outcome> outcomes;
  std::vector<std::vector<int>> documents;
  for (const Outcome& o : all) {
    const bool cancelled = o.finish == Finish::none;
    if (cancelled && (o.tokens.empty() || (!o.request.adapter.empty() && !o.request.adapter_version))) continue;
    outcomes.push_back(o);
    if (cancelled && o.request.adapter_version) outcomes.back().versions = {{0, *o.request.adapter_version}};
    documents.push_back(document_of(o));
  }
  if (documents.empty()) return 0;
  const AdapterBatch adapters = adapters_of(outcomes, registry);
  const SequencePlan plan = plan_documents(plan_shape(m.config()), documents);
  Taps taps;
  taps.choices_only = true;
  ForwardOptions options;
  options.numerics = n, options.adapters = &adapters, options.taps = &taps;
  const Tensor hidden = forward(m, plan, options).hidden;
  std::vector<int> target(plan.token.begin() + 1, plan.token.end());
  target.push_back(0);
  const Tensor logprobs = ops::head_logprobs(hidden, m.outer().head, target);
  ops::Logits logits = ops::head_logits(hidden, m.outer().head);
  logits.value = to_host(logits.value);
  int bad = 0, first = 0;
  for (size_t d = 0; d < outcomes.size(); first += static_cast<int>(documents[d++].size()))
    bad += mismatches_of(outcomes[d], first, logprobs, logits, taps);
  return bad;
}
// The same with a training pass for each sequence alone.
inline int mismatches_alone(WeightStore& m, Numerics n, const std::vector<Outcome>& all,
                            const AdapterRegistry& registry) {
  int bad = 0;
  for (const Outcome& o : all) bad += mismatches(m, n, {o}, registry);
  return bad;
}

}  // namespace plumb::testing
