// What the commands that read a run file have in common.
#pragma once
#include <functional>

#include "config/run_config.h"
#include "train/loop.h"

namespace CLI {
class App;
}

namespace plumb::cli {

// Declares FILE, --set and --json; the help lists the keys of the file. Ctrl-C (once) stops the run after the step in
// progress, with a checkpoint; a second one ends the program at once.
std::function<void()> setup_run(CLI::App& app, RunCommand command,
                                RunSummary (*run)(const RunConfig& config, const LoopHooks& hooks));

}  // namespace plumb::cli
