// The subcommands. One file each: it declares its options on a CLI::App and returns what to run once they are parsed.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace plumb::cli {

// Declares options on `app` (a fresh subcommand) and returns the function to run; it throws Error or UsageError, never
// exits.
using Setup = std::function<void()> (*)(CLI::App& app);

inline constexpr const char* kVersion = "0.1.0";

struct Command {
  const char* name;
  const char* summary;
  Setup setup;
};
const std::vector<Command>& commands();  // in the order of `plumb --help`

std::function<void()> setup_train(CLI::App& app);
std::function<void()> setup_dpo(CLI::App& app);
std::function<void()> setup_rl(CLI::App& app);
std::function<void()> setup_pretrain(CLI::App& app);
std::function<void()> setup_sample(CLI::App& app);
std::function<void()> setup_chat(CLI::App& app);
std::function<void()> setup_score(CLI::App& app);
std::function<void()> setup_serve(CLI::App& app);
std::function<void()> setup_watch(CLI::App& app);
std::function<void()> setup_init(CLI::App& app);
std::function<void()> setup_convert(CLI::App& app);
std::function<void()> setup_inspect(CLI::App& app);

// Parses argv, runs the subcommand, prints errors to stderr. -> exit code: 0 done, 1 failed, 2 wrong usage.
int run(int argc, char** argv);

}  // namespace plumb::cli
