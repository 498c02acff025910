// plumb pretrain: every weight of a model is trained.
#include "train/pretrain.h"
#include "cli/commands.h"
#include "cli/run_file.h"

namespace plumb::cli {

std::function<void()> setup_pretrain(CLI::App& app) { return setup_run(app, RunCommand::pretrain, run_pretrain); }

}  // namespace plumb::cli
