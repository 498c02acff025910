#include "checkpoint/stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/files.h"
#include "config/nearest.h"

namespace plumb {
namespace {

constexpr int64_t band_values = 8 << 20;  // values held at once: 32 MiB in FP32

bool scaled(Codec c) { return c == Codec::fp8 || c == Codec::fp4; }

Codec target_codec(const InventoryEntry& e, Codec stored, const ModelConfig& written, TargetFormat format) {
  if (format == TargetFormat::keep) return stored;
  if (format == TargetFormat::fp32) return Codec::f32;
  return released_codec(written, e.role);
}

// What the written config.json says of the formats.
ModelConfig written_config(ModelConfig config, TargetFormat format) {
  if (format == TargetFormat::fp32 || format == TargetFormat::bf16) config.expert_dtype = ExpertDtype::bf16;
  if (format == TargetFormat::fp8) config.expert_dtype = ExpertDtype::fp8;
  if (format == TargetFormat::released) config.expert_dtype = ExpertDtype::fp4;
  return config;
}

class Streamer {
 public:
  Streamer(const std::string& folder, const ModelConfig& config, const std::vector<InventoryEntry>& entries,
           const WeightSource& source, const std::vector<std::pair<std::string, Tensor>>& extras,
           const WriteOptions& options)
      : folder_(folder),
        config_(written_config(config, options.format)),
        entries_(entries),
        source_(source),
        extras_(extras),
        options_(options) {}

  WriteReport run() {
    validate(config_, "config.json of the result");
    for (const InventoryEntry& e : entries_) plan(e);
    for (const auto& [name, t] : extras_) specs_.push_back({name, t.dtype(), t.shape()});
    for (const TensorSpec& s : specs_) report_.bytes += s.bytes();
    report_.tensors = specs_.size();
    ShardedWriter writer(folder_, specs_, options_.max_shard_bytes);
    for (const TensorSpec& s : writer.specs()) write(writer, s);
    writer.commit();
    write_config();
    return report_;
  }

 private:
  // One stored tensor is one piece, or for stacked experts one piece an expert matrix, in order.
  struct Piece {
    const InventoryEntry* entry;
    bool scale;
  };

  void plan(const InventoryEntry& e) {
    if (e.role == Role::table) {
      const DType type = options_.format == TargetFormat::keep ? source_.table(e).dtype() : DType::i64;
      return add(e, spelled(e.name, options_.layout), type, e.shape, false);
    }
    const Codec codec = target_codec(e, source_.codec(e), config_, options_.format);
    Shape shape = e.shape, scale;
    if (scaled(codec)) {
      shape = data_shape(codec, e.shape[0], e.shape[1]);
      scale = scale_shape(codec, e.shape[0], e.shape[1]);
    }
    const auto stack = options_.layout == Layout::hf_state ? stacked_expert(e.name) : std::nullopt;
    if (stack && stack->parts > 1 && codec == Codec::fp8 && e.shape[0] % fp8_block != 0)
      fail(e.name, fmt::format("FP8 blocks of 128 rows would span gate and up projection ({} rows each)", e.shape[0]),
           "choose layout hf or released, or format bf16");
    add_stackable(e, e.name, stack, data_dtype(codec), shape, false);
    if (scaled(codec)) {
      const std::string name = scale_name(e.name);
      add_stackable(e, name, stack ? stacked_expert(name) : std::nullopt, DType::f8_e8m0, scale, true);
    }
  }

  void add_stackable(const InventoryEntry& e, const std::string& name, const std::optional<StackedExpert>& stack,
                     DType type, Shape shape, bool is_scale) {
    if (!stack) return add(e, spelled(name, options_.layout), type, std::move(shape), is_scale);
    const Shape whole = {config_.n_routed_experts, shape[0] * stack->parts, shape[1]};
    const std::string file_name = spelled(stack->tensor, options_.layout);
    if (stack->expert == 0 && stack->part == 0) return add(e, file_name, type, whole, is_scale);
    const auto first = std::find_if(specs_.rbegin(), specs_.rend(), [&](const auto& s) { return s.name == file_name; });
    if (first == specs_.rend() || first->dtype != type)
      fail(e.name, "is stored in another format than the other experts of its layer",
           "choose one format for all weights");
    pieces_[file_name].push_back({&e, is_scale});
  }

  void add(const InventoryEntry& e, const std::string& file_name, DType type, Shape shape, bool is_scale) {
    specs_.push_back({file_name, type, std::move(shape)});
    pieces_[file_name].push_back({&e, is_scale});
  }

  void write(ShardedWriter& writer, const TensorSpec& spec) {
    const auto pieces = pieces_.find(spec.name);
    if (pieces == pieces_.end()) {
      for (const auto& [name, t] : extras_)
        if (name == spec.name) writer.append(t);
    } else {
      for (const Piece& p : pieces->second) {
        if (p.scale)
          write_scale(writer, *p.entry);
        else if (p.entry->role == Role::table)
          write_table(writer, source_.table(*p.entry), spec.dtype);
        else
          write_data(writer, *p.entry);
      }
    }
    done_bytes_ += spec.bytes();
    if (options_.progress) options_.progress(done_bytes_, report_.bytes);
  }

  // Scales become known with the data; they wait for their own turn in the file.
  void write_data(ShardedWriter& writer, const InventoryEntry& e) {
    const Codec stored = source_.codec(e), codec = target_codec(e, stored, config_, options_.format);
    const int64_t rows = e.shape[0], width = numel_of(e.shape) / std::max<int64_t>(1, rows);
    const int64_t band = e.shape.size() == 1 ? rows : std::max<int64_t>(1, band_values / width / 128) * 128;
    std::string& scales = waiting_scales_[e.name];
    for (int64_t begin = 0; begin < rows; begin += band) {
      Weight w = source_.rows(e, begin, std::min(rows, begin + band));
      if (codec != stored) w = encode(decode(w), codec, e.name);
      writer.append(w.data);
      if (scaled(codec)) scales.append(reinterpret_cast<const char*>(w.scale.raw()), w.scale.bytes());
      source_.done(e);
    }
    if (!scaled(codec)) waiting_scales_.erase(e.name);
  }

  void write_scale(ShardedWriter& writer, const InventoryEntry& e) {
    const auto at = waiting_scales_.find(e.name);
    PLUMB_CHECK(at != waiting_scales_.end(), e.name);
    writer.append(at->second.data(), at->second.size());
    waiting_scales_.erase(at);
  }

  void write_table(ShardedWriter& writer, const Tensor& table, DType type) {
    if (table.dtype() == type) return writer.append(table);
    Tensor wide = Tensor::empty(table.shape(), DType::i64);
    std::copy_n(table.ptr<int32_t>(), table.numel(), wide.ptr<int64_t>());
    writer.append(wide);
  }

  // torch_dtype is what transformers loads unquantised weights as: the embedding's, so that a reload is exact.
  void write_config() {
    nlohmann::ordered_json json = to_json(config_);
    for (const TensorSpec& s : specs_)
      if (s.name == spelled("embed.weight", options_.layout))
        json["torch_dtype"] = s.dtype == DType::f32 ? "float32" : "bfloat16";
    write_text(folder_ + "/config.json", json.dump(2) + "\n");
  }

  const std::string& folder_;
  const ModelConfig config_;
  const std::vector<InventoryEntry>& entries_;
  const WeightSource& source_;
  const std::vector<std::pair<std::string, Tensor>>& extras_;
  const WriteOptions& options_;
  std::vector<TensorSpec> specs_;
  std::unordered_map<std::string, std::vector<Piece>> pieces_;
  std::map<std::string, std::string> waiting_scales_;
  WriteReport report_;
  uint64_t done_bytes_ = 0;
};
}  // namespace

TargetFormat parse_target_format(const std::string& name) {
  const std::vector<std::string> names = {"keep", "fp32", "bf16", "fp8", "released"};
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<TargetFormat>(at - names.begin());
  const std::string guess = nearest(name, names);
  throw UsageError("format", "'" + name + "' is none of keep, fp32, bf16, fp8, released",
                   guess.empty() ? "" : "did you mean " + guess + "?");
}

WriteReport stream_checkpoint(const std::string& folder, const ModelConfig& config,
                              const std::vector<InventoryEntry>& entries, const WeightSource& source,
                              const std::vector<std::pair<std::string, Tensor>>& extras, const WriteOptions& options) {
  return Streamer(folder, config, entries, source, extras, options).run();
}

}  // namespace plumb
