#include "reward/program.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cstdlib>

#include "base/files.h"
#include "base/log.h"
#include "process_testing.h"
#include "reward/scorer.h"
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
using testing::score_all;
using testing::shell_program;

// Nothing may be left of any test: no process, no descriptor.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override { descriptors_ = open_descriptors(); }
  void TearDown() override {
    EXPECT_EQ(processes_left_after_killing(), 0);
    EXPECT_EQ(open_descriptors(), descriptors_);
  }
  int descriptors_ = 0;
};

Scorer scorer_of(const ProgramKeys& keys) {
  std::vector<RewardPart> parts;
  parts.push_back({"judge", 1, make_program_reward(keys, "judge")});
  return Scorer(std::move(parts));
}

std::vector<Score> scores(const Scorer& scorer, const std::vector<std::string>& contents) {
  std::vector<RewardSample> samples;
  for (const std::string& content : contents) samples.push_back(sample_of(content));
  return score_all(scorer, samples);
}

TEST_F(ProgramTest, TwoHundredSamplesInParallelKeepTheirOrder) {
  ProgramKeys keys = shell_program(answering(
      R"(*) group=${line##*'"group":'}; echo "{\"id\":$id,\"reward\":${group%%,*},\"metrics\":{\"m\":true}}" ;;)"));
  keys.processes = 4;
  keys.time_limit = 20;
  const Scorer scorer = scorer_of(keys);
  std::vector<RewardSample> samples;
  for (int k = 0; k < 200; ++k) {
    samples.push_back(sample_of("text"));
    samples.back().group = k;
  }
  const std::vector<Score> all = score_all(scorer, samples, 8);
  ASSERT_EQ(all.size(), 200u);
  for (int k = 0; k < 200; ++k) {
    EXPECT_EQ(all[static_cast<size_t>(k)].failure, "");
    EXPECT_EQ(all[static_cast<size_t>(k)].reward, k);
    EXPECT_EQ(all[static_cast<size_t>(k)].metrics.at("judge/m"), 1);
  }
}

TEST_F(ProgramTest, WrongAnswersCostTheirSampleAndNotTheProcess) {
  Program program(shell_program(answering(R"(
    *rubbish*) echo "I think this is great" ;;
    *nan*) echo "{\"id\": $id, \"reward\": NaN}" ;;
    *infinite*) echo "{\"id\": $id, \"reward\": 1e999}" ;;
    *wrongid*) echo "{\"id\": 12345, \"reward\": 1}" ;;
    *noid*) echo "{\"reward\": 1}" ;;
    *list*) echo "[1]" ;;)")),
                  "judge");
  const auto reason = [&](const std::string& content) {
    return error_of([&] { program.ask({{"content", content}}); });
  };
  EXPECT_EQ(reason("fine"), "");
  const pid_t pid = program.pid();
  EXPECT_EQ(reason("rubbish"), "judge: answered with no JSON object: I think this is great");
  EXPECT_THAT(reason("nan"), HasSubstr("answered with no JSON object: {\"id\": 3, \"reward\": NaN}"));
  EXPECT_THAT(reason("infinite"), HasSubstr("no JSON object: {\"id\": 4, \"reward\": 1e999}"));
  EXPECT_THAT(reason("wrongid"), HasSubstr("judge: answered request 5 with another id or none: {\"id\": 12345"));
  EXPECT_THAT(reason("noid"), HasSubstr("answered request 6 with another id or none: {\"reward\": 1}"));
  EXPECT_THAT(reason("list"), HasSubstr("no JSON object: [1]"));
  EXPECT_EQ(reason("fine"), "");
  EXPECT_EQ(program.pid(), pid);
  EXPECT_EQ(program.generation(), 1);

  const Scorer scorer = scorer_of(shell_program(answering(R"(
    *missing*) echo "{\"id\": $id}" ;;
    *quoted*) echo "{\"id\": $id, \"reward\": \"1\"}" ;;
    *metric*) echo "{\"id\": $id, \"reward\": 1, \"metrics\": {\"a\": \"b\"}}" ;;
    *sorry*) echo "{\"id\": $id, \"error\": \"no such problem\"}" ;;)")));
  const auto all = scores(scorer, {"missing", "quoted", "sorry", "metric", "1"});
  EXPECT_EQ(all[0].failure, "judge: reward judge[0]: answered without a reward: {\"id\":1}");
  EXPECT_THAT(all[1].failure, HasSubstr("answered with a reward that is no number: {\"id\":2,\"reward\":\"1\"}"));
  EXPECT_EQ(all[2].failure, "judge: reward judge[0]: reports: no such problem");
  EXPECT_THAT(all[3].failure, HasSubstr("a metric a that is no number"));
  EXPECT_EQ(all[4].reward, 1);
}

TEST_F(ProgramTest, LinesForEarlierRequestsAreDropped) {
  // Twice for each request, and late: the answer to the request before comes first.
  const Scorer scorer = scorer_of(shell_program(answering(R"(
    *twice*) echo "{\"id\":$id,\"reward\":2}"; echo "{\"id\":$id,\"reward\":3}" ;;
    *late*) echo "{\"id\":$((id - 1)),\"reward\":4}"; echo "{\"id\":$id,\"reward\":5}" ;;)")));
  const auto all = scores(scorer, {"twice", "late", "twice", "twice", "other"});
  const std::vector<double> wanted = {2, 5, 2, 2, 1};
  for (size_t k = 0; k < wanted.size(); ++k) EXPECT_EQ(all[k].reward, wanted[k]) << all[k].failure;
}

TEST_F(ProgramTest, OneThatHangsIsKilledWithWhatItStarted) {
  const Scorer scorer = scorer_of(shell_program(answering("*hang*) sleep 1000 & sleep 1000 ;;")));
  const auto begin = std::chrono::steady_clock::now();
  const auto all = scores(scorer, {"fine", "hang", "fine"});
  EXPECT_EQ(all[0].reward, 1);
  EXPECT_EQ(all[1].failure, "judge: reward judge[0]: gave no answer within 1 s and was killed");
  EXPECT_EQ(all[2].reward, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin,
            std::chrono::seconds(30));  // a thousand if it had been waited for
}

TEST_F(ProgramTest, ACrashIsTriedAgainInAFreshProcess) {
  const std::string once = testing::temp_path("crashed-once");
  const Scorer scorer = scorer_of(shell_program(
      answering("*crash*) echo last words >&2; kill -SEGV $$ ;;\n*once*) [ -e " + once + " ] || { touch " + once +
                "; exit 1; }; "
                "echo \"{\\\"id\\\":$id,\\\"reward\\\":7}\" ;;")));
  const auto all = scores(scorer, {"once", "crash", "fine"});
  EXPECT_EQ(all[0].reward, 7) << all[0].failure;
  EXPECT_THAT(all[1].failure, HasSubstr("closed its output before it answered and was killed by signal 11"));
  EXPECT_THAT(all[1].failure, HasSubstr("its last line on stderr: last words"));
  EXPECT_EQ(all[2].reward, 1) << all[2].failure;
}

TEST_F(ProgramTest, OneThatCannotStartFailsSamplesAtOnceAfterAWhile) {
  ProgramKeys keys = shell_program("exit 3");
  keys.restart_delay = 0.001;
  Program program(keys, "judge");
  const auto reason = [&] { return error_of([&] { program.ask({{"content", ""}}); }); };
  EXPECT_EQ(reason(), "judge: closed its output before it answered and exited with code 3");
  EXPECT_EQ(reason(), "judge: closed its output before it answered and exited with code 3");
  EXPECT_EQ(program.generation(), 2);
  keys.restart_delay = 3;  // longer than a request waits for
  Program slow(keys, "judge");
  EXPECT_THROW(slow.ask({{"content", ""}}), ProgramCrashed);
  EXPECT_FALSE(slow.ready());
  EXPECT_THAT(error_of([&] {
                slow.ask({{"content", ""}});
              }),
              HasSubstr("has ended 1 times in a row and is started again later"));
  EXPECT_EQ(slow.generation(), 1);
}

TEST_F(ProgramTest, ClosedStreams) {
  ProgramKeys keys = shell_program(answering("*stdout*) exec 1>&-; sleep 1000 ;;\n*stdin*) exec 0<&-; sleep 1000 ;;"));
  keys.retries = 0;
  const Scorer scorer = scorer_of(keys);
  const auto all = scores(scorer, {"stdout", "fine", "fine"});
  EXPECT_THAT(all[0].failure, HasSubstr("closed its output before it answered and did not end"));
  EXPECT_EQ(all[1].reward, 1);
  // More than a pipe holds, to a program that has closed its stdin: no SIGPIPE, which would end this test.
  const Scorer deaf = scorer_of(shell_program("exec 0<&-; exec sleep 0.1"));
  EXPECT_THAT(scores(deaf, {std::string(200'000, 'x')})[0].failure, HasSubstr("closed its output before it answered"));
}

TEST_F(ProgramTest, FloodsAndLongLines) {
  const std::string log = testing::temp_path("flood.log");
  set_log_file(log);
  ProgramKeys keys = shell_program(answering(R"(
    *flood*) yes noise | head -n 100000 >&2; head -c 1000000 /dev/zero | tr '\0' x >&2; echo "{\"id\":$id,\"reward\":2}" ;;
    *long*) head -c 200000 /dev/zero | tr '\0' x; sleep 1000 ;;)"));
  keys.max_line = 1000;
  keys.time_limit = 20;
  const Scorer scorer = scorer_of(keys);
  const auto all = scores(scorer, {"flood", "long", std::string(200'000, 'y')});
  set_log_file("");
  EXPECT_EQ(all[0].reward, 2) << all[0].failure;
  EXPECT_THAT(all[1].failure, HasSubstr("wrote more than 1000 bytes without an end of line and was killed"));
  EXPECT_EQ(all[2].reward, 1) << all[2].failure;  // a request longer than a pipe holds
  const std::string text = read_text(log);
  EXPECT_THAT(text, HasSubstr("reward judge[0]: noise"));
  EXPECT_THAT(text, HasSubstr("more lines on stderr"));
  EXPECT_LT(text.size(), 50'000u);
}

TEST_F(ProgramTest, BothSidesMayWriteBeforeTheyRead) {
  // More than a pipe holds in both directions: if either side waited for the other, no line would ever end. The
  // program's lines belong to a request before the first, so they are no answers, and are refused if they come during
  // it.
  ProgramKeys keys = shell_program(answering("", "yes '{\"id\":0,\"reward\":9}' | head -n 20000"));
  keys.time_limit = 20;
  Program program(keys, "judge");
  program.start();
  for (int request = 1; request <= 20'001; ++request) {
    const std::string reason = error_of([&] {
      program.ask({{"content", std::string(request == 1 ? 200'000 : 0, 'x')}});
    });
    if (reason.empty()) break;
    ASSERT_THAT(reason, HasSubstr("another id or none: {\"id\":0,\"reward\":9}"));
  }
  EXPECT_EQ(program.generation(), 1);
}

TEST_F(ProgramTest, OneThatIgnoresEverythingIsKilledAtTheEnd) {
  const Scorer scorer =
      scorer_of(shell_program("trap '' TERM INT; " + answering("") + "; while :; do sleep 1000; done"));
  EXPECT_EQ(scores(scorer, {"fine"})[0].reward, 1);
}

TEST_F(ProgramTest, FolderEnvironmentAndDescriptors) {
  const int leaked = ::dup(2);  // without CLOEXEC: a program must not get it all the same
  const std::string number = std::to_string(leaked);
  ProgramKeys keys =
      shell_program(answering("*) [ \"$(pwd)\" = / ] && [ \"$X\" = 'a b' ] && [ ! -e /proc/$$/fd/" + number +
                              " ] && r=1 || r=0; echo \"{\\\"id\\\":$id,\\\"reward\\\":$r}\" ;;"));
  keys.directory = "/";
  keys.environment["X"] = "a b";
  EXPECT_EQ(scores(scorer_of(keys), {"1"})[0].reward, 1);
  ::close(leaked);
  keys.directory = "/no/such/folder";
  EXPECT_THAT(error_of([&] { scorer_of(keys); }), HasSubstr("program /bin/sh: cannot be started: No such file"));
}

TEST_F(ProgramTest, Examples) {
  const std::string folder = PLUMB_SOURCE_DIR "/examples/rewards/";
  ProgramKeys keys = shell_program("");
  keys.time_limit = 20;
  keys.command = {"/bin/sh", folder + "keyword.sh", "please"};
  const auto words = scores(scorer_of(keys), {"yes \"please\"\n", "yes", "ple\\ase", ""});
  EXPECT_EQ(words[0].reward, 1) << words[0].failure;
  for (size_t k = 1; k < words.size(); ++k) EXPECT_EQ(words[k].reward, 0) << words[k].failure;

  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
  keys.command = {"python3", folder + "arithmetic.py"};
  const Scorer scorer = scorer_of(keys);
  std::vector<RewardSample> samples;
  for (const char* content : {"42", "It is 42.", "43", ""}) samples.push_back(sample_of(content, {{"answer", 42}}));
  const auto all = score_all(scorer, samples);
  const std::vector<double> wanted = {1, 0.5, 0, 0};
  for (size_t k = 0; k < wanted.size(); ++k) EXPECT_EQ(all[k].reward, wanted[k]) << all[k].failure;
  EXPECT_EQ(all[1].metrics.at("judge/words"), 3);
}

}  // namespace
}  // namespace plumb
