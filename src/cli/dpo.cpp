// plumb dpo: direct preference optimization of an adapter.
#include "train/dpo.h"

#include "cli/commands.h"
#include "cli/run_file.h"

namespace plumb::cli {

std::function<void()> setup_dpo(CLI::App& app) { return setup_run(app, RunCommand::dpo, run_dpo); }

}  // namespace plumb::cli
