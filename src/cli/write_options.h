// Options that init and convert have in common, and what they print.
#pragma once
#include <string>

#include "checkpoint/stream.h"

namespace CLI {
class App;
}

namespace plumb::cli {

struct WriteArguments {
  std::string layout = "released", format = "keep";
  double shard_gb = 5;  // 10^9 bytes
  bool json = false;
};
void add_write_options(CLI::App& app, WriteArguments& a, const std::string& keep_means);

// With a progress line on stderr if that is a terminal. UsageError: unknown layout or format, shard size not positive.
WriteOptions to_options(const WriteArguments& a);

// "out: 1,234 tensors, 5.1 GB, <what>" or, with --json, an object {out, tensors, bytes, summary}.
void report_written(const WriteArguments& a, const std::string& out, const WriteReport& report,
                    const std::string& what);

}  // namespace plumb::cli
