// plumb train: LoRA fine-tuning on a JSONL file.
#include "cli/commands.h"
#include "cli/run_file.h"
#include "train/sft.h"

namespace plumb::cli {

std::function<void()> setup_train(CLI::App& app) { return setup_run(app, RunCommand::train, run_sft); }

}  // namespace plumb::cli
