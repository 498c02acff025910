#include "cli/write_options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/inspect.h"

namespace plumb::cli {
namespace {

// "12.3 of 159.6 GB, 1.9 GB/s, 78 s left", rewritten in place ten times a second.
class ProgressLine {
 public:
  void operator()(uint64_t done, uint64_t total) {
    const auto now = Clock::now();
    if (done < total && now - shown_ < std::chrono::milliseconds(100)) return;
    shown_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
    const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
    fmt::print(stderr, "\r\033[K{} of {}, {}/s, {:.0f} s left", human_bytes(static_cast<int64_t>(done)),
               human_bytes(static_cast<int64_t>(total)), human_bytes(static_cast<int64_t>(rate)), left);
    if (done == total) fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now(), shown_{};
};

}  // namespace

void add_write_options(CLI::App& app, WriteArguments& a, const std::string& keep_means) {
  app.add_option(
      "--layout", a.layout,
      "names: released; hf (files of transformers' save_pretrained); hf-state (its state_dict, experts stacked)");
  app.add_option("--format", a.format,
                 "weights: " + keep_means + "; fp32; bf16; fp8; released (FP8, routed experts FP4)");
  app.add_option("--shard-gb", a.shard_gb, "largest file, 10^9 bytes");
  app.add_flag("--json", a.json, "print the result as JSON");
}

WriteOptions to_options(const WriteArguments& a) {
  WriteOptions o;
  o.layout = parse_layout(a.layout);
  o.format = parse_target_format(a.format);
  if (!(a.shard_gb > 0 && a.shard_gb < 1e6))
    throw UsageError("--shard-gb", fmt::format("{} is no size", a.shard_gb), "give gigabytes, such as 5");
  o.max_shard_bytes = static_cast<uint64_t>(a.shard_gb * 1e9);
  if (::isatty(STDERR_FILENO)) o.progress = ProgressLine();
  return o;
}

void report_written(const WriteArguments& a, const std::string& out, const WriteReport& report,
                    const std::string& what) {
  if (a.json) {
    const nlohmann::ordered_json j = {
        {"out", out}, {"tensors", report.tensors}, {"bytes", report.bytes}, {"summary", what}};
    fmt::print("{}\n", j.dump());
  } else {
    fmt::print("{}: {} tensors, {}, {}\n", out, report.tensors, human_bytes(static_cast<int64_t>(report.bytes)), what);
  }
}

}  // namespace plumb::cli
