// plumb init: a random checkpoint of a preset or of a config.json.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint/init.h"
#include "checkpoint/inspect.h"
#include "cli/commands.h"
#include "cli/write_options.h"
#include "config/presets.h"

namespace plumb::cli {
namespace {

struct Arguments {
  std::string model, out;
  uint64_t seed = 0;
  WriteArguments write;
};

void init(const Arguments& a) {
  const auto& names = preset_names();
  const bool named = std::find(names.begin(), names.end(), a.model) != names.end();
  const bool path = a.model.find('/') != std::string::npos || a.model.find('.') != std::string::npos;
  const ModelConfig config = !named && path ? load_model_config(a.model) : preset(a.model);
  const WriteReport report = init_checkpoint(config, a.out, a.seed, to_options(a.write));
  const ParameterCounts n = count_parameters(config);
  report_written(a.write, a.out, report,
                 fmt::format("{} parameters, seed {}", human_count(n.backbone + n.mtp), a.seed));
}

}  // namespace

std::function<void()> setup_init(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  app.add_option("model", a->model,
                 fmt::format("preset ({}), or a config.json or its folder", fmt::join(preset_names(), ", ")))
      ->required();
  app.add_option("out", a->out, "folder to write; must not exist")->required();
  app.add_option("--seed", a->seed, "the same seed gives the same weights");
  add_write_options(app, a->write, "keep: as config.json says");
  return [a] { init(*a); };
}

}  // namespace plumb::cli
