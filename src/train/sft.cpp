#include "train/sft.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "base/log.h"
#include "base/parallel.h"
#include "model/adapter_files.h"

namespace plumb {
void print_inputs(const RunConfig& config, const ModelConfig& model, const TrainingData& data) {
  auto line = [](const char* name, const std::string& text) { log_info("{:14} {}", name, text); };
  auto describe = [](const std::vector<Sample>& samples) {
    int64_t tokens = 0, trained = 0;
    for (const Sample& s : samples) tokens += static_cast<int64_t>(s.tokens.size()), trained += s.trained();
    return fmt::format("{} samples, {} tokens, {} of them trained", with_commas(static_cast<int64_t>(samples.size())),
                       with_commas(tokens), with_commas(trained));
  };
  line("model", fmt::format("{}: {} layers, hidden size {}, {} experts, numerics {}", config.model.path,
                            model.num_hidden_layers, model.hidden_size, model.n_routed_experts, config.model.numerics));
  line("data", fmt::format("{} ({}): {}", config.data.train, data.format, describe(data.train)));
  if (!data.eval.empty())
    line("evaluation",
         fmt::format("{}: {}", config.data.eval.empty() ? "held out" : config.data.eval, describe(data.eval)));
  line("output", config.output.dir);
}

RunSummary run_sft(const RunConfig& config, const LoopHooks& hooks) {
  if (config.machine.threads > 0) set_thread_count(static_cast<int>(config.machine.threads));
  const RunDirectory directory = open_run_directory(config);
  const std::shared_ptr<WeightStore> weights = open_weights(config.model);
  const ModelConfig& model = weights->config();
  const TrainingData data = load_training_data(config, model);
  const std::unique_ptr<Trainee> trainee = lora_trainee(weights, first_adapter(config, model));
  print_inputs(config, model, data);
  log_info("{:14} {} parameters: LoRA of rank {}, alpha {}, on {}", "trained", with_commas(parameter_count(*trainee)),
           trainee->adapter->rank, trainee->adapter->alpha, fmt::join(trainee->adapter->targets, ", "));
  return run_loop(config, *trainee, data, directory, hooks);
}

}  // namespace plumb
