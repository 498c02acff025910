// The rollout engine: many requests over one model, one cache and one forward pass a step. A step takes the next token
// of every answer that is being written and, as far as its budget of rows goes, chunks of prompts. No threads, no
// sockets: who owns the engine calls step() until it is idle.
//
// What a request gets depends on the request alone (and on the adapter versions published meanwhile, if it follows
// them): not on the batch, the chunks, or on having been preempted. Its log-probabilities have the bits of the training
// forward pass over the finished sequence.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/decode_graphs.h"
#include "model/forward.h"
#include "rollout/adapters.h"
#include "rollout/held_pages.h"
#include "rollout/sampler.h"
#include "rollout/stop_strings.h"
#include "tokenizer/tokenizer.h"

namespace plumb {

using RequestId = uint64_t;

// With sampling.max_tokens = 0 the prompt is read and nothing is made; it must ask for prompt_logprobs or
// routed_experts.
struct Request {
  std::vector<int> prompt;  // at least one token
  // The beginning of the answer, made by an earlier engine: it goes on from there as if it had made them. They count as
  // the answer's for every option and come in no event.
  std::vector<int> answer;
  SamplingParams sampling;
  uint64_t key = 0;                        // of the random numbers, with the seed and the position
  std::string adapter;                     // a name in the registry; empty = base model
  std::optional<int64_t> adapter_version;  // pins that version; otherwise the newest one makes each token
  std::vector<std::string> stop_strings;   // end the answer; need EngineOptions::tokenizer
  int priority = 0;                        // higher ones first; equal ones in order of arrival
  bool prompt_logprobs = false;
  int prompt_top_logprobs = 0;  // most likely tokens to record with each of the prompt_logprobs
  bool routed_experts = false;
};

// error: the step in which the request was failed (Event::error); the engine goes on.
enum class Finish { none, stop, length, error };

struct VersionSpan {
  int first;
  int64_t version;
};

struct Event {  // one sampled token
  RequestId request = 0;
  // id -1: none, the event only tells the end (max_tokens = 0, or an error).
  GeneratedToken token;
  Finish finish = Finish::none;  // not none: the last event of the request
  // What the token adds to the text of the answer, maybe part of a character; cut where a stop string begins, and a
  // token comes only when none of its text can belong to a stop string any more. Empty for stop tokens and without
  // EngineOptions::tokenizer. Control tokens have their spelling.
  std::string text;
  std::string stop_string;             // the one that ended the request; empty if something else did
  std::vector<float> prompt_logprobs;  // on request, with the first event: [prompt - 1], of prompt tokens 1, 2, ...
  std::vector<std::vector<TokenLogprob>> prompt_top;  // on request, with the first event: [prompt - 1]
  // On request, with the last event: i32 [rows, layers, experts of a token], rows = prompt + answer - 1, as the last
  // token has been through no layer; rows = prompt if max_tokens is 0.
  Tensor routed;
  // With the last event, if the request names an adapter: rows from `first` on were computed by this version of it.
  std::vector<VersionSpan> versions;
  int cached_tokens = 0;  // with the first event: tokens of the prompt whose rows came from the prefix cache
  std::string error;      // with Finish::error: what was thrown
};

// submit(): as many requests wait as EngineOptions::max_waiting allows. Nothing is wrong with the request.
class QueueFull : public Error {
  using Error::Error;
};

struct EngineOptions {
  Numerics numerics = Numerics::released;
  int max_running = 16;                // sequences in the cache at a time
  int token_budget = 512;              // rows of a step; at least max_running, so that nobody's next token waits
  int prefill_chunk = 256;             // rows of one sequence in a step
  int max_waiting = 0;                 // requests in the queue; 0 = any number
  int key_pages = 0, entry_pages = 0;  // size of the cache, see cache_size.h
  bool prefix_cache = true;            // keep whole pages for requests that begin alike (changes no result)
  std::optional<Tokenizer> tokenizer;  // for stop strings and the text of events
  // Sees every plan before it runs. For tests, which plant errors to show that they would be found.
  std::function<void(SequencePlan&)> edit_plan;
};

struct EngineStats {
  int waiting = 0, running = 0;
  int free_key_pages = 0, free_entry_pages = 0;    // kept for later requests or empty: they can be had
  int held_key_pages = 0, held_entry_pages = 0;    // by running sequences
  int cached_pages = 0;                            // in the prefix cache, held ones included
  int64_t steps = 0, rows = 0, preemptions = 0;    // since the start, as those below
  int64_t prefix_hits = 0, prefix_hit_tokens = 0;  // times that a sequence took pages from the prefix cache; their rows
  DecodeGraphStats decode_graphs;                  // on a GPU
};

class Engine {
 public:
  // The weights must outlive the engine. registry: may be nullptr (no adapters); from here on it takes only adapters
  // that fit the model.
  Engine(WeightStore& weights, const EngineOptions& options, std::shared_ptr<AdapterRegistry> registry = nullptr);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Puts a request into the queue. Errors: a token outside the vocabulary, options out of range, longer than the model
  // or the cache can hold, unknown adapter or version; QueueFull.
  RequestId submit(Request request);
  // Ends a request without an event and frees what it holds. false: it is not there (any more).
  bool cancel(RequestId id);
  // One forward pass. Returns the tokens that it made, in order of priority and arrival; empty if only prompts were
  // read.
  std::vector<Event> step();
  bool idle() const { return waiting_.empty() && running_.empty(); }
  EngineStats stats() const;

 private:
  // From position `first` on, rows are computed with `adapter`.
  struct AdapterSpan {
    int first;
    AdapterRef adapter;
  };
  struct Sequence {
    RequestId id = 0;
    Request request;
    std::vector<int> tokens;  // prompt, then the answer so far
    int length = 0;           // tokens whose rows are in the cache
    int computed = 0;         // tokens whose rows have ever been: `length` falls behind it by preemption
    int lane = -1;            // pending slots; -1 = waiting
    int rows = 0;             // of this step
    HeldPages held;
    AdapterRef adapter;              // of new rows; the newest version at the beginning of a step, unless pinned
    std::vector<AdapterSpan> spans;  // of the computed rows
    int cached = 0;                  // rows of the prompt that were first seen in the prefix cache
    std::vector<float> prompt_logprobs;
    std::vector<int32_t> routed;
    std::vector<std::vector<TokenLogprob>> prompt_top;
    AnswerText text;
    bool told = false;  // an event of it has been returned
    // Whether this step reaches the end of the known tokens: the next one is made, or nothing is left to do.
    bool reaches_end() const { return rows > 0 && length + rows == static_cast<int>(tokens.size()); }
    bool answering() const { return tokens.size() > request.prompt.size(); }
    bool samples() const { return reaches_end() && request.sampling.max_tokens > 0; }
  };
  // Place in the order of the engine: by falling priority, then by arrival.
  struct Order {
    int priority;
    RequestId id;
    bool operator<(const Order& o) const { return priority != o.priority ? priority > o.priority : id < o.id; }
  };
  using Sequences = std::map<Order, Sequence>;

  void admit();
  void schedule();
  void preempt(Sequences::iterator it);
  void release(Sequence& s);
  int wanted_rows(const Sequence& s) const;
  PageSource source() { return {pools_, prefixes_}; }
  void note_adapter(Sequence& s);
  std::optional<AdapterRef> adapter_of_page(const Sequence& s, int page) const;
  std::span<const int> tokens_of_page(const Sequence& s, int page) const;
  bool may_skip(const Sequence& s, int page, bool routed) const;
  std::vector<PrefixPage*> find_prefix(const Sequence& s) const;
  void adopt_prefix(Sequence& s);
  void share_pages(Sequence& s);
  bool waits_for_page(const Sequence& s, std::map<uint64_t, bool>& being_computed) const;
  SequencePlan make_plan() const;
  AdapterBatch adapters_of_rows();
  void keep_routed(const Taps& taps);
  std::vector<Event> take_results(const Tensor& hidden);
  void take_prompt_logprobs(const Tensor& hidden, const std::vector<Sequence*>& of, const std::vector<int>& target);
  std::vector<GeneratedToken> sample(const Tensor& hidden, const std::vector<Sequence*>& of) const;
  void take_token(Sequence& s, GeneratedToken token, std::vector<Event>& events);
  void end(Sequence& s, Finish finish, std::vector<Event>& events);
  void tell(Sequence& s, TextToken token, std::vector<Event>& events);
  std::vector<Event> fail_step(const std::string& error);

  WeightStore& weights_;
  EngineOptions options_;
  std::shared_ptr<AdapterRegistry> registry_;
  PlanShape shape_;
  PagePools pools_;
  PrefixCache prefixes_;
  KvCache cache_;
  std::unique_ptr<DecodeGraphs> graphs_;  // null on the CPU
  std::vector<int> free_lanes_;
  Sequences waiting_, running_;
  RequestId next_id_ = 1;
  int64_t steps_ = 0, rows_ = 0, preemptions_ = 0, prefix_hits_ = 0, prefix_hit_tokens_ = 0;
};

}  // namespace plumb
