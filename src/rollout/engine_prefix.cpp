// The engine's use of the prefix cache: which cached pages a sequence may take, and which of its own it puts in.
//
// A sequence takes pages when it stands at the end of one. Rows whose records the request wants (prompt
// log-probabilities, routed experts) are skipped only if the records are there: experts are kept with a page if a
// request that computed it wanted them; prompt log-probabilities are not kept, so such a request reads its prompt anew.
#include <algorithm>

#include "rollout/engine.h"

namespace plumb {

std::span<const int> Engine::tokens_of_page(const Sequence& s, int page) const {
  const size_t size = pools_.positions;
  return std::span(s.tokens).subspan(page * size, size);
}

// The adapter of all rows of a page: computed ones keep theirs, new ones get the sequence's. nullopt: more than one.
std::optional<AdapterRef> Engine::adapter_of_page(const Sequence& s, int page) const {
  if (!s.adapter) return AdapterRef();
  const int begin = page * pools_.positions, end = begin + pools_.positions;
  std::optional<AdapterRef> one;
  if (end > s.computed) one = s.adapter;
  for (size_t i = 0; i < s.spans.size(); ++i) {
    const int last = i + 1 < s.spans.size() ? s.spans[i + 1].first : s.computed;
    if (last <= begin || s.spans[i].first >= end) continue;
    if (one && *one != s.spans[i].adapter) return std::nullopt;
    one = s.spans[i].adapter;
  }
  return one;
}

// Whether the request can do without computing the rows of a page; routed: the page's experts are recorded.
bool Engine::may_skip(const Sequence& s, int page, bool routed) const {
  const int end = (page + 1) * pools_.positions, targets = static_cast<int>(s.request.prompt.size()) - 1;
  const bool logprobs_known = s.answering() || static_cast<int>(s.prompt_logprobs.size()) >= std::min(end, targets);
  return (!s.request.prompt_logprobs || logprobs_known) && (!s.request.routed_experts || routed || end <= s.computed);
}

// The cached pages with which the sequence can go on. At least one row is left, which makes the next token.
std::vector<PrefixPage*> Engine::find_prefix(const Sequence& s) const {
  std::vector<PrefixPage*> found;
  const int size = pools_.positions;
  int page = s.length / size;
  if (!options_.prefix_cache || s.length % size != 0 || page != static_cast<int>(s.held.shared.size())) return found;
  size_t usable = 0;
  for (; (page + 1) * size < static_cast<int>(s.tokens.size()); ++page) {
    const auto adapter = adapter_of_page(s, page);
    if (!adapter) break;
    const PrefixPage* parent = !found.empty() ? found.back() : s.held.shared.empty() ? nullptr : s.held.shared.back();
    PrefixPage* next = prefixes_.find(parent, tokens_of_page(s, page), adapter->get());
    if (!next || !may_skip(s, page, !next->routed.empty())) break;
    found.push_back(next);
    if (window_is_there(s.held, found, shape_.window, size)) usable = found.size();
  }
  found.resize(usable);
  return found;
}

void Engine::adopt_prefix(Sequence& s) {
  const std::vector<PrefixPage*> found = find_prefix(s);
  if (found.empty()) return;
  const int end = s.length + static_cast<int>(found.size()) * pools_.positions;
  if (end > s.computed) {
    note_adapter(s);
    if (s.request.routed_experts)
      for (const PrefixPage* p : found) {
        const int begin = p->depth * pools_.positions;
        const int known = std::clamp(s.computed - begin, 0, pools_.positions);
        const auto row_size = static_cast<ptrdiff_t>(p->routed.size()) / pools_.positions;
        s.routed.insert(s.routed.end(), p->routed.begin() + known * row_size, p->routed.end());
      }
    const int prompt = static_cast<int>(s.request.prompt.size());
    s.cached += std::min(end, prompt) - std::min(s.computed, prompt);
    s.computed = end;
  }
  ++prefix_hits_, prefix_hit_tokens_ += end - s.length;
  adopt(s.held, found, shape_.window, source());
  s.length = end;
}

// Puts the pages that are complete into the cache. A page whose rows have different adapters is not for others; the
// chain ends before it.
void Engine::share_pages(Sequence& s) {
  if (!options_.prefix_cache) return;
  const int size = pools_.positions;
  for (int page = static_cast<int>(s.held.shared.size()); (page + 1) * size <= s.length; ++page) {
    const auto adapter = adapter_of_page(s, page);
    if (!adapter) return;
    PrefixPage& p = share(s.held, tokens_of_page(s, page), adapter->get(), source());
    if (!s.request.routed_experts || !p.routed.empty()) continue;
    const ptrdiff_t count = static_cast<ptrdiff_t>(s.routed.size()) / s.computed * size;
    p.routed.assign(s.routed.begin() + page * count, s.routed.begin() + (page + 1) * count);
  }
}

// Whether a sequence earlier in order computes the page that this one would begin: then it takes it when it is
// complete. Otherwise its own page is noted. being_computed: hash of the page -> whether its experts are recorded.
bool Engine::waits_for_page(const Sequence& s, std::map<uint64_t, bool>& being_computed) const {
  const int size = pools_.positions, page = s.length / size;
  const bool whole = (page + 1) * size < static_cast<int>(s.tokens.size());
  if (!options_.prefix_cache || !whole || page != static_cast<int>(s.held.shared.size())) return false;
  const auto adapter = adapter_of_page(s, page);
  if (!adapter) return false;
  const uint64_t parent = s.held.shared.empty() ? 0 : s.held.shared.back()->hash;
  const uint64_t hash = PrefixCache::hash(parent, tokens_of_page(s, page), adapter->get());
  const auto [it, first] = being_computed.try_emplace(hash, s.request.routed_experts);
  return !first && s.length % size == 0 && may_skip(s, page, it->second);
}

}  // namespace plumb
