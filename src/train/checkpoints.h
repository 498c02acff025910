// Checkpoints of a run: what is trained, in a layout that other programs read, and what is needed to go on from it with
// the same bits. DIR/checkpoints/step_000010 holds
//   adapter_model.safetensors, adapter_config.json    the adapter in PEFT's layout, or
//   config.json, model.safetensors, tokenizer.json    the whole model in the released layout, weights in their formats
//   trainer_state.safetensors                         FP32 masters, moments of the optimizer, router biases
//   trainer_state.json                                step, place in the data, what must not change
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "data/packing.h"
#include "train/optimizer.h"
#include "train/parameters.h"

namespace plumb {

struct TrainerState {
  int64_t step = 0;   // steps done
  int64_t rows = 0;   // rows used by them
  DataCursor cursor;  // next row
  // A run goes on only if these are what they were.
  std::string command;  // "train", "pretrain"
  std::string optimizer;
  int64_t seed = 0, row_tokens = 0;
  uint64_t data = 0;  // fingerprint of the training samples
};

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Writes `folder` whole or not at all. model_path: base of an adapter, source of tokenizer.json. extra: f32 tensors
// that a loop has to remember besides, under names of its own.
void write_checkpoint(const std::string& folder, const Trainee& trainee, const Optimizer& optimizer,
                      const TrainerState& state, const std::string& model_path, const NamedTensors& extra = {});

// Restores masters, moments, router biases and `extra` and publishes them. `expected` says what the run would start
// with (step, rows and cursor are ignored); a difference in what must not change is an Error, as is a parameter that is
// missing, superfluous or of another shape.
TrainerState read_checkpoint(const std::string& folder, Trainee& trainee, Optimizer& optimizer,
                             const TrainerState& expected, const NamedTensors& extra = {});

// "checkpoints/step_000010"
std::string checkpoint_name(int64_t step);
// The newest checkpoint below the run directory: its step, or nothing.
std::optional<int64_t> newest_checkpoint(const std::string& run_directory);
// Removes all but the newest `keep` ones, and what interrupted runs left half written.
void remove_old_checkpoints(const std::string& run_directory, int64_t keep);

}  // namespace plumb
