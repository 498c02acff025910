#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <unordered_set>

#include "base/error.h"
#include "base/float_formats.h"
#include "config/nearest.h"

namespace plumb {
namespace {

// ---- Matching files against the inventory
// ----------------------------------------------------------------------------

class Mapper {
 public:
  Mapper(const ModelConfig& config, const Safetensors& files) : config_(config), files_(files) {}

  TensorMap run() {
    index_names();
    map_.entries = inventory(config_);
    drop_absent_mtp();
    used_.resize(files_.tensors().size());
    for (size_t i = 0; i < map_.entries.size(); ++i) {
      map_.entry[map_.entries[i].name] = static_cast<int>(i);
      check(map_.entries[i]);
    }
    for (size_t i = 0; i < used_.size(); ++i)
      if (!used_[i]) unused(files_.tensors()[i]);
    return std::move(map_);
  }

 private:
  void problem(std::string where, std::string what, std::string fix) {
    if (!reported_.insert(where).second) return;  // a stack is met once for each expert
    if (map_.problem_count++ < TensorMap::max_problems)
      map_.problems.push_back({std::move(where), std::move(what), std::move(fix)});
  }
  std::string place(const StoredTensor& t) const { return files_.file_path(t) + ": " + t.name; }

  void index_names() {
    for (size_t i = 0; i < files_.tensors().size(); ++i) {
      const StoredTensor& t = files_.tensors()[i];
      map_.layout = std::max(map_.layout, layout_of(t.name));
      const auto [at, fresh] = map_.stored.emplace(canonical_name(t.name), i);
      if (!fresh)
        problem(place(t), "is the same tensor as " + files_.tensors()[at->second].name, "remove one of the two");
    }
  }

  // A checkpoint may leave out an MTP layer as a whole, as Hugging Face files do; half a layer is an error.
  void drop_absent_mtp() {
    std::unordered_set<std::string> present;
    for (const auto& [name, index] : map_.stored)
      if (name.starts_with("mtp.")) present.insert(name.substr(0, name.find('.', 4)));
    std::erase_if(map_.entries, [&](const InventoryEntry& e) {
      return e.name.starts_with("mtp.") && !present.contains(e.name.substr(0, e.name.find('.', 4)));
    });
  }

  // The stored tensor for a canonical name, which may be part of a stack; marks it as used. Null if there is none.
  const StoredTensor* take(const std::string& name, std::optional<StackedExpert>& stack) {
    stack.reset();
    auto at = map_.stored.find(name);
    if (at == map_.stored.end()) {
      stack = stacked_expert(name);
      if (stack) at = map_.stored.find(stack->tensor);
    }
    if (at == map_.stored.end()) return nullptr;
    used_[at->second] = true;
    return &files_.tensors()[at->second];
  }

  Shape stack_shape(const std::optional<StackedExpert>& stack, Shape shape) const {
    if (stack) shape = {config_.n_routed_experts, shape[0] * stack->parts, shape[1]};
    return shape;
  }

  void check(const InventoryEntry& e) {
    std::optional<StackedExpert> stack;
    const StoredTensor* t = take(e.name, stack);
    if (!t) {
      const std::string name = map_.layout == Layout::hf_state && stack ? stack->tensor : e.name;
      return problem(files_.path() + ": " + name, fmt::format("is missing, shape {} expected", to_string(e.shape)),
                     "the checkpoint is incomplete, or config.json belongs to another one");
    }
    if (!dtype_fits(t->dtype, e.role))
      return problem(place(*t),
                     fmt::format("dtype {} found, {} expected", safetensors_dtype(t->dtype), expected(e.role)),
                     "convert it with the program that wrote it");
    Shape shape = e.shape;
    Codec codec = Codec::f32;
    if (e.role == Role::linear || e.role == Role::expert) {
      codec = codec_of(t->dtype);
      shape = data_shape(codec, e.shape[0], e.shape[1]);
    }
    shape = stack_shape(stack, shape);
    if (t->shape != shape)
      return problem(place(*t), fmt::format("shape {} expected, {} found", to_string(shape), to_string(t->shape)),
                     "config.json and weights are of different models");
    if (codec == Codec::fp8 || codec == Codec::fp4) check_scale(e, *t, codec);
  }

  void check_scale(const InventoryEntry& e, const StoredTensor& data, Codec codec) {
    std::optional<StackedExpert> stack;
    const StoredTensor* t = take(scale_name(e.name), stack);
    if (!t)
      return problem(place(data),
                     fmt::format("is {}, but its scale {} is missing", codec_name(codec), scale_name(e.name)),
                     "download the checkpoint again, or convert it with the program that wrote it");
    if (t->dtype != DType::f8_e8m0 && t->dtype != DType::u8 && t->dtype != DType::f32)
      return problem(place(*t),
                     fmt::format("scale of dtype {} found, F8_E8M0, U8 or F32 expected", safetensors_dtype(t->dtype)),
                     "convert it with the program that wrote it");
    Shape shape = scale_shape(codec, e.shape[0], e.shape[1]);
    if (stack && codec == Codec::fp8 && e.shape[0] % fp8_block != 0 && stack->parts > 1)
      return problem(
          place(*t),
          fmt::format("blocks of 128 rows span gate and up projection (moe_intermediate_size {})", e.shape[0]),
          "use a layout with separate experts");
    shape = stack_shape(stack, shape);
    if (t->shape != shape)
      problem(place(*t), fmt::format("shape {} expected, {} found", to_string(shape), to_string(t->shape)),
              "scales cover 128x128 blocks in FP8, 32 inputs in FP4");
  }

  static bool dtype_fits(DType t, Role role) {
    if (role == Role::table) return t == DType::i64 || t == DType::i32;
    if (t == DType::f32 || t == DType::bf16) return true;
    return (role == Role::linear || role == Role::expert) && (t == DType::f8_e4m3 || t == DType::i8 || t == DType::u8);
  }
  static const char* expected(Role role) {
    if (role == Role::table) return "I64 or I32";
    return role == Role::linear || role == Role::expert ? "F32, BF16, F8_E4M3 or I8" : "F32 or BF16";
  }

  void unused(const StoredTensor& t) {
    const std::string name = canonical_name(t.name);
    if (is_extra_mtp(name, config_)) return map_.extras.push_back(name);
    if (known_.empty())
      for (const TensorSpec& spec : released_tensors(config_)) known_.push_back(spec.name);
    if (++guesses_ > 3) return problem(place(t), "is no tensor of this model", "remove it, or check config.json");
    const std::string guess = nearest(name, known_);  // takes a moment among 10^5 names
    const bool scale = guess == name;  // a known name that nothing asked for: the scale of a weight that has none
    problem(place(t), scale ? "is the scale of a tensor that is not quantised" : "is no tensor of this model",
            scale || guess.empty() ? "remove it, or check config.json" : "the nearest known name is " + guess);
  }

  const ModelConfig& config_;
  const Safetensors& files_;
  TensorMap map_;
  std::vector<bool> used_;
  std::unordered_set<std::string> reported_;
  std::vector<std::string> known_;  // for guesses at unknown names
  int guesses_ = 0;
};
}  // namespace

TensorMap map_tensors(const ModelConfig& config, const Safetensors& files) { return Mapper(config, files).run(); }

void fail_with(const std::vector<Problem>& problems, size_t count) {
  const Problem& p = problems.at(0);
  fail(p.where, p.what + (count > 1 ? fmt::format(" (and {} more problems)", count - 1) : ""), p.fix);
}

// ---- Access
// ----------------------------------------------------------------------------------------------------------

Checkpoint Checkpoint::open(const std::string& folder) {
  Checkpoint c;
  c.config_ = load_model_config(folder);
  c.files_ = Safetensors::open(folder);
  c.map_ = map_tensors(c.config_, c.files_);
  if (c.map_.problem_count > 0) fail_with(c.map_.problems, c.map_.problem_count);
  return c;
}

const InventoryEntry& Checkpoint::entry(const std::string& name) const {
  const auto at = map_.entry.find(name);
  if (at == map_.entry.end())
    fail(path() + ": " + name, "is not in this checkpoint",
         name.starts_with("mtp.") ? "use a checkpoint with its MTP layers" : "");
  return map_.entries[at->second];
}

const StoredTensor* Checkpoint::locate(const std::string& canonical, StackedExpert& stack) const {
  stack = {};
  auto at = map_.stored.find(canonical);
  if (at == map_.stored.end()) {
    const auto stacked = stacked_expert(canonical);
    PLUMB_CHECK(stacked, canonical);
    stack = *stacked;
    at = map_.stored.find(stack.tensor);
  }
  return &files_.tensors()[at->second];
}

Tensor Checkpoint::part(const std::string& canonical, const Shape& shape, const StoredTensor** stored) const {
  StackedExpert stack;
  const StoredTensor* t = locate(canonical, stack);
  if (stored) *stored = t;
  return files_.slice(*t, (int64_t{stack.expert} * stack.parts + stack.part) * numel_of(shape), shape);
}

Tensor Checkpoint::scale(const std::string& name, const Shape& shape) const {
  const StoredTensor* stored;
  Tensor t = part(name, shape, &stored);
  const std::string where = files_.file_path(*stored) + ": " + name;
  if (t.dtype() == DType::f32) {  // the -Base releases keep powers of two in FP32
    Tensor codes = Tensor::empty(shape, DType::f8_e8m0);
    for (int64_t i = 0; i < t.numel(); ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(t.f32()[i]);
      if (bits & 0x807fffffu || bits == 0 || bits == 0x7f800000u)
        fail(where, fmt::format("scale {} at [{},{}] is no power of two", t.f32()[i], i / shape[1], i % shape[1]),
             "convert the checkpoint to BF16 with the program that wrote it");
      codes.ptr<uint8_t>()[i] = pow2_to_e8m0(t.f32()[i]);
    }
    return codes;
  }
  if (const int64_t i = find_nan_scale(t); i >= 0)
    fail(where, fmt::format("scale at [{},{}] is NaN (code 255)", i / shape[1], i % shape[1]),
         "the checkpoint is damaged: download it again");
  return t;
}

Codec Checkpoint::codec(const std::string& name) const {
  entry(name);
  StackedExpert stack;
  return codec_of(locate(name, stack)->dtype);
}

Tensor Checkpoint::extra(const std::string& name) const {
  const auto at = map_.stored.find(name);
  PLUMB_CHECK(at != map_.stored.end(), name);
  return files_.tensor(files_.tensors()[at->second]);
}

Weight Checkpoint::weight(const std::string& name) const {
  const InventoryEntry& e = entry(name);
  if (e.role != Role::linear && e.role != Role::expert) return {part(name, e.shape), {}};
  const Codec codec = this->codec(name);
  Weight w{part(name, data_shape(codec, e.shape[0], e.shape[1])), {}};
  if (codec == Codec::fp8 || codec == Codec::fp4)
    w.scale = scale(scale_name(name), scale_shape(codec, e.shape[0], e.shape[1]));
  return w;
}

Tensor Checkpoint::table(const std::string& name) const {
  const InventoryEntry& e = entry(name);
  PLUMB_CHECK(e.role == Role::table, name);
  const StoredTensor* stored;
  const Tensor t = part(name, e.shape, &stored);
  Tensor ids = Tensor::empty(e.shape, DType::i32);
  for (int64_t i = 0; i < t.numel(); ++i) {
    const int64_t id = t.dtype() == DType::i64 ? t.ptr<int64_t>()[i] : t.ptr<int32_t>()[i];
    if (id < 0 || id >= config_.n_routed_experts)
      fail(files_.file_path(*stored) + ": " + name,
           fmt::format("token {} is sent to expert {}, there are {}", i / e.shape[1], id, config_.n_routed_experts),
           "the checkpoint is damaged, or config.json belongs to another one");
    ids.ptr<int32_t>()[i] = static_cast<int32_t>(id);
  }
  return ids;
}

void Checkpoint::drop(const std::string& name) const {
  const InventoryEntry& e = entry(name);
  const StoredTensor* stored;
  const bool packable = e.role == Role::linear || e.role == Role::expert;
  const Codec codec = packable ? this->codec(name) : Codec::f32;
  const Tensor data = part(name, packable ? data_shape(codec, e.shape[0], e.shape[1]) : e.shape, &stored);
  files_.drop(data, *stored);
  if (codec != Codec::fp8 && codec != Codec::fp4) return;
  const Tensor scale = part(scale_name(name), scale_shape(codec, e.shape[0], e.shape[1]), &stored);
  files_.drop(scale, *stored);
}

}  // namespace plumb
