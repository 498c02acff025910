// What a reward sees of a sample and what it gives (docs/rewards.md). A reward judges one finished answer; it never
// ends a run: whatever goes wrong with it costs the sample, with a reason.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace plumb {

struct AnswerCall {
  std::string id, name;
  std::string arguments;  // JSON text, as the model wrote it
};

// What the model said in one turn.
struct Answer {
  std::string text;  // everything that was sampled, control tokens spelled out
  std::string content, reasoning;
  std::vector<AnswerCall> calls;
  int64_t tokens = 0;         // that were sampled, the end of sentence included
  std::string finish_reason;  // stop, length, tool_calls
};

struct RewardSample {
  nlohmann::json line;      // the dataset's line with all its fields, an object
  nlohmann::json messages;  // the prompt in OpenAI's form, a list
  Answer answer;
  int64_t group = 0;   // samples of one prompt share it
  int64_t number = 0;  // within the group
};

struct Score {
  double reward = 0;  // finite
  std::map<std::string, double> metrics = {};
  std::string failure = {};  // why there is no reward; "" = there is one
  bool failed() const { return !failure.empty(); }
};

class Reward {
 public:
  virtual ~Reward() = default;
  // Called from several threads at once, may take as long as the reward's own limits allow. What it throws is the
  // reason why the sample has no score.
  virtual Score score(const RewardSample& sample) = 0;
  // Looks at what the reward needs of a dataset line before anything is sampled. Error: `where` (file:line), the field
  // and what it must be.
  virtual void check_line(const nlohmann::json& /*line*/, const std::string& /*where*/) const {}
};

}  // namespace plumb
