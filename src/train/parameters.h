// What is trained: every parameter as an FP32 master with its gradient, and the way back into the model.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "model/forward.h"
#include "ops/parameters.h"

namespace plumb {

struct Parameter {
  std::string name;  // released name of a weight, or "layers.3.attn.wq_a.lora_a"
  Tensor master;     // f32: what the optimizer moves
  Tensor grad;       // f32, same shape: what backward passes add to
  int blocks = 0;  // > 0: a matrix of so many independent blocks of rows (Muon); 0: a vector, or the embedding, or the
                   // head (AdamW whatever the optimizer is), spec 9.1
  std::function<void()> write_back = {};  // puts the master into the model; empty: the model reads the master itself
};

// Model and parameters of a run. Holds pointers into itself: neither copied nor moved.
struct Trainee {
  std::shared_ptr<WeightStore> weights;
  std::shared_ptr<ResidentWeights> trained;  // all weights are trained; nullptr: only the adapter is
  std::shared_ptr<Adapter> adapter;          // LoRA, or nullptr; in the host's memory, see host_adapter
  AdapterGrads adapter_grads;
  AdapterBatch adapters;  // the adapter where the weights are, on all rows, gradients to adapter_grads
  Gradients gradients;
  std::vector<Parameter> parameters;                    // in the order of the forward pass
  std::vector<std::pair<std::string, Tensor>> buffers;  // state that no gradient moves: router biases
  std::vector<Tensor> gradient_memory;                  // what the gradients of the parameters consist of
  ops::ParameterTable on_device;                        // the gradients, if the parameters are on a device

  Trainee() = default;
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;
};

// Loads the weights of a run that trains an adapter, and puts them where model.kernels says; logs where that is.
std::shared_ptr<WeightStore> open_weights(const ModelKeys& model);

// A fresh adapter: A is uniform in +-1/sqrt(in) (Kaiming with a = sqrt 5), B is zero, so that it changes nothing yet
// (reference_trainer 3.1). Every tensor has a random stream of its own, named by layer and matrix: the values of one
// target do not depend on which others there are. Error: a target without any matrix in this model.
std::shared_ptr<Adapter> fresh_adapter(const ModelConfig& config, const LoraKeys& keys, uint64_t seed);

// A copy that shares no memory with the original, its file or anything else.
std::shared_ptr<Adapter> copy_adapter(const Adapter& from);
// The adapter that a run begins with: a fresh one, or a copy of the one in lora.init.
std::shared_ptr<Adapter> first_adapter(const RunConfig& config, const ModelConfig& model);

// Trains the adapter alone; the weights stay as they are. Where these are on a device, so are the adapter, its
// gradients and the optimizer's moments.
std::unique_ptr<Trainee> lora_trainee(std::shared_ptr<WeightStore> weights, std::shared_ptr<Adapter> adapter);

// Trains every weight. Weights in BF16, FP8 or FP4 stay in their format: the
// forward pass sees the rounded master, the gradient goes to the master as it is (straight-through). Tensors are copied
// first, since those of a loaded checkpoint are a read-only mapping of its file.
// What has no loss must be left out: weight decay would shrink it.
struct FullTraining {
  bool indexer = true, mtp = true;
};
std::unique_ptr<Trainee> full_trainee(std::shared_ptr<ResidentWeights> weights, const FullTraining& what);

// Trainee::adapter with the values that it has by now.
const std::shared_ptr<Adapter>& host_adapter(const Trainee& t);

void zero_gradients(Trainee& t);
// After the masters changed: puts them into the model.
void publish(Trainee& t);
int64_t parameter_count(const Trainee& t);

// sqrt of the sum of squares over all gradients, in double, in an order that depends on the shapes alone.
double gradient_norm(const Trainee& t);
// Name of the first parameter whose gradient has a NaN or an infinity; "" if there is none.
std::string find_bad_gradient(const Trainee& t);

}  // namespace plumb
