#include "config/run_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "config/nearest.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

const std::string kMinimal = R"([model]
path = "assets/tiny"
[data]
train = "train.jsonl"
[output]
dir = "runs/a"
)";

RunConfig parse(const std::string& toml, const std::vector<std::string>& overrides = {},
                RunCommand command = RunCommand::train) {
  return parse_run_config(command, toml, "run.toml", overrides);
}

std::string refusal(const std::string& toml, const std::vector<std::string>& overrides = {},
                    RunCommand command = RunCommand::train) {
  try {
    parse(toml, overrides, command);
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

// The refusal of the minimal file with one override, which is wrong use of the command line.
std::string refusal_of_set(const std::string& assignment) {
  EXPECT_THROW(parse(kMinimal, {assignment}), UsageError);
  return refusal(kMinimal, {assignment});
}

TEST(RunConfig, DefaultsOfBothCommands) {
  const RunConfig train = parse(kMinimal);
  EXPECT_EQ(train.model.path, "assets/tiny");
  EXPECT_EQ(train.data.train, "train.jsonl");
  EXPECT_EQ(train.output.dir, "runs/a");
  EXPECT_EQ(train.lora.rank, 8);
  EXPECT_EQ(train.lora.alpha, 32);
  EXPECT_EQ(train.lora.targets.size(), 11u);
  EXPECT_EQ(train.train.beta2, 0.99);
  EXPECT_EQ(train.train.weight_decay, 0);
  const RunConfig pretrain = parse(kMinimal, {}, RunCommand::pretrain);
  EXPECT_EQ(pretrain.train.beta2, 0.95);
  EXPECT_EQ(pretrain.train.weight_decay, 0.1);
  EXPECT_EQ(pretrain.train.decay, "cosine");
}

TEST(RunConfig, ReadsEveryType) {
  const RunConfig c = parse(kMinimal + R"(resume = "never"
[train]
steps = 10
learning_rate = 1  # a whole number is a number
decay = "linear"
seed = 9007199254740993
[lora]
targets = ["experts", "compressor.kv_proj"]
)");
  EXPECT_EQ(c.output.resume, "never");
  EXPECT_EQ(c.train.steps, 10);
  EXPECT_EQ(c.train.learning_rate, 1);
  EXPECT_EQ(c.train.decay, "linear");
  EXPECT_EQ(c.train.seed, 9007199254740993);
  EXPECT_EQ(c.lora.targets, (std::vector<std::string>{"experts", "compressor.kv_proj"}));
  EXPECT_FALSE(parse(kMinimal, {"data.drop_thinking=false"}).data.drop_thinking);
}

TEST(RunConfig, OverridesComeAfterTheFile) {
  const RunConfig c =
      parse(kMinimal, {"train.learning_rate=1e-4", "train.steps=3", "train.steps=5", "output.dir=runs/1=2",
                       "data.eval=\"quoted.jsonl\"", "lora.targets=experts,kv_proj", "model.numerics=bf16"});
  EXPECT_EQ(c.train.learning_rate, 1e-4);
  EXPECT_EQ(c.train.steps, 5);
  EXPECT_EQ(c.output.dir, "runs/1=2");
  EXPECT_EQ(c.data.eval, "quoted.jsonl");
  EXPECT_EQ(c.lora.targets, (std::vector<std::string>{"experts", "kv_proj"}));
  EXPECT_EQ(c.model.numerics, "bf16");
  EXPECT_EQ(parse(kMinimal, {"lora.targets=[\"experts\"]"}).lora.targets, std::vector<std::string>{"experts"});
}

// Everything may come from the command line.
TEST(RunConfig, FileMayBeEmpty) {
  EXPECT_EQ(parse("", {"model.path=m", "data.train=d", "output.dir=o"}).output.dir, "o");
}

TEST(RunConfig, ResolvedFileRoundTrips) {
  for (RunCommand command : {RunCommand::train, RunCommand::dpo, RunCommand::rl, RunCommand::pretrain}) {
    RunConfig c = parse(kMinimal, {"train.learning_rate=2.5e-7", "train.steps=7"}, command);
    c.data.eval = "a \"b\" \\c\n\x01 \xc3\xa9.jsonl";
    const std::string text = to_toml(c);
    const RunConfig again = parse(text, {}, command);
    EXPECT_EQ(to_toml(again), text);
    EXPECT_EQ(again.data.eval, c.data.eval);
    EXPECT_EQ(again.train.learning_rate, 2.5e-7);
    EXPECT_EQ(again.train.eps, c.train.eps);
  }
  EXPECT_EQ(to_toml(parse(kMinimal)).find("pretrain"), std::string::npos);
  EXPECT_EQ(to_toml(parse(kMinimal, {}, RunCommand::pretrain)).find("[lora]"), std::string::npos);
}

TEST(RunConfig, RewardsStayInTheResolvedFile) {
  const std::string reward = "\n[[reward]]\nkind = \"exact\"\nweight = 0.5\n";
  const RunConfig c = parse(kMinimal + reward, {"rl.group_size=3"}, RunCommand::rl);
  EXPECT_EQ(c.rl.group_size, 3);
  EXPECT_NE(c.text.find("[[reward]]"), std::string::npos);
  const RunConfig again = parse(to_toml(c), {}, RunCommand::rl);
  EXPECT_EQ(to_toml(again), to_toml(c));
  EXPECT_NE(to_toml(c).find("weight = 0.5"), std::string::npos);
  EXPECT_EQ(refusal(kMinimal + reward), "run.toml:8: there is no key reward");
}

TEST(RunConfigRefuses, RlKeysThatDoNotFitTogether) {
  const auto rl = [](const std::string& text) { return refusal(kMinimal + text, {}, RunCommand::rl); };
  EXPECT_EQ(
      rl("[rl]\nkl_reference = \"adapter\"\n"),
      "run.toml: rl.kl_ref_adapter_path and rl.kl_reference = \"adapter\" belong together (give both or neither)");
  EXPECT_EQ(
      rl("[rl]\ntruncated_importance_sampling = 2\n"),
      "run.toml:8: rl.truncated_importance_sampling does nothing while old log-probabilities are the recorded ones "
      "(set rl.precalculate_logprobs = true, or leave it out)");
  EXPECT_EQ(rl("[sampling]\nmax_tokens = 5000\n"),
            "run.toml:8: sampling.max_tokens = 5000 leaves no room for a prompt in rows of 2048 tokens (raise "
            "data.row_tokens or lower sampling.max_tokens)");
  EXPECT_EQ(rl("[rl]\nloss = \"gspo\"\nimportance_sampling_level = \"average\"\n"),
            "run.toml:9: gspo takes the ratio over sequences (leave the key out)");
  EXPECT_EQ(
      rl("[rl]\nloss = \"none\"\n"),
      "run.toml:8: rl.loss = \"none\" leaves nothing to train (set distill.coefficient, or choose a policy loss)");
  EXPECT_EQ(rl("[distill]\nteacher_adapter = \"a\"\n"),
            "run.toml:8: distill.teacher_adapter does nothing while distill.coefficient is 0 (set distill.coefficient, "
            "1 to begin with, or leave the key out)");
  EXPECT_EQ(
      rl("[rl]\nloss = \"none\"\nkl_penalty_coef = 1\n[distill]\ncoefficient = 1\n"),
      "run.toml:9: rl.kl_penalty_coef shapes advantages, and rl.loss = \"none\" has none (leave one of them out)");
}

TEST(RunConfigRefuses, UnknownKeysWithTheNearest) {
  EXPECT_EQ(refusal(kMinimal + "\n[train]\nstpes = 3\n"),
            "run.toml:9: there is no key train.stpes (did you mean train.steps?)");
  EXPECT_EQ(refusal(kMinimal + "[train]\nrank = 3\n"),
            "run.toml:8: there is no key train.rank (did you mean lora.rank?)");
  EXPECT_EQ(refusal("learning_rate = 1\n"),
            "run.toml:1: there is no key learning_rate (did you mean train.learning_rate?)");
  EXPECT_EQ(refusal("\n[trian]\nsteps = 1\n"), "run.toml:2: there is no table [trian] (did you mean train?)");
  EXPECT_EQ(refusal(kMinimal + "[qqqqqqqq]\n"), "run.toml:7: there is no table [qqqqqqqq]");
  EXPECT_EQ(refusal(kMinimal + "zzzzzzzzzzzzzzzz = 1\n"), "run.toml:7: there is no key output.zzzzzzzzzzzzzzzz");
  EXPECT_EQ(refusal_of_set("train.learnin_rate=1"),
            "--set: there is no key train.learnin_rate (did you mean train.learning_rate?)");
}

TEST(RunConfigRefuses, KeysOfTheOtherCommand) {
  EXPECT_EQ(refusal(kMinimal + "[pretrain]\noptimizer = \"adamw\"\n"),
            "run.toml:8: pretrain.optimizer is no key of plumb train (it belongs to plumb pretrain)");
  EXPECT_EQ(refusal(kMinimal, {"lora.rank=4"}, RunCommand::pretrain),
            "--set: lora.rank is no key of plumb pretrain (it belongs to plumb train)");
}

TEST(RunConfigRefuses, WrongTypesAndRanges) {
  EXPECT_EQ(refusal(kMinimal + "[lora]\nrank = \"eight\"\n"),
            "run.toml:8: lora.rank = \"eight\", must be a whole number from 1 to 1024");
  EXPECT_EQ(refusal(kMinimal + "[lora]\nrank = 8.0\n"),
            "run.toml:8: lora.rank = 8.0, must be a whole number from 1 to 1024");
  EXPECT_EQ(refusal_of_set("train.epochs=0"), "--set: train.epochs = 0, must be a whole number at least 1");
  EXPECT_EQ(refusal_of_set("lora.rank=0"), "--set: lora.rank = 0, must be a whole number from 1 to 1024");
  EXPECT_EQ(refusal_of_set("lora.rank="), "--set: lora.rank = , must be a whole number from 1 to 1024");
  EXPECT_EQ(refusal_of_set("train.beta1=1"), "--set: train.beta1 = 1, must be a number at least 0 and less than 1");
  EXPECT_EQ(refusal_of_set("train.eps=0"), "--set: train.eps = 0, must be a number greater than 0 and at most 1");
  EXPECT_EQ(refusal_of_set("train.learning_rate=nan"),
            "--set: train.learning_rate = nan, must be a number from 0 to 1");
  EXPECT_EQ(refusal_of_set("train.learning_rate=fast"),
            "--set: train.learning_rate = fast, must be a number from 0 to 1");
  EXPECT_EQ(refusal_of_set("train.decay=cosinus"),
            "--set: train.decay = \"cosinus\", must be constant, linear or cosine (did you mean cosine?)");
  EXPECT_EQ(refusal_of_set("data.reasoning_effort=extreme"),
            "--set: data.reasoning_effort = \"extreme\", must be \"\", low, high or max");
  EXPECT_EQ(refusal_of_set("data.drop_thinking=yes"), "--set: data.drop_thinking = yes, must be true or false");
  EXPECT_EQ(refusal(kMinimal + "[data.eval]\n"), "run.toml:7: data.eval = a table, must be a text");
}

TEST(RunConfigRefuses, Lists) {
  const std::string targets =
      "a list out of q_a_proj, q_b_proj, kv_proj, o_a_proj, o_b_proj, compressor.kv_proj, compressor.gate_proj, "
      "gate_proj, "
      "up_proj, down_proj, experts";
  EXPECT_EQ(refusal(kMinimal + "[lora]\ntargets = [\"q_proj\"]\n"),
            "run.toml:8: lora.targets = \"q_proj\", must be " + targets + " (did you mean q_a_proj?)");
  EXPECT_EQ(refusal(kMinimal + "[lora]\ntargets = \"experts\"\n"),
            "run.toml:8: lora.targets = \"experts\", must be " + targets);
  EXPECT_EQ(refusal_of_set("lora.targets=experts,kv_proj,experts"), "--set: lora.targets has \"experts\" twice");
  EXPECT_EQ(
      refusal_of_set("lora.targets=[]"),
      "--set: lora.targets is empty (matrices that get an adapter: of attention, of the compressor, of the shared "
      "expert, or all routed experts)");
}

TEST(RunConfigRefuses, WhatDoesNotFitTogether) {
  EXPECT_EQ(refusal("[model]\npath = \"m\"\n[output]\ndir = \"o\"\n"),
            "run.toml: data.train is missing (JSONL file, one example (dpo: one pair, rl: one prompt) a line)");
  EXPECT_EQ(refusal_of_set("output.dir="),
            "--set: output.dir is empty (run directory: resolved configuration, metrics, log, checkpoints)");
  EXPECT_EQ(refusal(kMinimal, {"data.eval=e.jsonl", "data.eval_fraction=0.1"}),
            "--set: data.eval and data.eval_fraction are both given (keep one of them)");
  EXPECT_EQ(refusal_of_set("data.reasoning_effort=low"),
            "--set: data.reasoning_effort = \"low\" does not exist in the profile preview (take high or max, or "
            "data.effort_profile = \"official\")");
  EXPECT_EQ(refusal(kMinimal + "[train]\nwarmup_steps = 20\nsteps = 10\n"),
            "run.toml:8: train.warmup_steps = 20 is greater than train.steps = 10");
}

TEST(RunConfigRefuses, WhatIsNoToml) {
  EXPECT_EQ(refusal("[model]\npath = \n").find("run.toml:2: not TOML: "), 0u);
  EXPECT_EQ(refusal("[model]\npath = \"a\"\npath = \"b\"\n").find("run.toml:3: not TOML: "), 0u);
  try {
    parse(kMinimal, {"train.steps"});
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(), "--set train.steps: there is no value (write --set table.key=value)");
  }
  try {
    load_run_config(RunCommand::train, "no/such/run.toml");
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "no/such/run.toml: cannot be read (give a run file, see docs/configuration.md)");
  }
}

TEST(RunConfig, LoadsFromFile) {
  const std::string file = testing::temp_path("run_config.toml");
  std::ofstream(file) << kMinimal;
  EXPECT_EQ(load_run_config(RunCommand::train, file, {"train.steps=4"}).train.steps, 4);
  std::filesystem::remove(file);
}

TEST(RunConfig, HelpHasEveryKeyOfTheCommandAndNoOther) {
  const std::string help = describe_run_keys(RunCommand::train);
  EXPECT_NE(help.find("  train.rows_per_step"), std::string::npos);
  EXPECT_NE(help.find("[rows] rows whose gradients make one optimizer step"), std::string::npos);
  EXPECT_NE(help.find("a whole number from 1 to 1000000; default: 1\n"), std::string::npos);
  EXPECT_EQ(help.find("pretrain."), std::string::npos);
}

// docs/configuration.md ends with the generated tables.
TEST(RunConfig, DocumentationIsUpToDate) {
  std::ifstream in(PLUMB_SOURCE_DIR "/docs/configuration.md");
  std::ostringstream text;
  text << in.rdbuf();
  const std::string marker = "<!-- from here on: made from src/config/run_fields.cpp -->\n\n";
  const size_t at = text.str().find(marker);
  ASSERT_NE(at, std::string::npos);
  const std::string expected = ::testing::TempDir() + "plumb_run_keys.md";  // stays, to be copied
  if (text.str().substr(at + marker.size()) != run_keys_as_markdown()) {
    std::ofstream(expected) << run_keys_as_markdown();
    FAIL() << "replace what follows the marker in docs/configuration.md by the text in " << expected;
  }
}

TEST(Nearest, EditDistance) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("ab", "ba"), 1);
  EXPECT_EQ(edit_distance("steps", "stpes"), 1);
  EXPECT_EQ(edit_distance("flash", "flash"), 0);
  EXPECT_EQ(nearest("abcdef", {"uvwxyz"}), "");
  EXPECT_EQ(nearest("cat", {"bat", "hat", "cat"}), "cat");
}

}  // namespace
}  // namespace plumb
