#include "reward/environment.h"

#include <fmt/format.h>

#include <algorithm>

#include "reward/json_text.h"
#include "reward/wire.h"

namespace plumb {

using nlohmann::json;

Environment::Environment(const ProgramKeys& keys) : retries_(keys.retries) {
  for (int64_t k = 0; k < keys.processes; ++k) {
    programs_.push_back(std::make_unique<Program>(keys, fmt::format("environment[{}]", k)));
    places_.push_back(std::make_unique<Place>());
    places_.back()->program = programs_.back().get();
  }
  programs_.front()->start();
}

Environment::~Environment() { Program::stop(programs_); }

// The process with the fewest sessions, the first of equals.
Environment::Place& Environment::take_place() {
  const std::lock_guard lock(mutex_);
  Place& place = **std::ranges::min_element(places_, {}, [](const auto& p) { return p->sessions; });
  ++place.sessions;
  return place;
}

void Environment::leave_place(Place& place) {
  const std::lock_guard lock(mutex_);
  --place.sessions;
}

std::unique_ptr<EnvironmentSession> Environment::open(const RewardSample& sample, EnvironmentTurn& first) {
  Place& place = take_place();
  int64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = next_session_++;
  }
  std::unique_ptr<EnvironmentSession> session(new EnvironmentSession(*this, place, id));
  const json request = {{"type", "open"},        {"session", id},
                        {"line", sample.line},   {"messages", sample.messages},
                        {"group", sample.group}, {"sample", sample.number}};
  for (int64_t attempt = 0;; ++attempt) {
    try {
      first = session->read_turn(session->ask(request));
      return session;
    } catch (const ProgramCrashed&) {
      if (attempt == retries_) throw;
    }
  }
}

EnvironmentSession::~EnvironmentSession() {
  if (!over_) {
    const std::lock_guard busy(place_.busy);
    if (place_.program->generation() == generation_)
      place_.program->tell({{"type", "close"}, {"session", id_}, {"turn", turns_}, {"reason", "abandoned"}});
  }
  environment_.leave_place(place_);
}

json EnvironmentSession::ask(const json& request) {
  const std::lock_guard busy(place_.busy);
  Program& program = *place_.program;
  if (request.at("type") != "open" && (program.pid() < 0 || program.generation() != generation_)) {
    over_ = true;
    fail(program.label(), fmt::format("the process that held session {} has ended", id_));
  }
  try {
    json reply = program.ask(request);
    generation_ = program.generation();
    return reply;
  } catch (const Error&) {
    over_ = program.pid() < 0;  // nobody is there to be told
    generation_ = program.generation();
    throw;
  }
}

void EnvironmentSession::collect(const json& reply) {
  const std::string& who = place_.program->label();
  check_no_error(reply, who);
  if (const auto reward = reply.find("reward"); reward != reply.end() && !reward->is_null()) {
    score_.reward += read_reward(reply, who);
    rewarded_ = true;
  }
  for (const auto& [name, value] : read_metrics(reply, who)) score_.metrics[name] = value;
}

EnvironmentTurn EnvironmentSession::read_turn(const json& reply) {
  collect(reply);
  const std::string& who = place_.program->label();
  EnvironmentTurn turn;
  turn.messages = reply.value("messages", json::array());
  const bool messages = turn.messages.is_array() && std::ranges::all_of(turn.messages, [](const json& message) {
                          const json* role = message.is_object() ? find_field(message, "role") : nullptr;
                          return role && role->is_string() && *role != "assistant";
                        });
  if (!messages)
    fail(who, "answered with messages that are no list of messages with a role: " + shortened(json_line(reply)),
         R"(write [{"role": "tool", "tool_call_id": "...", "content": "..."}], never the role assistant)");
  turn.tools = reply.value("tools", json());
  if (!turn.tools.is_null() && !turn.tools.is_array())
    fail(who, "answered with tools that are no list: " + shortened(json_line(reply)));
  const json done = reply.value("done", json(false));
  if (!done.is_boolean())
    fail(who, "answered with a value of done that is not true or false: " + shortened(json_line(reply)));
  turn.done = over_ = done.get<bool>();
  if (!turn.done && turns_ > 0 && turn.messages.empty())
    fail(who, "answered with no message and is not done: " + shortened(json_line(reply)),
         "the model would go on talking to nobody");
  return turn;
}

EnvironmentTurn EnvironmentSession::advance(const Answer& answer) {
  PLUMB_CHECK(!over_, "the conversation is over");
  const json request = {{"type", "turn"}, {"session", id_}, {"turn", turns_++}, {"answer", answer_to_json(answer)}};
  return read_turn(ask(request));
}

Score EnvironmentSession::close(const std::string& reason) {
  if (!over_) {
    const json reply = ask({{"type", "close"}, {"session", id_}, {"turn", turns_}, {"reason", reason}});
    over_ = true;
    collect(reply);
  }
  if (!rewarded_) fail(place_.program->label(), "gave no reward in the whole conversation");
  return score_;
}

}  // namespace plumb
