#include "train/pretrain.h"

#include "base/error.h"
#include "base/log.h"
#include "base/parallel.h"
#include "train/sft.h"

namespace plumb {

RunSummary run_pretrain(const RunConfig& config, const LoopHooks& hooks) {
  if (config.machine.threads > 0) set_thread_count(static_cast<int>(config.machine.threads));
  const RunDirectory directory = open_run_directory(config);
  std::shared_ptr<ResidentWeights> weights = load_weights(Checkpoint::open(config.model.path));
  if (weights->mtp_count() > 1)
    fail(config.model.path, "has " + std::to_string(weights->mtp_count()) + " MTP layers, one can be trained",
         "set num_nextn_predict_layers to 1 or 0");
  const TrainingData data = load_training_data(config, weights->model);
  const FullTraining what{config.pretrain.indexer_loss_coeff > 0, config.pretrain.mtp_loss_weight > 0};
  const std::unique_ptr<Trainee> trainee = full_trainee(weights, what);
  print_inputs(config, weights->model, data);
  log_info("{:14} {} parameters: every weight{}{}", "trained", with_commas(parameter_count(*trainee)),
           what.indexer ? "" : " but the indexers", what.mtp || weights->mtps.empty() ? "" : ", without the MTP layer");
  return run_loop(config, *trainee, data, directory, hooks);
}

}  // namespace plumb
