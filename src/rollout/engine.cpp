#include "rollout/engine.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/head.h"

namespace plumb {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

void check_options(const EngineOptions& o) {
  const auto at_least = [](const char* name, int value, int least) {
    if (value < least) fail(name, number(value) + " is too small", "at least " + number(least));
  };
  at_least("max_running", o.max_running, 1);
  at_least("prefill_chunk", o.prefill_chunk, 1);
  at_least("token_budget", o.token_budget, o.max_running);
  at_least("key_pages", o.key_pages, 1);
  at_least("entry_pages", o.entry_pages, 1);
}

void check_request(const Request& r, const ModelConfig& c) {
  check(r.sampling, c.vocab_size);
  if (r.prompt.empty()) fail("prompt", "is empty", "a sequence starts with at least one token");
  for (int t : r.prompt)
    if (t < 0 || t >= c.vocab_size)
      fail("prompt", "token " + number(t) + " is not in the vocabulary", "allowed: 0 to " + number(c.vocab_size - 1));
  const int64_t longest = static_cast<int64_t>(r.prompt.size()) + r.sampling.max_tokens;
  if (longest > c.max_position_embeddings)
    fail("max_tokens",
         "prompt and answer may reach " + number(longest) + " tokens, more than the model's " +
             number(c.max_position_embeddings),
         "shorten one of them");
}

// Rows of `from` copied into a tensor of their own.
Tensor copy_rows(const Tensor& from, const std::vector<int>& rows) {
  const Tensor to = Tensor::empty({static_cast<int64_t>(rows.size()), from.size(1)});
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(to.f32() + i * to.size(1), from.f32() + rows[i] * to.size(1), to.size(1) * sizeof(float));
  return to;
}

}  // namespace

Engine::Engine(WeightStore& weights, const EngineOptions& options, std::shared_ptr<AdapterRegistry> registry)
    : weights_(weights),
      options_(options),
      registry_(std::move(registry)),
      shape_(plan_shape(weights.config())),
      pools_{page_positions(shape_), PagePool(options.key_pages), PagePool(options.entry_pages)} {
  check_options(options);
  cache_ = make_cache(weights.config(), cache_shape(shape_, pools_.shape()), options.max_running * 2 * shape_.csa_ratio,
                      options.max_running * shape_.hca_ratio);
  for (int lane = options.max_running; lane-- > 0;) free_lanes_.push_back(lane);
}

RequestId Engine::submit(Request request) {
  check_request(request, weights_.config());
  const int longest = static_cast<int>(request.prompt.size()) + request.sampling.max_tokens;
  // Alone in the cache, every request must be able to finish: then the first in order always can.
  if (pools_.pages(longest) > pools_.entries.total() ||
      most_key_pages(pools_, shape_.window, options_.prefill_chunk, longest) > pools_.keys.total())
    fail("max_tokens", "prompt and answer may reach " + number(longest) + " tokens, more than the cache holds",
         "shorten one of them, or give the engine more pages");
  Sequence s;
  s.id = next_id_++;
  if (!request.adapter.empty()) {
    if (!registry_) fail("adapter", "'" + request.adapter + "' is not loaded", "this engine has no adapters");
    s.adapter = request.adapter_version ? registry_->version(request.adapter, *request.adapter_version)
                                        : registry_->newest(request.adapter);
  }
  s.tokens = request.prompt;
  s.request = std::move(request);
  const RequestId id = s.id;
  waiting_.emplace(Order{s.request.priority, id}, std::move(s));
  return id;
}

bool Engine::cancel(RequestId id) {
  for (Sequences* list : {&running_, &waiting_})
    for (auto it = list->begin(); it != list->end(); ++it)
      if (it->first.id == id) {
        if (it->second.lane >= 0) release(it->second);
        list->erase(it);
        return true;
      }
  return false;
}

EngineStats Engine::stats() const {
  EngineStats stats;
  stats.waiting = static_cast<int>(waiting_.size()), stats.running = static_cast<int>(running_.size());
  stats.free_key_pages = pools_.keys.free(), stats.free_entry_pages = pools_.entries.free();
  for (const auto& [order, s] : running_) {
    stats.held_key_pages += held_key_pages(s.table);
    stats.held_entry_pages += static_cast<int>(s.table.entry_page.size());
  }
  stats.steps = steps_, stats.rows = rows_, stats.preemptions = preemptions_;
  return stats;
}

std::vector<Event> Engine::step() {
  admit();
  schedule();
  if (running_.empty()) return {};
  SequencePlan plan = make_plan();
  if (options_.edit_plan) options_.edit_plan(plan);
  const AdapterBatch adapters = adapters_of_rows();
  Taps taps;
  taps.choices_only = true;
  ForwardOptions o;
  o.numerics = options_.numerics;
  o.adapters = adapters.parts.empty() ? nullptr : &adapters;
  o.cache = &cache_;
  const bool routed = std::any_of(running_.begin(), running_.end(),
                                  [](const auto& s) { return s.second.rows > 0 && s.second.request.routed_experts; });
  if (routed) o.taps = &taps;
  const Tensor hidden = forward(weights_, plan, o).hidden;
  ++steps_, rows_ += plan.rows();
  if (routed) keep_routed(taps);
  return take_results(hidden);
}

// Moves waiting requests into the cache, in order, while there is room for all of their tokens beside what those in the
// cache still need for theirs. Nobody overtakes a request that does not fit.
void Engine::admit() {
  int keys = pools_.keys.free(), entries = pools_.entries.free();
  const auto reserve = [&](const Sequence& s) {
    const int total = static_cast<int>(s.tokens.size()) + 1;
    keys -= most_key_pages(pools_, shape_.window, options_.prefill_chunk, total) - held_key_pages(s.table);
    entries -= pools_.pages(total) - static_cast<int>(s.table.entry_page.size());
  };
  for (const auto& [order, s] : running_) reserve(s);
  while (!waiting_.empty() && !free_lanes_.empty()) {
    Sequence& s = waiting_.begin()->second;
    reserve(s);
    if (keys < 0 || entries < 0) return;
    s.lane = free_lanes_.back();
    free_lanes_.pop_back();
    s.table.csa_pending_base = s.lane * 2 * shape_.csa_ratio;
    s.table.hca_pending_base = s.lane * shape_.hca_ratio;
    running_.insert(waiting_.extract(waiting_.begin()));
  }
}

// Decides how many rows of each sequence run, next tokens before prompts, and takes the pages for them; where there are
// too few, the last in order is preempted.
void Engine::schedule() {
  int budget = options_.token_budget;
  const auto left = [](const Sequence& s) { return static_cast<int>(s.tokens.size()) - s.length; };
  for (auto& [order, s] : running_) {
    s.rows = left(s) == 1 ? 1 : 0;
    budget -= s.rows;
  }
  for (auto& [order, s] : running_) {
    if (s.rows > 0) continue;
    s.rows = std::min({left(s), options_.prefill_chunk, budget});
    budget -= s.rows;
  }
  for (auto it = running_.begin(); it != running_.end();) {
    if (grow(it->second.table, it->second.length + it->second.rows, pools_)) {
      ++it;
      continue;
    }
    const auto last = std::prev(running_.end());
    const bool itself = last == it;
    preempt(last);
    if (itself) break;
  }
}

// Back into the queue, at its old place. Its rows are computed again from its tokens: a row's result depends on its
// inputs alone, so with the same bits.
void Engine::preempt(Sequences::iterator it) {
  release(it->second);
  ++preemptions_;
  waiting_.insert(running_.extract(it));
}

void Engine::release(Sequence& s) {
  release_all(s.table, pools_);
  free_lanes_.push_back(s.lane);
  s.lane = -1, s.length = 0, s.rows = 0;
}

// Rows at the end of this step's chunk whose hidden state somebody asks for.
int Engine::wanted_rows(const Sequence& s) const {
  const int end = s.length + s.rows, known = static_cast<int>(s.prompt_logprobs.size());
  const int targets = static_cast<int>(s.request.prompt.size()) - 1;  // rows that predict a prompt token
  const bool answering = s.tokens.size() > s.request.prompt.size();
  if (s.request.prompt_logprobs && !answering && known < targets) return std::max(0, end - std::max(s.length, known));
  return s.samples() ? 1 : 0;
}

SequencePlan Engine::make_plan() const {
  std::vector<PagedRun> runs;
  for (const auto& [order, s] : running_)
    runs.push_back({&s.table, s.length, {s.tokens.data() + s.length, static_cast<size_t>(s.rows)}, wanted_rows(s)});
  return plan_paged_step(shape_, pools_.shape(), runs);
}

// Rows that have been computed before keep the adapter that they had; new ones get the newest version, unless the
// request pins one.
AdapterBatch Engine::adapters_of_rows() {
  AdapterBatch batch;
  std::map<const AdapterSnapshot*, size_t> part;
  int row = 0;
  for (auto& [order, s] : running_) {
    const int end = s.length + s.rows;
    if (s.adapter && end > s.computed) {
      if (!s.request.adapter_version) s.adapter = registry_->follow(s.adapter);
      if (s.spans.empty() || s.spans.back().adapter != s.adapter) s.spans.push_back({s.computed, s.adapter});
    }
    size_t span = 0;
    for (int t = s.length; t < end; ++t, ++row) {
      if (!s.adapter) continue;
      while (span + 1 < s.spans.size() && s.spans[span + 1].first <= t) ++span;
      const AdapterRef& used = s.spans[span].adapter;
      const auto [it, added] = part.try_emplace(used.get(), batch.parts.size());
      if (added) batch.parts.push_back({used->adapter, {}, false, nullptr});
      batch.parts[it->second].rows.push_back(row);
    }
  }
  return batch;
}

void Engine::keep_routed(const Taps& taps) {
  const int layers = weights_.config().num_hidden_layers;
  std::vector<const Tensor*> chosen;
  for (int layer = 0; layer < layers; ++layer) chosen.push_back(&taps.values.at("routed." + number(layer)));
  int first = 0;
  for (auto& [order, s] : running_) {
    for (int i = std::max(0, s.computed - s.length); s.request.routed_experts && i < s.rows; ++i)
      for (const Tensor* t : chosen) {
        const int64_t* experts = t->ptr<int64_t>() + (first + i) * t->size(1);
        s.routed.insert(s.routed.end(), experts, experts + t->size(1));
      }
    first += s.rows;
  }
}

// hidden [wanted rows of all sequences, in order, d] -> prompt log-probabilities kept, next tokens sampled, finished
// sequences gone.
std::vector<Event> Engine::take_results(const Tensor& hidden) {
  std::vector<int> known_rows, target, sampled_rows;
  std::vector<Sequence*> known_of, sampled_of;
  int at = 0;
  for (auto& [order, s] : running_) {
    const int wanted = wanted_rows(s), end = s.length + s.rows;
    for (int t = end - wanted; t < end; ++t, ++at) {
      if (s.samples() && t + 1 == end) {
        sampled_rows.push_back(at), sampled_of.push_back(&s);
      } else {
        known_rows.push_back(at), known_of.push_back(&s);
        target.push_back(s.tokens[t + 1]);
      }
    }
  }
  const Linear& head = weights_.outer().head;
  if (!known_rows.empty()) {
    const Tensor logprobs = ops::head_logprobs(copy_rows(hidden, known_rows), head, target);
    for (size_t i = 0; i < known_of.size(); ++i) known_of[i]->prompt_logprobs.push_back(logprobs.f32()[i]);
  }
  std::vector<GeneratedToken> sampled(sampled_rows.size());
  if (!sampled.empty()) {
    const Tensor logits = ops::head_logits(copy_rows(hidden, sampled_rows), head);
    const size_t vocab = static_cast<size_t>(logits.size(1));
    parallel_for(logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Request& r = sampled_of[i]->request;
        sampled[i] = sample_token({logits.f32() + i * logits.size(1), vocab}, r.sampling, r.key, sampled_of[i]->tokens,
                                  r.prompt.size());
      }
    });
  }

  std::vector<Event> events;
  size_t next = 0;
  for (auto it = running_.begin(); it != running_.end();) {
    Sequence& s = it->second;
    const bool samples = s.samples();
    s.length += s.rows, s.computed = std::max(s.computed, s.length), s.rows = 0;
    if (samples) {
      events.push_back(take_token(s, std::move(sampled[next++])));
      if (events.back().finish != Finish::none) {
        release(s);
        it = running_.erase(it);
        continue;
      }
    }
    release_passed_keys(s.table, s.length, shape_.window, pools_);
    ++it;
  }
  return events;
}

Event Engine::take_token(Sequence& s, GeneratedToken token) {
  const SamplingParams& p = s.request.sampling;
  const size_t prompt = s.request.prompt.size();
  Event e;
  e.request = s.id;
  e.token = std::move(token);
  if (!s.spans.empty()) e.token.adapter_version = s.spans.back().adapter->version;
  if (s.tokens.size() == prompt) e.prompt_logprobs = std::move(s.prompt_logprobs);
  s.tokens.push_back(e.token.id);
  if (std::count(p.stop_tokens.begin(), p.stop_tokens.end(), e.token.id) > 0)
    e.finish = Finish::stop;
  else if (s.tokens.size() - prompt >= static_cast<size_t>(p.max_tokens))
    e.finish = Finish::length;
  if (e.finish != Finish::none && s.request.routed_experts) {
    const ModelConfig& c = weights_.config();
    e.routed = Tensor::of(s.routed, {s.computed, c.num_hidden_layers, c.num_experts_per_tok});
  }
  return e;
}

}  // namespace plumb
