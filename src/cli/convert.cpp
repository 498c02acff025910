// plumb convert: a checkpoint or an adapter in another layout.
#include "checkpoint/convert.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/adapter.h"
#include "cli/commands.h"
#include "cli/write_options.h"

namespace plumb::cli {
namespace {

struct Arguments {
  std::string in, out, model;
  WriteArguments write;
  bool layout_given = false, format_given = false;
};

void convert_adapter(const Arguments& a) {
  if (a.model.empty())
    throw UsageError("--model", "is needed to convert an adapter", "give the base model's folder or config.json");
  if (a.format_given) throw UsageError("--format", "has no meaning for an adapter", "adapters keep their format");
  const AdapterLayout layout = parse_adapter_layout(a.layout_given ? a.write.layout : "peft");
  const ModelConfig config = load_model_config(a.model);
  const StoredAdapter adapter = read_adapter(a.in, config);
  write_adapter(a.out, adapter, config, layout);
  if (a.write.json) {
    const nlohmann::ordered_json j = {{"out", a.out}, {"layout", adapter_layout_name(layout)}, {"rank", adapter.rank}};
    fmt::print("{}\n", j.dump());
  } else {
    fmt::print("{}: adapter of rank {} in layout {}\n", a.out, adapter.rank, adapter_layout_name(layout));
  }
}

void convert(const Arguments& a) {
  if (std::filesystem::exists(std::filesystem::path(a.in) / "adapter_config.json")) return convert_adapter(a);
  const ConvertReport report = convert_checkpoint(a.in, a.out, to_options(a.write));
  report_written(a.write, a.out, report, fmt::format("layout {} -> {}", layout_name(report.from), a.write.layout));
}

}  // namespace

std::function<void()> setup_convert(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  app.add_option("in", a->in, "folder of a checkpoint or an adapter")->required();
  app.add_option("out", a->out, "folder to write; must not exist")->required();
  add_write_options(app, a->write, "keep");
  app.add_option("--model", a->model, "adapters: folder or config.json of the base model");
  app.footer("Layouts of adapters (--layout): peft (default), vllm, art, native.");
  return [a, &app] {
    a->layout_given = app.count("--layout") > 0;
    a->format_given = app.count("--format") > 0;
    convert(*a);
  };
}

}  // namespace plumb::cli
