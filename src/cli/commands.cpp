#include "cli/commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/error.h"

namespace plumb::cli {

const std::vector<Command>& commands() {
  static const std::vector<Command> list = {
      {"train", "LoRA fine-tuning on a JSONL file (SFT)", setup_train},
      {"pretrain", "train every parameter of a small model", setup_pretrain},
      {"sample", "generate text once, or for every line of a file", setup_sample},
      {"chat", "talk to a model in the terminal", setup_chat},
      {"score", "per-token log-probabilities of given tokens, text or messages", setup_score},
      {"init", "write a random checkpoint of a preset or of a config.json", setup_init},
      {"convert", "rewrite a checkpoint or an adapter in another layout", setup_convert},
      {"inspect", "what a file or folder holds, and what is wrong with it", setup_inspect},
  };
  return list;
}

int run(int argc, char** argv) {
  CLI::App app{"plumb: fine-tunes and serves DeepSeek-V4 from one set of weights and kernels", "plumb"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "plumb 0.1.0");
  std::function<void()> action;
  for (const Command& c : commands()) {
    CLI::App* sub = app.add_subcommand(c.name, c.summary);
    sub->option_defaults()->always_capture_default();
    sub->parse_complete_callback([&action, run = c.setup(*sub)] { action = run; });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    action();
    return 0;
  } catch (const UsageError& e) {
    std::fprintf(stderr, "plumb: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "plumb: %s\n", e.what());
    return 1;
  }
}

}  // namespace plumb::cli
