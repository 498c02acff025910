// What becomes of the hidden rows of a step: log-probabilities of prompts, next tokens, events.
#include <algorithm>

#include "ops/head.h"
#include "ops/rows.h"
#include "rollout/engine.h"

namespace plumb {
namespace {

constexpr int kTopRows = 32;  // rows whose logits exist at a time when top log-probabilities of a prompt are taken

std::span<const float> row_of(const Tensor& logits, int64_t row) {
  return {logits.f32() + row * logits.size(1), static_cast<size_t>(logits.size(1))};
}

}  // namespace

// hidden [wanted rows of all sequences, in order, d] -> prompt log-probabilities kept, next tokens sampled, finished
// sequences gone.
std::vector<Event> Engine::take_results(const Tensor& hidden) {
  std::vector<int> known_rows, target, sampled_rows;
  std::vector<Sequence*> known_of, sampled_of;
  int at = 0;
  for (auto& [order, s] : running_) {
    const int wanted = wanted_rows(s), end = s.length + s.rows;
    for (int t = end - wanted; t < end; ++t, ++at) {
      if (t + 1 < static_cast<int>(s.tokens.size())) {
        known_rows.push_back(at), known_of.push_back(&s);
        target.push_back(s.tokens[t + 1]);
      } else if (s.samples()) {
        sampled_rows.push_back(at), sampled_of.push_back(&s);
      }
    }
  }
  if (!known_rows.empty()) take_prompt_logprobs(ops::gather_rows(hidden, known_rows), known_of, target);
  std::vector<GeneratedToken> sampled;
  if (!sampled_rows.empty()) sampled = sample(ops::gather_rows(hidden, sampled_rows), sampled_of);

  std::vector<Event> events;
  size_t next = 0;
  for (auto it = running_.begin(); it != running_.end();) {
    Sequence& s = it->second;
    const bool samples = s.samples(), nothing_left = s.reaches_end() && !samples;
    s.length += s.rows, s.computed = std::max(s.computed, s.length), s.rows = 0;
    share_pages(s);
    if (samples) take_token(s, std::move(sampled[next++]), events);
    if (nothing_left) {
      GeneratedToken none;
      none.id = -1;
      tell(s, {none, ""}, events);
      end(s, Finish::length, events);
    }
    if (!events.empty() && events.back().request == s.id && events.back().finish != Finish::none) {
      release(s);
      it = running_.erase(it);
      continue;
    }
    release_passed_keys(s.held, s.length, shape_.window, source());
    ++it;
  }
  return events;
}

// hidden [rows, d]: row i, of sequence of[i], predicts target[i].
void Engine::take_prompt_logprobs(const Tensor& hidden, const std::vector<Sequence*>& of,
                                  const std::vector<int>& target) {
  const Linear& head = weights_.outer().head;
  const Tensor logprobs = ops::head_logprobs(hidden, head, target);
  for (size_t i = 0; i < of.size(); ++i) of[i]->prompt_logprobs.push_back(logprobs.f32()[i]);
  const auto wants_top = [](const Sequence* s) { return s->request.prompt_top_logprobs > 0; };
  if (std::none_of(of.begin(), of.end(), wants_top)) return;
  const int rows = static_cast<int>(of.size());
  for (int first = 0; first < rows; first += kTopRows) {
    const int last = std::min(rows, first + kTopRows);
    const ops::Logits logits = ops::head_logits(hidden.rows(first, last), head);
    std::vector<int> wanted;
    for (int i = first; i < last; ++i)
      if (wants_top(of[i])) wanted.push_back(i - first);
    const Tensor values = ops::logits_on_host(logits, wanted);
    for (size_t k = 0; k < wanted.size(); ++k) {
      Sequence& s = *of[first + wanted[k]];
      s.prompt_top.push_back(
          top_logprobs(row_of(values, k), logits.normaliser[wanted[k]], s.request.prompt_top_logprobs));
    }
  }
}

// hidden [rows, d]: the newest row of each sequence in `of`.
std::vector<GeneratedToken> Engine::sample(const Tensor& hidden, const std::vector<Sequence*>& of) const {
  std::vector<SampledRow> rows;
  for (const Sequence* s : of)
    rows.push_back({&s->request.sampling, s->request.key, s->tokens, s->request.prompt.size()});
  return sample_tokens(ops::head_logits(hidden, weights_.outer().head), rows);
}

void Engine::take_token(Sequence& s, GeneratedToken token, std::vector<Event>& events) {
  const SamplingParams& p = s.request.sampling;
  const int id = token.id;
  if (!s.spans.empty()) token.adapter_version = s.spans.back().adapter->version;
  s.tokens.push_back(id);
  const int made = static_cast<int>(s.tokens.size() - s.request.prompt.size());
  const bool stop = std::count(p.stop_tokens.begin(), p.stop_tokens.end(), id) > 0;
  std::string text = stop || !options_.tokenizer ? "" : options_.tokenizer->id_to_bytes(id);
  for (TextToken& t : s.text.push({std::move(token), std::move(text)}, made > p.min_tokens))
    tell(s, std::move(t), events);
  if (stop || !s.text.stop_string().empty())
    end(s, Finish::stop, events);
  else if (made >= p.max_tokens)
    end(s, Finish::length, events);
}

// Tells what was held back; the last event is then the last one of the request.
void Engine::end(Sequence& s, Finish finish, std::vector<Event>& events) {
  for (TextToken& t : s.text.rest()) tell(s, std::move(t), events);
  Event& last = events.back();
  last.finish = finish;
  last.stop_string = s.text.stop_string();
  for (const AdapterSpan& span : s.spans) last.versions.push_back({span.first, span.adapter->version});
  if (!s.request.routed_experts) return;
  const ModelConfig& c = weights_.config();
  last.routed = Tensor::of(s.routed, {s.computed, c.num_hidden_layers, c.num_experts_per_tok});
}

void Engine::tell(Sequence& s, TextToken token, std::vector<Event>& events) {
  Event& e = events.emplace_back();
  e.request = s.id;
  e.token = std::move(token.token), e.text = std::move(token.text);
  if (s.told) return;
  e.prompt_logprobs = std::move(s.prompt_logprobs), e.prompt_top = std::move(s.prompt_top);
  e.cached_tokens = s.cached;
  s.told = true;
}

}  // namespace plumb
