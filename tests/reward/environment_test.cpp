#include "reward/environment.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <set>

#include "base/files.h"
#include "base/log.h"
#include "base/waiting.h"
#include "process_testing.h"
#include "support/temp_path.h"
#include "testing.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::answering;
using testing::error_of;
using ::testing::HasSubstr;
using testing::open_descriptors;
using testing::processes_left_after_killing;
using testing::sample_of;
using testing::shell_program;

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { descriptors_ = open_descriptors(); }
  void TearDown() override {
    EXPECT_EQ(processes_left_after_killing(), 0);
    EXPECT_EQ(open_descriptors(), descriptors_);
  }
  int descriptors_ = 0;
};

Answer said(const std::string& content) { return sample_of(content).answer; }

// What the model says tells it what to do.
const std::string kTurns = R"(
    *'"type":"open"'*) echo "{\"id\":$id,\"messages\":[]}" ;;
    *'"type":"close"'*) echo "{\"id\":$id,\"reward\":0.25,\"metrics\":{\"closed\":1}}" ;;
    *done*) echo "{\"id\":$id,\"done\":true,\"reward\":1}" ;;
    *silent*) echo "{\"id\":$id,\"done\":true}" ;;
    *part*) echo "{\"id\":$id,\"messages\":[{\"role\":\"user\",\"content\":\"go on\"}],\"reward\":0.5}" ;;
    *hang*) sleep 1000 ;;
    *crash*) exit 7 ;;
    *assistant*) echo "{\"id\":$id,\"messages\":[{\"role\":\"assistant\",\"content\":\"x\"}]}" ;;
    *nothing*) echo "{\"id\":$id}" ;;
    *next*) echo "{\"id\":$id,\"messages\":[{\"role\":\"user\",\"content\":\"$$\"}]}" ;;)";

TEST_F(EnvironmentTest, RewardsOfTurnsAddUp) {
  Environment environment(shell_program(answering(kTurns)));
  EnvironmentTurn turn;
  auto session = environment.open(sample_of("", {{"x", 1}}), turn);
  EXPECT_EQ(turn.messages, json::array());
  EXPECT_FALSE(turn.done);
  turn = session->advance(said("part"));
  EXPECT_EQ(turn.messages, json::parse(R"([{"role":"user","content":"go on"}])"));
  turn = session->advance(said("done"));
  EXPECT_TRUE(turn.done);
  EXPECT_EQ(session->turns(), 2);
  EXPECT_EQ(session->close().reward, 1.5);

  session = environment.open(sample_of(""), turn);
  session->advance(said("part"));
  const Score score = session->close("length");  // not done: the program gives a last reward
  EXPECT_EQ(score.reward, 0.75);
  EXPECT_EQ(score.metrics.at("closed"), 1);

  session = environment.open(sample_of(""), turn);
  session->advance(said("silent"));
  EXPECT_THAT(error_of([&] { session->close(); }),
              HasSubstr("environment[0]: gave no reward in the whole conversation"));
}

TEST_F(EnvironmentTest, WrongAnswersAreNamed) {
  Environment environment(shell_program(answering(kTurns)));
  EnvironmentTurn turn;
  for (const auto& [content, reason] : std::vector<std::pair<std::string, std::string>>{
           {"assistant", "messages that are no list of messages with a role"},
           {"nothing", "no message and is not done"}}) {
    const auto session = environment.open(sample_of(""), turn);
    EXPECT_THAT(error_of([&] { session->advance(said(content)); }), HasSubstr(reason));
  }
}

TEST_F(EnvironmentTest, SessionsStayWithTheirProcess) {
  ProgramKeys keys = shell_program(answering(kTurns));
  keys.processes = 3;
  Environment environment(keys);
  EnvironmentTurn turn;
  std::vector<std::unique_ptr<EnvironmentSession>> sessions;
  std::vector<std::string> pids;
  for (int k = 0; k < 6; ++k) {
    sessions.push_back(environment.open(sample_of(""), turn));
    pids.push_back(sessions.back()->advance(said("next")).messages[0]["content"]);
  }
  EXPECT_EQ(std::set<std::string>(pids.begin(), pids.end()).size(), 3u);  // spread evenly
  EXPECT_EQ(std::set<std::string>(pids.begin(), pids.begin() + 3).size(), 3u);
  std::vector<std::string> again(6);
  for_each_waiting(6, 6, [&](int64_t k) {
    const auto i = static_cast<size_t>(k);
    again[i] = sessions[i]->advance(said("next")).messages[0]["content"];
  });
  EXPECT_EQ(again, pids);
}

TEST_F(EnvironmentTest, AProcessThatEndsCostsItsSessionsAndNoOther) {
  for (const auto& [content, reason] : std::vector<std::pair<std::string, std::string>>{
           {"crash", "exited with code 7"}, {"hang", "gave no answer within 1 s and was killed"}}) {
    ProgramKeys keys = shell_program(answering(kTurns));
    keys.processes = 2;
    Environment environment(keys);
    EnvironmentTurn turn;
    const auto first = environment.open(sample_of(""), turn), other = environment.open(sample_of(""), turn);
    const auto sibling = environment.open(sample_of(""), turn);  // with the first
    EXPECT_THAT(error_of([&] { first->advance(said(content)); }), HasSubstr(reason));
    EXPECT_THAT(error_of([&] { sibling->advance(said("next")); }),
                HasSubstr("environment[0]: the process that held session 3 has ended"));
    EXPECT_EQ(error_of([&] { other->advance(said("done")); }), "");
    const auto fresh = environment.open(sample_of(""), turn);
    EXPECT_EQ(error_of([&] { fresh->advance(said("done")); }), "");
  }
}

TEST_F(EnvironmentTest, AnAbandonedSessionIsToldAndNobodyWaits) {
  const std::string closed = testing::temp_path("closed"), log = testing::temp_path("abandoned.log");
  set_log_file(log);
  Environment environment(
      shell_program(answering("*abandoned*) echo closed > " + closed + R"(; echo "{\"id\":$id}" ;;)" + "\n" + kTurns)));
  EnvironmentTurn turn;
  environment.open(sample_of(""), turn);  // and dropped at once
  const auto other = environment.open(sample_of(""), turn);
  EXPECT_EQ(read_text(closed), "closed\n");  // the process takes one line after the other
  EXPECT_EQ(other->advance(said("done")).done, true);
  set_log_file("");
  EXPECT_EQ(read_text(log), "");  // an answer that nobody wanted is no warning
}

TEST_F(EnvironmentTest, ExampleInShell) {
  ProgramKeys keys = shell_program("");
  keys.command = {"/bin/sh", PLUMB_SOURCE_DIR "/examples/rewards/are_you_sure.sh"};
  keys.time_limit = 20;
  Environment environment(keys);
  EnvironmentTurn turn;
  const auto sure = environment.open(sample_of(""), turn), unsure = environment.open(sample_of(""), turn);
  EXPECT_EQ(sure->advance(said("yes \"1\"")).messages[0]["content"], "Are you sure?");
  EXPECT_EQ(unsure->advance(said("yes")).messages[0]["content"], "Are you sure?");
  EXPECT_TRUE(sure->advance(said("yes \"1\"")).done);
  EXPECT_TRUE(unsure->advance(said("no")).done);
  EXPECT_EQ(sure->close().reward, 1);
  EXPECT_EQ(unsure->close().reward, 0);
  EXPECT_EQ(environment.open(sample_of(""), turn)->close("length").reward, 0);
}

TEST_F(EnvironmentTest, ExampleInPython) {
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
  ProgramKeys keys = shell_program("");
  keys.command = {"python3", PLUMB_SOURCE_DIR "/examples/rewards/guess_number.py"};
  keys.time_limit = 20;
  Environment environment(keys);
  EnvironmentTurn turn;
  const auto session = environment.open(sample_of("", {{"secret", 7}}), turn);
  EXPECT_EQ(turn.tools[0]["function"]["name"], "guess");
  const auto guess = [&](const std::string& arguments) {
    Answer answer;
    answer.calls = {{"c1", "guess", arguments}};
    turn = session->advance(answer);
    EXPECT_EQ(turn.messages[0]["tool_call_id"], "c1");
    return turn.messages[0]["content"].get<std::string>();
  };
  EXPECT_EQ(guess(R"({"number": 3})"), "higher");
  EXPECT_EQ(guess("rubbish"), "guess needs a whole number");
  EXPECT_EQ(session->advance(said("is it 7?")).messages[0]["role"], "user");
  EXPECT_EQ(guess(R"({"number": 9})"), "lower");
  EXPECT_EQ(guess(R"({"number": 7})"), "right");
  EXPECT_TRUE(turn.done);
  const Score score = session->close();
  EXPECT_EQ(score.reward, 0.25);
  EXPECT_EQ(score.metrics.at("guesses"), 4);
}

}  // namespace
}  // namespace plumb
