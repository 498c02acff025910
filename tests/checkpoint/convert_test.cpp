#include "checkpoint/convert.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/init.h"
#include "checkpoint/testing.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

WriteOptions to(Layout layout, TargetFormat format = TargetFormat::keep, uint64_t shard = default_shard_bytes) {
  return {layout, format, shard, {}};
}

// Every value of two checkpoints, decoded; `data` compares the stored bytes as well.
void expect_equal(const Checkpoint& a, const Checkpoint& b, bool data) {
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (const InventoryEntry& e : a.entries()) {
    if (e.role == Role::table) {
      EXPECT_TRUE(same(a.table(e.name), b.table(e.name))) << e.name;
      continue;
    }
    EXPECT_TRUE(same(a.floats(e.name), b.floats(e.name))) << e.name;
    if (data) {
      EXPECT_TRUE(same(a.weight(e.name).data, b.weight(e.name).data)) << e.name;
    }
  }
}

class Convert : public ::testing::Test {
 protected:
  void make(const ModelConfig& config) {
    Tensors tensors = random_tensors(config);
    for (int i = 0; i < 2; ++i) tensors.emplace_back("mtp.0.main_proj." + std::to_string(i), Tensor::full({3}, 2));
    write_checkpoint(f / "in", config, tensors);
    write_text(f / "in/tokenizer.json", "{}");
  }
  Checkpoint run(const std::string& in, const std::string& out, const WriteOptions& options) {
    report = convert_checkpoint(f / in, f / out, options);
    return Checkpoint::open(f / out);
  }
  TempFolder f;
  ConvertReport report;
};

TEST_F(Convert, EveryLayoutKeepsEveryByte) {
  make(small_config());
  const Checkpoint in = Checkpoint::open(f / "in");
  for (Layout layout : {Layout::released, Layout::hf, Layout::hf_state}) {
    const std::string name = layout_name(layout);
    const Checkpoint out = run("in", name, to(layout, TargetFormat::keep, 20000));
    EXPECT_EQ(out.layout(), layout);
    EXPECT_EQ(out.config(), in.config());
    EXPECT_GT(out.files().file_count(), 3u);
    EXPECT_EQ(report.copied_files, (std::vector<std::string>{"tokenizer.json"}));
    EXPECT_EQ(out.extras(), in.extras());
    expect_equal(in, out, true);
    expect_equal(in, run(name, name + "-back", to(Layout::released)), true);
    EXPECT_EQ(read_text(f / name + "/tokenizer.json"), "{}");
  }
}

TEST_F(Convert, WiderFormatsHoldEveryValueAndComeBackExactly) {
  make(small_config());
  const Checkpoint in = Checkpoint::open(f / "in");
  for (TargetFormat format : {TargetFormat::bf16, TargetFormat::fp32}) {
    const std::string name = "wide" + std::to_string(static_cast<int>(format));
    const Checkpoint wide = run("in", name, to(Layout::hf, format));
    EXPECT_EQ(wide.config().expert_dtype, ExpertDtype::bf16);
    const Codec codec = format == TargetFormat::bf16 ? Codec::bf16 : Codec::f32;
    EXPECT_EQ(wide.codec("layers.1.attn.wkv.weight"), codec);
    EXPECT_EQ(wide.codec("norm.weight"), codec);
    EXPECT_EQ(wide.codec("hc_head_fn"), Codec::f32);
    expect_equal(in, wide, false);
    const Checkpoint back = run(name, name + "-back", to(Layout::released, TargetFormat::released));
    EXPECT_EQ(back.config().expert_dtype, ExpertDtype::fp4);
    EXPECT_EQ(back.codec("layers.1.ffn.experts.0.w2.weight"), Codec::fp4);
    expect_equal(in, back, false);
  }
}

TEST_F(Convert, FormatOfTheBaseReleases) {
  make(small_config(ExpertDtype::bf16));
  const Checkpoint out = run("in", "out", to(Layout::released, TargetFormat::fp8));
  EXPECT_EQ(out.config().expert_dtype, ExpertDtype::fp8);
  EXPECT_EQ(out.codec("layers.1.ffn.experts.0.w2.weight"), Codec::fp8);
  const Tensor before = Checkpoint::open(f / "in").floats("layers.1.ffn.experts.0.w2.weight");
  const Tensor after = out.floats("layers.1.ffn.experts.0.w2.weight");
  for (int64_t i = 0; i < before.numel(); ++i)  // 3 bits of mantissa; inputs are within a factor of 4 of each other
    ASSERT_NEAR(after.f32()[i], before.f32()[i], std::fabs(before.f32()[i]) / 16);
}

// Bands of rows of a matrix too large for one: 20000 x 512 = 10.2 M values.
TEST_F(Convert, LargeMatricesGoBandByBand) {
  ModelConfig c = small_config();
  c.vocab_size = 20000;
  c.hidden_size = 512;
  c.num_hidden_layers = 1;
  c.layer_kinds = {LayerKind::window};
  c.num_nextn_predict_layers = 0;
  write_checkpoint(f / "in", c, random_tensors(c));
  const Checkpoint in = Checkpoint::open(f / "in");
  expect_equal(in, run("in", "wide", to(Layout::hf_state, TargetFormat::fp32)), false);
}

TEST_F(Convert, BlocksAcrossGateAndUpAreRefusedForStacks) {
  make(small_config(ExpertDtype::fp8));  // 32 rows each
  expect_error([&] { run("in", "out", to(Layout::hf_state)); },
               {"layers.0.ffn.experts.0.w1.weight", "span", "layout hf"});
  EXPECT_FALSE(fs::exists(f / "out"));
  EXPECT_EQ(f.count(), 1);
}

TEST_F(Convert, ExistingFolderIsNotTouched) {
  make(small_config());
  expect_error([&] { run("in", "in", to(Layout::hf)); }, {"exists already"});
}

// NaN in a scale is met in the middle of the work.
TEST_F(Convert, FailureLeavesNothingBehind) {
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config);
  for (auto& [name, t] : tensors)
    if (name == "layers.2.ffn.experts.3.w2.scale") t.ptr<uint8_t>()[0] = 255;
  write_checkpoint(f / "in", config, tensors);
  expect_error([&] { run("in", "out", to(Layout::hf)); }, {"layers.2.ffn.experts.3.w2.scale", "NaN"});
  EXPECT_EQ(f.count(), 1);
}

// See files_test: the limit on file size stands for a full disk.
TEST_F(Convert, FullDiskLeavesNothingBehind) {
  make(small_config());
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{50000, 50000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string text = message([&] { convert_checkpoint(f / "in", f / "out", to(Layout::hf)); });
    ::_exit(text.find("model.safetensors") != std::string::npos && text.find("smaller shards") != std::string::npos
                ? 0
                : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(f.count(), 1);
}

TEST(Init, DependsOnSeedAlone) {
  TempFolder f;
  const ModelConfig config = small_config();
  const auto make = [&](const std::string& name, uint64_t seed, const WriteOptions& options) {
    init_checkpoint(config, f / name, seed, options);
    return Checkpoint::open(f / name);
  };
  const Checkpoint a = make("a", 1, to(Layout::released)),
                   b = make("b", 1, to(Layout::hf_state, TargetFormat::keep, 9999));
  expect_equal(a, b, true);
  EXPECT_FALSE(same(a.floats("embed.weight"), make("c", 2, to(Layout::released)).floats("embed.weight")));
  EXPECT_EQ(a.codec("layers.0.ffn.experts.0.w1.weight"), Codec::fp4);
  EXPECT_TRUE(a.has_mtp(0));
}

TEST(Init, DistributionsAreTheDocumentedOnes) {
  TempFolder f;
  const ModelConfig config = small_config(ExpertDtype::bf16);
  init_checkpoint(config, f / "a", 7, to(Layout::released, TargetFormat::fp32));
  const Checkpoint c = Checkpoint::open(f / "a");
  const auto moments = [&](const char* name) {
    const Tensor t = c.floats(name);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < t.numel(); ++i) sum += t.f32()[i], squares += t.f32()[i] * t.f32()[i];
    return std::pair(sum / t.numel(), std::sqrt(squares / t.numel()));
  };
  // 6400 draws: 4 standard errors of the mean are 0.001, of the deviation 0.0007.
  const auto [mean, deviation] = moments("embed.weight");
  EXPECT_NEAR(mean, 0, 0.001);
  EXPECT_NEAR(deviation, 0.02, 0.0007);
  EXPECT_EQ(moments("norm.weight"), std::pair(1.0, 1.0));
  EXPECT_EQ(moments("layers.0.attn.attn_sink").second, 0);
  EXPECT_EQ(moments("layers.1.ffn.gate.bias").second, 0);
  EXPECT_EQ(moments("layers.1.hc_ffn_base").second, 0);
  EXPECT_FLOAT_EQ(moments("layers.1.hc_ffn_scale").first, 0.01f);
  EXPECT_NEAR(moments("layers.1.hc_ffn_fn").second, std::sqrt(2.0 / (24 + 640)), 0.002);  // uniform: bound / sqrt(3)
  const Tensor table = c.table("layers.0.ffn.gate.tid2eid");
  std::vector<int> uses(5);
  for (int64_t token = 0; token < 40; ++token) {
    const int32_t* row = table.ptr<int32_t>() + 2 * token;
    EXPECT_NE(row[0], row[1]);
    ++uses[row[0]], ++uses[row[1]];
  }
  for (int n : uses) EXPECT_GT(n, 4);  // 16 expected
}

}  // namespace
}  // namespace plumb
