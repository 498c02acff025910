// plumb rl: reinforcement learning of an adapter.
#include "train/rl.h"

#include "cli/commands.h"
#include "cli/run_file.h"

namespace plumb::cli {

std::function<void()> setup_rl(CLI::App& app) { return setup_run(app, RunCommand::rl, run_rl); }

}  // namespace plumb::cli
