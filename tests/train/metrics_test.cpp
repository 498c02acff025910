#include "train/metrics.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/files.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

TEST(Crc32c, KnownValues) {  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

struct MetricsTest : ::testing::Test {
  std::string folder = testing::temp_path("metrics_test");
  void SetUp() override {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> list;
    std::istringstream in(read_text(folder + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);) list.push_back(nlohmann::json::parse(line)["step"]);
    return list;
  }
};

TEST_F(MetricsTest, LinesAreWrittenInOrder) {
  MetricsWriter w(folder, 0);
  w.write(1, {{"loss", 2.5}, {"eval/loss", 0.1}});
  const std::string text = read_text(folder + "/metrics.jsonl");
  EXPECT_TRUE(text.starts_with("{\"step\":1,\"time\":")) << text;
  EXPECT_TRUE(text.ends_with(",\"loss\":2.5,\"eval/loss\":0.1}\n")) << text;
}

TEST_F(MetricsTest, LinesBehindTheCheckpointAreDropped) {
  {
    MetricsWriter w(folder, 0);
    for (int step = 1; step <= 5; ++step) w.write(step, {{"loss", step}});
  }
  std::ofstream(folder + "/metrics.jsonl", std::ios::app) << "{\"step\": 6, \"lo";  // killed while writing
  {
    MetricsWriter w(folder, 3);
    w.write(4, {{"loss", 40}});
  }
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4}));
  { MetricsWriter w(folder, 0); }
  EXPECT_TRUE(steps().empty());
}

TEST_F(MetricsTest, EventFileIsAChainOfRecords) {
  // Walks the TFRecord framing; tests/oracle/test_train.py reads the messages with tensorboard itself.
  std::string path;
  {
    EventFile events(folder, 1);
    path = events.path();
    events.add_scalars(7, 1.5, {{"loss", 2.25}});
  }
  const std::string text = read_text(path);
  std::vector<std::string> records;
  for (size_t at = 0; at < text.size();) {
    uint64_t length = 0;
    ASSERT_LE(at + 12, text.size());
    std::memcpy(&length, text.data() + at, 8);
    ASSERT_LE(at + 16 + length, text.size());
    records.push_back(text.substr(at + 12, length));
    at += 16 + length;
  }
  ASSERT_EQ(records.size(), 3u);  // version, start, scalars
  EXPECT_NE(records[0].find("brain.Event:2"), std::string::npos);
  EXPECT_NE(records[2].find("loss"), std::string::npos);
}

}  // namespace
}  // namespace plumb
