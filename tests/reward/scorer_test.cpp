#include "reward/scorer.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>

#include "testing.h"

namespace plumb {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::sample_of;
using testing::score_all;

// A reward that is a function, for tests.
class Given : public Reward {
 public:
  explicit Given(std::function<Score(const RewardSample&)> function) : function_(std::move(function)) {}
  Score score(const RewardSample& sample) override { return function_(sample); }

 private:
  std::function<Score(const RewardSample&)> function_;
};

RewardPart part(const std::string& name, double weight, std::function<Score(const RewardSample&)> function) {
  return {name, weight, std::make_unique<Given>(std::move(function))};
}

Scorer scorer_of(RewardPart a, RewardPart b) {
  std::vector<RewardPart> parts;
  parts.push_back(std::move(a));
  parts.push_back(std::move(b));
  return Scorer(std::move(parts));
}

TEST(Scorer, WeightedSumAndMetrics) {
  const Scorer scorer = scorer_of(part("a", 2,
                                       [](const auto&) {
                                         return Score{.reward = 0.5, .metrics = {{"m", 3}}};
                                       }),
                                  part("b", -1, [](const auto&) { return Score{.reward = 4}; }));
  const Score score = scorer.score(sample_of("x"));
  EXPECT_EQ(score.reward, 2 * 0.5 - 1 * 4);
  EXPECT_EQ(score.metrics, (std::map<std::string, double>{{"a", 0.5}, {"a/m", 3}, {"b", 4}}));
}

TEST(Scorer, AFailedPartFailsTheSampleAndNothingElse) {
  const auto odd = [](const RewardSample& sample) -> Score {
    const std::string& content = sample.answer.content;
    if (content == "error") fail("here", "went wrong");
    if (content == "exception") throw std::runtime_error("bare");
    if (content == "failure") return {.failure = "said so"};
    if (content == "nan") return {.reward = std::nan("")};
    if (content == "infinite") return {.reward = std::numeric_limits<double>::infinity()};
    if (content == "huge") return {.reward = 1e308};
    return {.reward = 1};
  };
  const Scorer scorer =
      scorer_of(part("odd", 100, odd), part("one", 1, [](const auto&) { return Score{.reward = 1}; }));
  std::vector<RewardSample> samples;
  for (const char* content : {"fine", "error", "exception", "failure", "nan", "infinite", "huge", "fine"})
    samples.push_back(sample_of(content));
  const std::vector<Score> scores = score_all(scorer, samples);
  const std::vector<std::string> reasons = {"",
                                            "odd: here: went wrong",
                                            "odd: bare",
                                            "odd: said so",
                                            "odd: the reward is nan",
                                            "odd: the reward is inf",
                                            "the sum of the rewards is inf",
                                            ""};
  for (size_t k = 0; k < reasons.size(); ++k) {
    EXPECT_EQ(scores[k].failure, reasons[k]);
    EXPECT_EQ(scores[k].failed(), !reasons[k].empty());
  }
  EXPECT_EQ(scores.back().reward, 101);
}

TEST(Scorer, LinesAreCheckedByAllParts) {
  const Scorer scorer(
      parse_rewards("[[reward]]\nkind = 'length'\ntarget = 3\n[[reward]]\nkind = 'number'\nfield = 'n'", "r.toml")
          .rewards);
  EXPECT_NO_THROW(scorer.check_line({{"n", 3}}, "d.jsonl:1"));
  EXPECT_THAT(error_of([&] { scorer.check_line({{"m", 3}}, "d.jsonl:2"); }), HasSubstr("d.jsonl:2: has no field n"));
}

}  // namespace
}  // namespace plumb
