// Whole runs on the small random model: resuming after a kill gives the bits of an uninterrupted run, stopping saves,
// divergence and changed data are errors.
#include "train/loop.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "checkpoint/adapter.h"
#include "model/weights.h"
#include "support/temp_path.h"
#include "train/checkpoints.h"
#include "train/step.h"
#include "train/testing.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using namespace testing;

struct Killed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LoopTest : ::testing::Test {
  std::string root = testing::temp_path("loop_test_") + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  ModelConfig model = tiny_config();

  void SetUp() override {
    fs::remove_all(root);
    set_log_level(LogLevel::error);
  }
  void TearDown() override {
    set_log_file("");
    set_log_level(LogLevel::info);
    fs::remove_all(root);
  }

  RunConfig config(RunCommand command, const std::string& name) const {
    RunConfig c = default_run_config(command);
    c.model.path = root + "/model";  // does not exist: the model is in memory
    c.model.numerics = "released";
    c.data.train = "in memory";
    c.data.row_tokens = 40;
    c.train.steps = 7;
    c.train.rows_per_step = 2;
    c.train.learning_rate = 3e-3;
    c.train.warmup_steps = 2;
    c.train.save_every = 2;
    c.train.keep_checkpoints = 10;
    c.train.seed = 3;
    c.lora.rank = 2;
    c.output.dir = root + "/" + name;
    return c;
  }
  TrainingData data() const {
    TrainingData d;
    d.train = random_samples(model, {19, 30, 7, 21, 12, 40, 5});
    d.eval = random_samples(model, {9, 14}, 99);
    d.format = "tokens";
    return d;
  }
  std::unique_ptr<Trainee> trainee(const RunConfig& c) const {
    if (c.command == RunCommand::pretrain) return full_trainee(random_model(model, 1, WeightFormat::bf16), {});
    return lora_trainee(random_model(model, 1, WeightFormat::fp8), fresh_adapter(model, c.lora, 3));
  }
  RunSummary run(const RunConfig& c, const LoopHooks& hooks = {}) const {
    const RunDirectory directory = open_run_directory(c);
    const auto t = trainee(c);
    return run_loop(c, *t, data(), directory, hooks);
  }
  void run_and_kill(const RunConfig& c, int64_t after) const {
    LoopHooks hooks;
    hooks.after_step = [&](int64_t step) {
      if (step == after) throw Killed("");
    };
    EXPECT_THROW(run(c, hooks), Killed);
  }
  // Lines of metrics.jsonl without what a clock measured.
  static std::vector<nlohmann::json> metrics(const RunConfig& c) {
    std::vector<nlohmann::json> lines;
    std::istringstream in(read_text(c.output.dir + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);) {
      auto j = nlohmann::json::parse(line);
      for (const char* key : {"time", "step_seconds", "tokens_per_second"}) j.erase(key);
      lines.push_back(j);
    }
    return lines;
  }
  static std::string checkpoint_file(const RunConfig& c, int64_t step, const std::string& file) {
    return read_text(c.output.dir + "/" + checkpoint_name(step) + "/" + file);
  }
};

TEST_F(LoopTest, ResumeAfterAKillHasTheSameBits) {
  for (RunCommand command : {RunCommand::train, RunCommand::pretrain}) {
    const std::string name = command == RunCommand::train ? "train" : "pretrain";
    const RunConfig whole = config(command, name + "_whole"), killed = config(command, name + "_killed");
    run(whole);
    run_and_kill(killed, 1);  // no checkpoint yet: begins anew
    run_and_kill(killed, 5);  // metrics of step 5 are written, the checkpoint is of step 4
    const RunSummary summary = run(killed);
    EXPECT_EQ(summary.steps, 7);
    EXPECT_EQ(metrics(killed), metrics(whole));
    ASSERT_EQ(metrics(whole).size(), 7u);
    for (int64_t step : {2, 4, 6, 7})
      EXPECT_EQ(checkpoint_file(killed, step, "trainer_state.safetensors"),
                checkpoint_file(whole, step, "trainer_state.safetensors"))
          << name << " step " << step;
    const std::string weights = command == RunCommand::train ? "adapter_model.safetensors" : "model.safetensors";
    EXPECT_EQ(checkpoint_file(killed, 7, weights), checkpoint_file(whole, 7, weights)) << name;
  }
}

TEST_F(LoopTest, StopSavesAndGoesOn) {
  const RunConfig whole = config(RunCommand::train, "whole"), stopped = config(RunCommand::train, "stopped");
  run(whole);
  int asked = 0;
  LoopHooks hooks;
  hooks.stop = [&] { return ++asked == 3; };
  RunSummary summary = run(stopped, hooks);
  EXPECT_TRUE(summary.stopped);
  EXPECT_EQ(summary.steps, 3);
  EXPECT_EQ(summary.checkpoint, stopped.output.dir + "/checkpoints/step_000003");
  summary = run(stopped);
  EXPECT_FALSE(summary.stopped);
  EXPECT_EQ(checkpoint_file(stopped, 7, "trainer_state.safetensors"),
            checkpoint_file(whole, 7, "trainer_state.safetensors"));
}

TEST_F(LoopTest, FinishedRunIsLeftAsItIs) {
  const RunConfig c = config(RunCommand::train, "run");
  run(c);
  const auto before = metrics(c);
  const RunSummary again = run(c);
  EXPECT_EQ(again.steps, 7);
  EXPECT_EQ(metrics(c), before);
}

TEST_F(LoopTest, MetricsAndEvaluation) {
  RunConfig c = config(RunCommand::pretrain, "run");
  c.train.eval_every = 3;
  c.train.log_every = 2;
  run(c);
  const auto lines = metrics(c);
  std::vector<int64_t> steps;
  for (const auto& line : lines) steps.push_back(line["step"]);
  EXPECT_EQ(steps, (std::vector<int64_t>{2, 3, 4, 6, 7}));
  EXPECT_FALSE(lines[1].contains("loss"));  // step 3 is evaluated only
  for (int i : {1, 3, 4}) EXPECT_GT(lines[i]["eval/loss"], 0);
  for (const char* key : {"loss", "grad_norm", "learning_rate", "epoch", "rows", "tokens", "trained_tokens", "padding",
                          "mtp_loss", "balance_loss", "indexer_loss", "greatest_expert_load"})
    EXPECT_TRUE(lines[0].contains(key)) << key;
  EXPECT_NEAR(lines[0]["padding"].get<double>(), 1 - lines[0]["tokens"].get<double>() / 80, 1e-12);
  EXPECT_GE(lines[0]["greatest_expert_load"], 1);
}

TEST_F(LoopTest, EpochsDecideTheSteps) {
  RunConfig c = config(RunCommand::train, "run");
  c.train.steps = 0;
  c.train.epochs = 2;
  c.train.rows_per_step = 3;
  const int64_t rows = RowStream(lengths_of(data().train), 40, 3).rows_in(2);
  const RunSummary s = run(c);
  EXPECT_EQ(s.total_steps, (rows + 2) / 3);
  EXPECT_EQ(s.tokens, 2 * (19 + 30 + 7 + 21 + 12 + 40 + 5));  // each sample exactly twice
}

TEST_F(LoopTest, OldCheckpointsAreRemoved) {
  RunConfig c = config(RunCommand::train, "run");
  c.train.keep_checkpoints = 2;
  fs::create_directories(c.output.dir + "/checkpoints/step_000002.partial");  // of a run that was killed
  run(c);
  std::set<std::string> left;
  for (const auto& entry : fs::directory_iterator(c.output.dir + "/checkpoints")) left.insert(entry.path().filename());
  EXPECT_EQ(left, (std::set<std::string>{"step_000006", "step_000007"}));
}

TEST_F(LoopTest, CheckpointIsAnAdapterThatOthersRead) {
  const RunConfig c = config(RunCommand::train, "run");
  run(c);
  const StoredAdapter stored = read_adapter(c.output.dir + "/checkpoints/step_000007", model);
  EXPECT_EQ(stored.rank, 2);
  EXPECT_EQ(stored.alpha, c.lora.alpha);
  EXPECT_EQ(stored.base_model, c.model.path);
  const Safetensors state = Safetensors::open(c.output.dir + "/checkpoints/step_000007/trainer_state.safetensors");
  const Tensor master = state.tensor("master.layers.1.attn.wq_b.lora_b");
  const Tensor& b = stored.targets.at("layers.1.attn.wq_b").b;
  EXPECT_EQ(std::memcmp(master.raw(), b.raw(), b.bytes()), 0);
}

TEST_F(LoopTest, CheckpointIsAModelThatLoads) {
  const RunConfig c = config(RunCommand::pretrain, "run");
  run(c);
  const std::string folder = c.output.dir + "/checkpoints/step_000007";
  const auto loaded = load_weights(Checkpoint::open(folder));
  // The loaded model computes what the trained one does: its evaluation is that of the last line.
  const auto t = full_trainee(loaded, {});
  std::vector<TrainRow> rows = make_rows(model, data().eval, pack_epoch(lengths_of(data().eval), 40, 0, 0));
  EXPECT_EQ(evaluate(*t, rows, Numerics::released), metrics(c).back()["eval/loss"].get<double>());
}

TEST_F(LoopTest, ChangedDataOrSeedOrTargetsAreRefused) {
  const RunConfig c = config(RunCommand::train, "run");
  run(c);
  RunConfig other = c;
  other.train.steps = 9;
  other.train.seed = 4;
  EXPECT_THROW(run(other), Error);
  other.train.seed = 3;
  other.lora.rank = 4;
  try {
    run(other);
    ADD_FAILURE() << "accepted another rank";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("shape [4,"), std::string::npos) << e.what();
  }
  other.lora.rank = 2;
  other.lora.targets = {"kv_proj"};
  EXPECT_THROW(run(other), Error);
  other = c;
  other.output.resume = "never";
  EXPECT_THROW(run(other), Error);
  other = c;
  other.train.steps = 9;
  EXPECT_EQ(run(other).steps, 9);  // more steps are fine
}

TEST_F(LoopTest, OneRunAFolder) {
  const RunConfig c = config(RunCommand::train, "run");
  {
    const RunDirectory held = open_run_directory(c);
    EXPECT_THROW(open_run_directory(c), Error);
  }
  open_run_directory(c);
}

TEST_F(LoopTest, DivergenceIsAnErrorThatNamesTheStep) {
  RunConfig c = config(RunCommand::train, "run");
  const RunDirectory directory = open_run_directory(c);
  const auto t = trainee(c);
  LoopHooks hooks;
  hooks.after_step = [&](int64_t step) {
    if (step == 3) t->parameters[0].master.f32()[0] = std::numeric_limits<float>::quiet_NaN();
  };
  try {
    run_loop(c, *t, data(), directory, hooks);
    ADD_FAILURE() << "went on";
  } catch (const Error& e) {
    EXPECT_EQ(e.where(), "step 4");
    EXPECT_NE(std::string(e.what()).find("step_000002"), std::string::npos) << e.what();
  }
  EXPECT_EQ(newest_checkpoint(c.output.dir), 2);  // nothing broken was saved
}

TEST_F(LoopTest, DirectoryHasConfigurationAndLog) {
  RunConfig c = config(RunCommand::train, "run");
  set_log_level(LogLevel::info);
  ::testing::internal::CaptureStderr();
  run(c);
  const std::string seen = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(seen.find("optimizer      AdamW"), std::string::npos) << seen;
  const RunConfig read = load_run_config(RunCommand::train, c.output.dir + "/config.toml");
  EXPECT_EQ(to_toml(read), to_toml(c));
  EXPECT_NE(read_text(c.output.dir + "/log.txt").find("saved"), std::string::npos);
  RunConfig longer = c;
  longer.train.steps = 9;
  longer.train.decay = "linear";
  EXPECT_EQ(config_changes(c, longer),
            (std::vector<std::string>{"train.decay: \"constant\" -> \"linear\"", "train.steps: 7 -> 9"}));
}

TEST(WithCommas, Groups) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
}

}  // namespace
}  // namespace plumb
