// The samples of a run: data.train and what is held out of it or read from data.eval.
#pragma once
#include <string>
#include <vector>

#include "config/model_config.h"
#include "config/run_config.h"
#include "data/dataset.h"

namespace plumb {

struct TrainingData {
  std::vector<Sample> train, eval;
  std::string format;  // of data.train
};

// Reads the files with the tokenizer.json of the model's folder; samples that were cut off or left out are logged as
// warnings. Errors: those of read_dataset; data.eval together with data.eval_fraction.
TrainingData load_training_data(const RunConfig& config, const ModelConfig& model);

std::vector<int> lengths_of(const std::vector<Sample>& samples);

}  // namespace plumb
