#include "rollout/engine.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

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
  if (r.sampling.max_tokens == 0 && !r.prompt_logprobs && !r.routed_experts)
    fail("max_tokens", "0 leaves nothing to do", "at least 1, or ask for prompt_logprobs or routed_experts");
  if (r.prompt_top_logprobs < 0 || r.prompt_top_logprobs > 100)
    fail("prompt_top_logprobs", number(r.prompt_top_logprobs) + " is out of range", "allowed: 0 to 100");
  if (r.prompt_top_logprobs > 0 && !r.prompt_logprobs)
    fail("prompt_top_logprobs", "needs prompt_logprobs", "ask for both");
  for (const std::string& stop : r.stop_strings)
    if (stop.empty()) fail("stop_strings", "one of them is empty", "give at least one character, or leave it out");
  const int64_t longest = static_cast<int64_t>(r.prompt.size()) + r.sampling.max_tokens;
  if (longest > c.max_position_embeddings)
    fail("max_tokens",
         "prompt and answer may reach " + number(longest) + " tokens, more than the model's " +
             number(c.max_position_embeddings),
         "shorten one of them");
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
  if (!request.stop_strings.empty() && !options_.tokenizer)
    fail("stop_strings", "need a tokenizer, and this engine has none", "use stop_tokens");
  Sequence s;
  if (!request.adapter.empty()) {
    if (!registry_) fail("adapter", "'" + request.adapter + "' is not loaded", "this engine has no adapters");
    s.adapter = request.adapter_version ? registry_->version(request.adapter, *request.adapter_version)
                                        : registry_->newest(request.adapter);
  }
  s.tokens = request.prompt;
  s.text = AnswerText(request.stop_strings);
  s.request = std::move(request);
  const RequestId id = s.id = next_id_++;
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
  try {
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
  } catch (const std::exception& e) {
    return fail_step(e.what());
  }
}

// Whose fault it was is not known, so all requests that had rows in the step end. What they had written into the cache
// goes with them.
std::vector<Event> Engine::fail_step(const std::string& error) {
  std::vector<Event> events;
  for (auto it = running_.begin(); it != running_.end();) {
    Sequence& s = it->second;
    if (s.rows == 0) {
      ++it;
      continue;
    }
    Event& e = events.emplace_back();
    e.request = s.id, e.token.id = -1, e.finish = Finish::error, e.error = error;
    release(s);
    it = running_.erase(it);
  }
  return events;
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

}  // namespace plumb
