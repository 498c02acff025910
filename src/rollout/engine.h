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

#include "model/forward.h"
#include "rollout/adapters.h"
#include "rollout/pages.h"
#include "rollout/sampler.h"
#include "rollout/stop_strings.h"
#include "tokenizer/tokenizer.h"

namespace plumb {

using RequestId = uint64_t;

// With sampling.max_tokens = 0 the prompt is read and nothing is made; it must ask for prompt_logprobs or
// routed_experts.
struct Request {
  std::vector<int> prompt;  // at least one token
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
  std::string error;  // with Finish::error: what was thrown
};

struct EngineOptions {
  Numerics numerics = Numerics::released;
  int max_running = 16;                // sequences in the cache at a time
  int token_budget = 512;              // rows of a step; at least max_running, so that nobody's next token waits
  int prefill_chunk = 256;             // rows of one sequence in a step
  int key_pages = 0, entry_pages = 0;  // size of the cache, see pages.h
  std::optional<Tokenizer> tokenizer;  // for stop strings and the text of events
  // Sees every plan before it runs. For tests, which plant errors to show that they would be found.
  std::function<void(SequencePlan&)> edit_plan;
};

struct EngineStats {
  int waiting = 0, running = 0;
  int free_key_pages = 0, free_entry_pages = 0;
  int held_key_pages = 0, held_entry_pages = 0;  // by running sequences
  int64_t steps = 0, rows = 0, preemptions = 0;  // since the start
};

class Engine {
 public:
  // The weights must outlive the engine. registry: may be nullptr (no adapters).
  Engine(WeightStore& weights, const EngineOptions& options, std::shared_ptr<AdapterRegistry> registry = nullptr);

  // Puts a request into the queue. Errors: a token outside the vocabulary, options out of range, longer than the model
  // or the cache can hold, unknown adapter or version.
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
    PageTable table;
    AdapterRef adapter;
    std::vector<AdapterSpan> spans;  // of the computed rows
    std::vector<float> prompt_logprobs;
    std::vector<int32_t> routed;
    std::vector<std::vector<TokenLogprob>> prompt_top;
    AnswerText text;
    bool told = false;  // an event of it has been returned
    // Whether this step reaches the end of the known tokens: the next one is made, or nothing is left to do.
    bool reaches_end() const { return rows > 0 && length + rows == static_cast<int>(tokens.size()); }
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
  KvCache cache_;
  std::vector<int> free_lanes_;
  Sequences waiting_, running_;
  RequestId next_id_ = 1;
  int64_t steps_ = 0, rows_ = 0, preemptions_ = 0;
};

}  // namespace plumb
