#include "train/checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "checkpoint/adapter.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stream.h"
#include "model/adapter_files.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

// Everything that a run has to remember, under unique names; the tensors share memory with their owners.
NamedTensors remembered(const Trainee& trainee, const Optimizer& optimizer, const NamedTensors& extra) {
  NamedTensors list = extra;
  for (const Parameter& p : trainee.parameters) list.emplace_back("master." + p.name, p.master);
  for (auto& moment : optimizer.state(trainee)) list.push_back(std::move(moment));
  for (const auto& [name, tensor] : trainee.buffers) list.emplace_back("buffer." + name, tensor);
  return list;
}

// ---- The model ------------------------------------------------------------------------------------------------------

// The weights in memory as the source of a checkpoint.
class MemorySource : public WeightSource {
 public:
  explicit MemorySource(ResidentWeights& w) {
    const Collect index{*this};
    OuterGrads outer;
    visit_outer(w.outer_weights, outer, index);
    for (size_t layer = 0; layer < w.layers.size(); ++layer) {
      LayerGrads none;
      visit_layer(fmt::format("layers.{}.", layer), w.model.is_hash_layer(static_cast<int>(layer)), w.layers[layer],
                  none, index);
    }
    for (size_t j = 0; j < w.mtps.size(); ++j) {
      MtpGrads none;
      visit_mtp(fmt::format("mtp.{}.", j), w.mtps[j], none, index);
    }
  }
  bool has(const std::string& name) const { return weights_.contains(name); }
  Codec codec(const InventoryEntry& e) const override { return codec_of(weights_.at(e.name).data.dtype()); }
  Weight rows(const InventoryEntry& e, int64_t begin, int64_t end) const override {
    const Weight& w = weights_.at(e.name);
    const Codec c = codec_of(w.data.dtype());
    Weight part{w.data.rows(begin, end), {}};
    if (c == Codec::fp8) part.scale = w.scale.rows(begin / fp8_block, (end + fp8_block - 1) / fp8_block);
    if (c == Codec::fp4) part.scale = w.scale.rows(begin, end);
    return part;
  }
  Tensor table(const InventoryEntry& e) const override {  // i64, as the released files have it
    const Tensor& from = weights_.at(e.name).data;
    Tensor t = Tensor::empty(from.shape(), DType::i64);
    std::copy(from.ptr<int32_t>(), from.ptr<int32_t>() + from.numel(), t.ptr<int64_t>());
    return t;
  }

 private:
  struct Collect {
    MemorySource& to;
    void operator()(const std::string& name, Linear& w, Tensor&) const { to.weights_[name] = {w.data, w.scale}; }
    void operator()(const std::string& name, Tensor& w, Tensor&) const { to.weights_[name] = {w, {}}; }
    void buffer(const std::string& name, Tensor& b) const { to.weights_[name] = {b, {}}; }
  };
  std::unordered_map<std::string, Weight> weights_;
};

void write_model(const std::string& folder, ResidentWeights& weights, const std::string& model_path) {
  const MemorySource source(weights);
  std::vector<InventoryEntry> entries = inventory(weights.model);
  std::erase_if(entries, [&](const InventoryEntry& e) { return !source.has(e.name); });  // no MTP layer
  stream_checkpoint(folder, weights.model, entries, source, {}, {});
  const fs::path tokenizer = fs::path(model_path) / "tokenizer.json";
  if (fs::exists(tokenizer)) write_text(folder + "/tokenizer.json", read_text(tokenizer));
}

// ---- Step, place, what must not change ------------------------------------------------------------------------------

nlohmann::ordered_json to_json(const TrainerState& s) {
  return {{"step", s.step},
          {"rows", s.rows},
          {"cursor", {{"epoch", s.cursor.epoch}, {"row", s.cursor.row}}},
          {"command", s.command},
          {"optimizer", s.optimizer},
          {"seed", s.seed},
          {"row_tokens", s.row_tokens},
          {"data", fmt::format("{:016x}", s.data)}};
}

TrainerState state_from_json(const nlohmann::ordered_json& j, const std::string& file) {
  TrainerState s;
  try {
    s.step = j.at("step").get<int64_t>();
    s.rows = j.at("rows").get<int64_t>();
    s.cursor = {j.at("cursor").at("epoch").get<int64_t>(), j.at("cursor").at("row").get<int64_t>()};
    s.command = j.at("command").get<std::string>();
    s.optimizer = j.at("optimizer").get<std::string>();
    s.seed = j.at("seed").get<int64_t>();
    s.row_tokens = j.at("row_tokens").get<int64_t>();
    s.data = std::stoull(j.at("data").get<std::string>(), nullptr, 16);
  } catch (const std::exception& e) {
    fail(file, std::string("is no trainer state: ") + e.what(), "remove this checkpoint to go on from an older one");
  }
  return s;
}

void require_same(const TrainerState& found, const TrainerState& expected, const std::string& file) {
  auto compare = [&](const std::string& what, const auto& was, const auto& is) {
    if (was != is)
      fail(file, fmt::format("{} was {} and is now {}", what, was, is),
           "a run goes on only with the same data and seed: change it back, or choose another output.dir");
  };
  compare("the command", found.command, expected.command);
  compare("pretrain.optimizer", found.optimizer, expected.optimizer);
  compare("train.seed", found.seed, expected.seed);
  compare("data.row_tokens", found.row_tokens, expected.row_tokens);
  compare("the fingerprint of the training data", fmt::format("{:016x}", found.data),
          fmt::format("{:016x}", expected.data));
}

std::optional<int64_t> step_of(const std::string& folder_name) {
  const std::string prefix = "step_";
  int64_t step = 0;
  if (!folder_name.starts_with(prefix)) return {};
  const char* end = folder_name.data() + folder_name.size();
  const auto [at, error] = std::from_chars(folder_name.data() + prefix.size(), end, step);
  return error == std::errc() && at == end ? std::optional(step) : std::nullopt;
}

}  // namespace

void write_checkpoint(const std::string& folder, const Trainee& trainee, const Optimizer& optimizer,
                      const TrainerState& state, const std::string& model_path, const NamedTensors& extra) {
  FolderWriter out(folder);
  if (trainee.adapter)
    write_adapter(out.partial(), stored_from(*host_adapter(trainee), trainee.weights->config(), model_path),
                  trainee.weights->config(), AdapterLayout::peft);
  else
    write_model(out.partial(), *trainee.trained, model_path);
  NamedTensors list = remembered(trainee, optimizer, extra);
  for (auto& [name, tensor] : list)
    if (tensor.on_device()) tensor = to_host(tensor);
  write_safetensors(out.partial() + "/trainer_state.safetensors", list);
  write_text(out.partial() + "/trainer_state.json", to_json(state).dump(2) + "\n");
  out.commit();
}

TrainerState read_checkpoint(const std::string& folder, Trainee& trainee, Optimizer& optimizer,
                             const TrainerState& expected, const NamedTensors& extra) {
  const std::string json_file = folder + "/trainer_state.json", file = folder + "/trainer_state.safetensors";
  const TrainerState state = state_from_json(read_json_file(json_file), json_file);
  require_same(state, expected, json_file);
  const Safetensors stored = Safetensors::open(file);
  const NamedTensors wanted = remembered(trainee, optimizer, extra);
  const char* fix = "the checkpoint is of another model, adapter or set of targets: choose another output.dir";
  for (const auto& [name, to] : wanted) {
    const StoredTensor* from = stored.find(name);
    if (!from) fail(file, "has no tensor " + name, fix);
    if (from->shape != to.shape() || from->dtype != DType::f32)
      fail(file, fmt::format("{}: shape {} expected, {} found", name, to_string(to.shape()), to_string(from->shape)),
           fix);
    copy_bytes(to, stored.tensor(*from));
  }
  if (stored.tensors().size() != wanted.size())
    fail(file, fmt::format("holds {} tensors, the run has {}", stored.tensors().size(), wanted.size()), fix);
  publish(trainee);
  return state;
}

std::string checkpoint_name(int64_t step) { return fmt::format("checkpoints/step_{:06}", step); }

std::optional<int64_t> newest_checkpoint(const std::string& run_directory) {
  std::optional<int64_t> newest;
  const fs::path folder = fs::path(run_directory) / "checkpoints";
  if (!fs::is_directory(folder)) return newest;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto step = step_of(entry.path().filename()); step && (!newest || *step > *newest)) newest = step;
  return newest;
}

void remove_old_checkpoints(const std::string& run_directory, int64_t keep) {
  const fs::path folder = fs::path(run_directory) / "checkpoints";
  if (!fs::is_directory(folder)) return;
  std::map<int64_t, fs::path, std::greater<>> by_step;
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (const auto step = step_of(entry.path().filename()))
      by_step[*step] = entry.path();
    else if (entry.path().extension() == ".partial")
      leftovers.push_back(entry.path());
  }
  int64_t place = 0;
  for (const auto& [step, path] : by_step) {
    if (place++ < keep) continue;
    fs::path doomed = path;
    doomed += ".partial";  // renamed first: an interrupted removal must not leave what looks like a checkpoint
    fs::rename(path, doomed);
    leftovers.push_back(doomed);
  }
  for (const fs::path& path : leftovers) fs::remove_all(path);
}

}  // namespace plumb
