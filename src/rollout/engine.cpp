#include "rollout/engine.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "base/error.h"
#include "rollout/cache_size.h"

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
  at_least("max_waiting", o.max_waiting, 0);
  at_least("key_pages", o.key_pages, 1);
  at_least("entry_pages", o.entry_pages, 1);
}

void check_tokens(const char* name, const std::vector<int>& tokens, int vocab) {
  for (int t : tokens)
    if (t < 0 || t >= vocab)
      fail(name, "token " + number(t) + " is not in the vocabulary", "allowed: 0 to " + number(vocab - 1));
}

void check_request(const Request& r, const ModelConfig& c) {
  check(r.sampling, c.vocab_size);
  if (r.prompt.empty()) fail("prompt", "is empty", "a sequence starts with at least one token");
  check_tokens("prompt", r.prompt, c.vocab_size);
  check_tokens("answer", r.answer, c.vocab_size);
  if (!r.answer.empty() && static_cast<int>(r.answer.size()) >= r.sampling.max_tokens)
    fail("answer", "has " + number(static_cast<int>(r.answer.size())) + " tokens already", "less than max_tokens");
  if (!r.answer.empty() && (!r.stop_strings.empty() || r.prompt_logprobs))
    fail("answer", "does not go together with stop_strings and prompt_logprobs", "start the answer anew");
  if (r.sampling.max_tokens == 0 && !r.prompt_logprobs && !r.routed_experts)
    throw UsageError("max_tokens", "0 leaves nothing to do",
                     "allowed: 1 or more; 0 only with prompt_logprobs or routed_experts");
  if (r.prompt_top_logprobs < 0 || r.prompt_top_logprobs > 100)
    fail("prompt_top_logprobs", number(r.prompt_top_logprobs) + " is out of range", "allowed: 0 to 100");
  if (r.prompt_top_logprobs > 0 && !r.prompt_logprobs)
    fail("prompt_top_logprobs", "needs prompt_logprobs", "ask for both");
  for (const std::string& stop : r.stop_strings)
    if (stop.empty()) fail("stop_strings", "one of them is empty", "give at least one character, or leave it out");
  const int64_t longest = static_cast<int64_t>(r.prompt.size()) + r.sampling.max_tokens;
  if (static_cast<int64_t>(r.prompt.size()) > c.max_position_embeddings)
    fail("prompt",
         number(static_cast<int64_t>(r.prompt.size())) + " tokens are more than the model's " +
             number(c.max_position_embeddings),
         "shorten it");
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
      pools_{page_positions(shape_), PagePool(options.key_pages), PagePool(options.entry_pages)},
      prefixes_(pools_) {
  check_options(options);
  if (registry_) registry_->require_fit(weights.config());
  cache_ = make_engine_cache(weights.config(), options, weights.space());
  graphs_ = decode_graphs(weights, cache_);
  for (int lane = options.max_running; lane-- > 0;) free_lanes_.push_back(lane);
}

RequestId Engine::submit(Request request) {
  check_request(request, weights_.config());
  if (options_.max_waiting > 0 && static_cast<int>(waiting_.size()) >= options_.max_waiting)
    throw QueueFull("queue", number(options_.max_waiting) + " requests wait already", "try again later");
  const int longest = static_cast<int>(request.prompt.size()) + request.sampling.max_tokens;
  // Alone in the cache, every request must be able to finish: then the first in order always can.
  if (pools_.pages(longest) > pools_.entries.total() ||
      most_key_pages(pools_.positions, shape_.window, options_.prefill_chunk, longest) > pools_.keys.total())
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
  s.tokens.insert(s.tokens.end(), request.answer.begin(), request.answer.end());
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
  stats.free_key_pages = prefixes_.available_keys(), stats.free_entry_pages = prefixes_.available_entries();
  std::set<int> keys, entries;  // several sequences may hold a page
  for (const auto& [order, s] : running_) {
    keys.insert(s.held.table.key_page.begin(), s.held.table.key_page.end());
    entries.insert(s.held.table.entry_page.begin(), s.held.table.entry_page.end());
  }
  keys.erase(-1);
  stats.held_key_pages = static_cast<int>(keys.size()), stats.held_entry_pages = static_cast<int>(entries.size());
  stats.cached_pages = prefixes_.size();
  stats.steps = steps_, stats.rows = rows_, stats.preemptions = preemptions_;
  if (graphs_) stats.decode_graphs = graphs_->stats();
  stats.prefix_hits = prefix_hits_, stats.prefix_hit_tokens = prefix_hit_tokens_;
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
    const Tensor hidden = graphs_ ? graphs_->forward(plan, o) : forward(weights_, plan, o).hidden;
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
  int keys = prefixes_.available_keys(), entries = prefixes_.available_entries();
  const auto reserve = [&](const Sequence& s) {
    const int total = static_cast<int>(s.tokens.size()) + 1;
    keys -= most_key_pages(pools_.positions, shape_.window, options_.prefill_chunk, total) - held_key_pages(s.held);
    entries -= pools_.pages(total) - static_cast<int>(s.held.table.entry_page.size());
  };
  for (const auto& [order, s] : running_) reserve(s);
  while (!waiting_.empty() && !free_lanes_.empty()) {
    Sequence& s = waiting_.begin()->second;
    reserve(s);
    for (const PrefixPage* p : find_prefix(s)) entries += p->entries.users > 0;  // held anyway
    if (keys < 0 || entries < 0) return;
    s.lane = free_lanes_.back();
    free_lanes_.pop_back();
    s.held.table.csa_pending_base = (options_.entry_pages + s.lane * 2) * shape_.csa_ratio;
    s.held.table.hca_pending_base = s.lane * shape_.hca_ratio;
    running_.insert(waiting_.extract(waiting_.begin()));
  }
}

// Decides how many rows of each sequence run, next tokens before prompts, and takes the pages for them; where there are
// too few, the last in order is preempted.
void Engine::schedule() {
  int budget = options_.token_budget;
  const auto left = [](const Sequence& s) { return static_cast<int>(s.tokens.size()) - s.length; };
  for (auto& [order, s] : running_) {
    if (s.adapter && !s.request.adapter_version) s.adapter = registry_->follow(s.adapter);
    adopt_prefix(s);
    s.rows = left(s) == 1 ? 1 : 0;
    budget -= s.rows;
  }
  std::map<uint64_t, bool> being_computed;
  for (auto& [order, s] : running_) {
    if (s.rows > 0 || budget == 0 || waits_for_page(s, being_computed)) continue;
    s.rows = std::min({left(s), options_.prefill_chunk, budget});
    budget -= s.rows;
  }
  for (auto it = running_.begin(); it != running_.end();) {
    if (grow(it->second.held, it->second.length + it->second.rows, source())) {
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
  release_all(s.held, source());
  free_lanes_.push_back(s.lane);
  s.lane = -1, s.length = 0, s.rows = 0;
}

// Rows at the end of this step's chunk whose hidden state somebody asks for.
int Engine::wanted_rows(const Sequence& s) const {
  const int end = s.length + s.rows, known = static_cast<int>(s.prompt_logprobs.size());
  const int targets = static_cast<int>(s.request.prompt.size()) - 1;  // rows that predict a prompt token
  if (s.request.prompt_logprobs && !s.answering() && known < targets)
    return std::max(0, end - std::max(s.length, known));
  return s.samples() ? 1 : 0;
}

SequencePlan Engine::make_plan() const {
  std::vector<PagedRun> runs;
  for (const auto& [order, s] : running_)
    runs.push_back(
        {&s.held.table, s.length, {s.tokens.data() + s.length, static_cast<size_t>(s.rows)}, wanted_rows(s)});
  return plan_paged_step(shape_, pools_.shape(), runs);
}

// Rows from `computed` on are those of s.adapter.
void Engine::note_adapter(Sequence& s) {
  if (s.adapter && (s.spans.empty() || s.spans.back().adapter != s.adapter)) s.spans.push_back({s.computed, s.adapter});
}

// Rows that have been computed before keep the adapter that they had.
AdapterBatch Engine::adapters_of_rows() {
  AdapterBatch batch;
  std::map<const AdapterSnapshot*, size_t> part;
  int row = 0;
  for (auto& [order, s] : running_) {
    const int end = s.length + s.rows;
    if (end > s.computed) note_adapter(s);
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
