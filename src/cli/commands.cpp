#include "cli/commands.h"

#include <algorithm>
#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/error.h"
#include "config/nearest.h"

namespace plumb::cli {

const std::vector<Command>& commands() {
  static const std::vector<Command> list = {
      {"train", "LoRA fine-tuning on a JSONL file (SFT)", setup_train},
      {"dpo", "LoRA fine-tuning on pairs of a better and a worse answer (DPO)", setup_dpo},
      {"rl", "LoRA reinforcement learning: sample, reward, train, repeat", setup_rl},
      {"pretrain", "train every parameter of a small model", setup_pretrain},
      {"sample", "generate text once, or for every line of a file", setup_sample},
      {"chat", "talk to a model in the terminal", setup_chat},
      {"serve", "answer HTTP requests: OpenAI's and Anthropic's protocols, a page to chat with", setup_serve},
      {"watch", "curves and samples of training runs in the browser, while they go on and afterwards", setup_watch},
      {"score", "per-token log-probabilities of given tokens, text or messages", setup_score},
      {"init", "write a random checkpoint of a preset or of a config.json", setup_init},
      {"convert", "rewrite a checkpoint or an adapter in another layout", setup_convert},
      {"inspect", "what a file or folder holds, and what is wrong with it", setup_inspect},
  };
  return list;
}

namespace {
// Prints the error and returns true if `name` is neither a command nor an option.
bool is_unknown_command(const std::string& name) {
  if (name.starts_with('-')) return false;
  std::vector<std::string> names;
  for (const Command& c : commands()) names.push_back(c.name);
  if (std::find(names.begin(), names.end(), name) != names.end()) return false;
  const std::string near = nearest(name, names);
  std::fprintf(stderr, "plumb: %s: is no command (%s)\n", name.c_str(),
               near.empty() ? "plumb --help lists them" : ("did you mean " + near + "?").c_str());
  return true;
}
}  // namespace

int run(int argc, char** argv) {
  CLI::App app{"plumb: fine-tunes and serves DeepSeek-V4 from one set of weights and kernels", "plumb"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("plumb ") + kVersion);
  std::function<void()> action;
  for (const Command& c : commands()) {
    CLI::App* sub = app.add_subcommand(c.name, c.summary);
    sub->option_defaults()->always_capture_default();
    sub->parse_complete_callback([&action, run = c.setup(*sub)] { action = run; });
  }
  if (argc > 1 && is_unknown_command(argv[1])) return 2;
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
