// Rewards on JSON: a schema, and tool calls.
#include <fmt/format.h>

#include "base/error.h"
#include "reward/json_schema.h"
#include "reward/json_text.h"
#include "reward/verifiers.h"

namespace plumb {
namespace {

using nlohmann::json;

class Schema : public Reward {
 public:
  Schema(SchemaKeys keys, const std::string& where) : keys_(std::move(keys)), schema_(keys_.schema, where) {}

  Score score(const RewardSample& sample) override {
    const Answer& answer = sample.answer;
    if (keys_.of == "reasoning") return judged({&answer.reasoning});
    if (keys_.of == "text") return judged({&answer.text});
    if (keys_.of == "content") return judged({&answer.content});
    std::vector<const std::string*> texts;
    for (const AnswerCall& call : answer.calls)
      if (keys_.tool.empty() || call.name == keys_.tool) texts.push_back(&call.arguments);
    return judged(texts);
  }

 private:
  // At least one text, and all of them JSON that is valid.
  Score judged(const std::vector<const std::string*>& texts) const {
    bool parsed = !texts.empty(), valid = parsed;
    for (const std::string* text : texts) {
      const std::optional<json> value = parse_json_text(*text);
      parsed = parsed && value.has_value();
      valid = valid && value && !schema_.violation(*value);
    }
    return {.reward = valid ? 1.0 : 0.0, .metrics = {{"is_json", parsed ? 1.0 : 0.0}}};
  }

  SchemaKeys keys_;
  JsonSchema schema_;
};

struct Call {
  std::string name;
  std::optional<json> arguments;  // nothing: the model wrote no JSON
};

class ToolCallReward : public Reward {
 public:
  explicit ToolCallReward(ToolCallKeys keys) : keys_(std::move(keys)) {}

  Score score(const RewardSample& sample) override {
    std::vector<Call> wanted = expected(sample.line, "dataset line"), made;
    for (const AnswerCall& call : sample.answer.calls) made.push_back({call.name, parse_json_text(call.arguments)});
    const bool names = same(wanted, made, [](const Call& a, const Call& b) { return a.name == b.name; });
    const bool all = names && same(wanted, made, [](const Call& a, const Call& b) {
                       return a.name == b.name && b.arguments && *a.arguments == *b.arguments;
                     });
    return {.reward = all     ? 1
                      : names ? keys_.name_reward
                              : 0,
            .metrics = {{"calls", static_cast<double>(made.size())}, {"names_right", names ? 1.0 : 0.0}}};
  }

  void check_line(const json& line, const std::string& where) const override { expected(line, where); }

 private:
  template <class Equal>
  bool same(const std::vector<Call>& wanted, const std::vector<Call>& made, Equal equal) const {
    if (wanted.size() != made.size()) return false;
    return keys_.any_order ? std::is_permutation(wanted.begin(), wanted.end(), made.begin(), equal)
                           : std::equal(wanted.begin(), wanted.end(), made.begin(), equal);
  }

  std::vector<Call> expected(const json& line, const std::string& where) const {
    const json& value = require_field(line, keys_.field, where);
    std::vector<Call> calls;
    for (const json& item : value.is_array() ? value : json::array({value})) calls.push_back(read_call(item, where));
    return calls;
  }

  // {"name", "arguments"}, or OpenAI's {"function": {...}} around it; arguments are an object or its JSON text.
  Call read_call(const json& item, const std::string& where) const {
    const json& call = item.is_object() && item.contains("function") ? item["function"] : item;
    const bool named = call.is_object() && call.contains("name") && call["name"].is_string();
    std::optional<json> arguments;
    if (named && call.contains("arguments"))
      arguments = call["arguments"].is_string() ? parse_json_text(call["arguments"].get_ref<const std::string&>())
                                                : call["arguments"];
    if (!arguments || !arguments->is_object())
      fail(where, fmt::format("field {} is {}", keys_.field, shortened(json_line(item))),
           R"(it must be {"name": "...", "arguments": {...}} or a list of these)");
    return {call["name"], std::move(arguments)};
  }

  ToolCallKeys keys_;
};

}  // namespace

std::unique_ptr<Reward> make_verifier(const ToolCallKeys& keys) { return std::make_unique<ToolCallReward>(keys); }
std::unique_ptr<Reward> make_verifier(const SchemaKeys& keys, const std::string& where) {
  return std::make_unique<Schema>(keys, where);
}

}  // namespace plumb
