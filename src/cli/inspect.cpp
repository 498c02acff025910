// plumb inspect: what a file or folder holds, and what is wrong with it.
#include "checkpoint/inspect.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"

namespace plumb::cli {

std::function<void()> setup_inspect(CLI::App& app) {
  struct Arguments {
    std::string path;
    bool deep = false, json = false;
  };
  auto a = std::make_shared<Arguments>();
  app.add_option("path", a->path, "folder of a checkpoint or an adapter, or a .safetensors file")->required();
  app.add_flag("--deep", a->deep, "also read the values: NaN, infinity, experts out of range");
  app.add_flag("--json", a->json, "print the result as JSON");
  app.footer("Exit code 1 if there is a problem.");
  return [a] {
    const Inspection i = inspect(a->path, a->deep);
    fmt::print("{}", a->json ? to_json(i).dump(1) + "\n" : to_text(i));
    if (i.problem_count > 0) fail(a->path, fmt::format("{} problems found", i.problem_count));
  };
}

}  // namespace plumb::cli
