// The write-ahead log of a batch of rollouts: every token is in the file before the next one is made, so that a run
// that was killed goes on with the samples it had. No sample is generated twice, none is lost because it was long.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rollout/engine.h"

namespace plumb {

// What is known of a sample, behind its prompt: answers of the policy and replies of the environment in turn.
struct LoggedSample {
  std::vector<int> tokens;
  std::vector<float> logprob;         // as recorded; NaN for replies
  std::vector<int> turn_end;          // number of tokens when each answer ended
  std::vector<Finish> finish;         // of each answer that ended
  std::optional<std::string> reward;  // JSON, once it is known
  std::vector<uint16_t> routed;       // experts of [rows, layers, experts of a token], if asked for: the rows of the
                                      // prompt and of all tokens but the last, as of the last answer that ended
  // Tokens of an answer that has not ended.
  int open_tokens() const;
  bool policy_made(size_t i) const;  // whether token i is the policy's
};

class RolloutLog {
 public:
  // Reads what the file holds of this batch and goes on behind it; an incomplete last record is cut off. fingerprint:
  // of all that decides what is sampled; a file with another one is begun anew. Error: cannot be written.
  RolloutLog(std::string path, size_t samples, uint64_t fingerprint);
  ~RolloutLog();
  RolloutLog(const RolloutLog&) = delete;
  RolloutLog& operator=(const RolloutLog&) = delete;

  size_t size() const { return samples_.size(); }
  const LoggedSample& operator[](size_t i) const { return samples_[i]; }
  bool resumed() const { return resumed_; }  // the file held something

  // finish: none, or why the answer ends with this token. One record, so that no kill comes in between.
  void add_token(size_t sample, int id, float logprob, Finish finish);
  void add_reply(size_t sample, const std::vector<int>& tokens);
  void set_reward(size_t sample, const std::string& json);
  // In front of the token that ends the answer.
  void set_routed(size_t sample, const std::vector<uint16_t>& experts);
  // Hands all that was added to the system: from here on the end of the process loses nothing.
  void flush();

 private:
  enum class Kind : uint8_t { header, token, reply, reward, routed };
  void append(Kind kind, size_t sample, const void* data, size_t bytes);
  size_t read(const std::string& text, uint64_t fingerprint);
  bool apply(Kind kind, size_t sample, const char* data, size_t bytes);

  std::string path_, buffer_;
  std::vector<LoggedSample> samples_;
  bool resumed_ = false;
  int fd_ = -1;
};

}  // namespace plumb
