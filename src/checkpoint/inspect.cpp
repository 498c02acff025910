#include "checkpoint/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/float_formats.h"
#include "checkpoint/adapter.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

constexpr const char* group_names[] = {"embedding", "head",  "attention", "indexer", "routed experts", "shared experts",
                                       "router",    "norms", "mHC",       "MTP",     "not used",       "unknown"};

std::string group_of(const std::string& name) {
  const auto contains = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (name.starts_with("mtp.")) return "MTP";
  if (name == "embed.weight") return "embedding";
  if (name == "head.weight") return "head";
  if (contains("hc_")) return "mHC";
  if (contains(".experts.")) return "routed experts";
  if (contains(".shared_experts.")) return "shared experts";
  if (contains(".gate.")) return "router";
  if (contains(".indexer.")) return "indexer";
  if (contains(".attn.")) return "attention";
  return "norms";
}

std::string format_name(const StoredTensor& t) {
  if (t.dtype == DType::i8 || t.dtype == DType::u8) return "fp4";
  if (t.dtype == DType::f8_e4m3) return "fp8";
  return dtype_name(t.dtype);
}

void add(InspectedGroup& group, const StoredTensor& t, const std::string& format, int64_t parameters) {
  ++group.tensors;
  group.parameters += parameters;
  group.bytes += static_cast<int64_t>(t.bytes());
  group.formats[format] += static_cast<int64_t>(t.bytes());
}

// ---- Values (deep)
// ---------------------------------------------------------------------------------------------------

// Index of the first value that no weight may have, -1 if there is none.
int64_t find_bad_value(const Tensor& t, bool is_scale, int64_t experts) {
  const auto first = [&](auto bad) -> int64_t {
    for (int64_t i = 0; i < t.numel(); ++i)
      if (bad(i)) return i;
    return -1;
  };
  switch (t.dtype()) {
    case DType::f8_e8m0:
      return find_nan_scale(t);
    case DType::u8:
      return is_scale ? find_nan_scale(t) : -1;
    case DType::f8_e4m3:
      return first([p = t.ptr<uint8_t>()](int64_t i) { return (p[i] & 0x7f) == 0x7f; });
    case DType::f32:
      return first([p = t.f32()](int64_t i) { return !std::isfinite(p[i]); });
    case DType::bf16:
      return first([p = t.ptr<uint16_t>()](int64_t i) { return (p[i] & 0x7f80) == 0x7f80; });
    case DType::i64:
      return experts ? first([&, p = t.ptr<int64_t>()](int64_t i) { return p[i] < 0 || p[i] >= experts; }) : -1;
    case DType::i32:
      return experts ? first([&, p = t.ptr<int32_t>()](int64_t i) { return p[i] < 0 || p[i] >= experts; }) : -1;
    default:
      return -1;
  }
}

void check_values(Inspection& r, const Safetensors& files) {
  constexpr int64_t piece = 16 << 20;  // values at a time
  for (const StoredTensor& t : files.tensors()) {
    const std::string name = canonical_name(t.name);
    const bool is_scale = name.ends_with(".scale") || name.ends_with("_scale_inv");
    const int64_t experts = r.config && name.ends_with("tid2eid") ? r.config->n_routed_experts : 0;
    const int64_t count = numel_of(t.shape);
    for (int64_t begin = 0; begin < count; begin += piece) {
      const Tensor part = files.slice(t, begin, {std::min(piece, count - begin)});
      const int64_t at = find_bad_value(part, is_scale, experts);
      files.drop(part, t);
      if (at < 0) continue;
      if (r.problem_count++ < TensorMap::max_problems)
        r.problems.push_back({files.file_path(t) + ": " + t.name,
                              fmt::format("element {} of {} is {}", begin + at, to_string(t.shape),
                                          experts ? "no expert" : "NaN or infinite"),
                              "the checkpoint is damaged: download it again"});
      break;
    }
  }
}

// ---- The kinds of things
// ---------------------------------------------------------------------------------------------

void inspect_checkpoint(Inspection& r, const Safetensors& files) {
  const TensorMap map = map_tensors(*r.config, files);
  r.layout = layout_name(map.layout);
  r.extras = map.extras;
  r.problems = map.problems;
  r.problem_count = map.problem_count;
  if (r.config->num_nextn_predict_layers > 0 && !r.config->dspark && !map.entry.contains("mtp.0.norm.weight"))
    r.notes = {{"left out", "the files hold no MTP layer, config.json has one"}};
  std::map<std::string, InspectedGroup> groups;
  for (const StoredTensor& t : files.tensors()) {
    const std::string name = canonical_name(t.name);
    const bool is_scale = name.ends_with("_scale_inv") || name.ends_with(".scale");
    const bool stack = name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj");
    const bool extra = std::binary_search(r.extras.begin(), r.extras.end(), name);
    const bool known = is_scale || stack || extra || map.entry.contains(name);
    const bool table = name.ends_with("tid2eid");
    std::string format = format_name(t);
    if (is_scale) {
      const auto data = map.stored.find(name.ends_with(".scale") ? name.substr(0, name.size() - 5) + "weight"
                                                                 : name.substr(0, name.size() - 10));
      if (data != map.stored.end()) format = format_name(files.tensors()[data->second]);
    }
    const int64_t packed = !is_scale && format == "fp4" ? 2 : 1;
    const int64_t parameters = is_scale || table ? 0 : numel_of(t.shape) * packed;
    for (InspectedGroup* g : {&groups[extra ? "not used" : known ? group_of(name) : "unknown"], &r.total})
      add(*g, t, format, parameters);
  }
  for (const char* name : group_names)
    if (const auto g = groups.find(name); g != groups.end()) r.groups.emplace_back(*g);
}

void inspect_tensors(Inspection& r, const Safetensors& files) {
  std::map<std::string, InspectedGroup> groups;
  for (const StoredTensor& t : files.tensors())
    for (InspectedGroup* g : {&groups[dtype_name(t.dtype)], &r.total})
      add(*g, t, dtype_name(t.dtype), numel_of(t.shape));
  r.groups.assign(groups.begin(), groups.end());
}

void note_error(Inspection& r, const Error& e, const std::string& what) {
  r.problems.push_back({e.where(), what, e.fix()});
  ++r.problem_count;
}

// Error without its own "where: ... (fix)".
std::string bare(const Error& e) {
  std::string text = e.what();
  if (!e.where().empty()) text.erase(0, e.where().size() + 2);
  if (!e.fix().empty()) text.erase(text.size() - e.fix().size() - 3);
  return text;
}

// An adapter is checked against a model only when it is used; here its own consistency is.
void inspect_adapter(Inspection& r, const std::string& folder) {
  r.kind = "adapter";
  const AdapterSummary s = summarise_adapter(folder);
  r.layout = adapter_layout_name(s.layout);
  r.notes = {{"rank", std::to_string(s.rank)},
             {"alpha", fmt::format("{:g}", s.alpha)},
             {"base model", s.base_model},
             {"layers", std::to_string(s.layers)},
             {"targets", fmt::format("{}", fmt::join(s.targets, ", "))}};
}
}  // namespace

Inspection inspect(const std::string& path, bool deep) {
  Inspection r;
  r.path = path;
  r.deep = deep;
  const fs::path folder = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
  const bool adapter = fs::exists(folder / "adapter_config.json") &&
                       (fs::is_directory(path) || fs::path(path).filename() == "adapter_model.safetensors");
  Safetensors files = Safetensors::open(adapter ? (folder / "adapter_model.safetensors").string() : path);
  r.files = files.file_count();
  r.kind = "tensors";
  try {
    if (adapter) {
      inspect_adapter(r, folder.string());
    } else if (fs::exists(folder / "config.json") && (fs::is_directory(path) || path.ends_with(".json"))) {
      r.kind = "checkpoint";
      r.config = load_model_config(folder.string());
    }
  } catch (const Error& e) {
    note_error(r, e, bare(e));
  }
  r.config ? inspect_checkpoint(r, files) : inspect_tensors(r, files);
  if (deep) check_values(r, files);
  return r;
}

// ---- Printing
// --------------------------------------------------------------------------------------------------------

std::string human_count(int64_t n) {
  if (n >= 1'000'000'000) return fmt::format("{:.2f} B", static_cast<double>(n) * 1e-9);
  if (n >= 1'000'000) return fmt::format("{:.2f} M", static_cast<double>(n) * 1e-6);
  return std::to_string(n);
}

std::string human_bytes(int64_t n) {
  if (n >= 1'000'000'000) return fmt::format("{:.2f} GB", static_cast<double>(n) * 1e-9);
  if (n >= 1'000'000) return fmt::format("{:.2f} MB", static_cast<double>(n) * 1e-6);
  return fmt::format("{} B", n);
}

namespace {
std::string config_text(const ModelConfig& c) {
  int kinds[3] = {};
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) ++kinds[static_cast<int>(c.kind(layer))];
  const ParameterCounts n = count_parameters(c);
  std::string text = fmt::format("model        {} layers ({} window, {} csa, {} hca; {} with hash routing)",
                                 c.num_hidden_layers, kinds[0], kinds[1], kinds[2], c.num_hash_layers);
  if (c.num_nextn_predict_layers) text += fmt::format(" + {} MTP", c.num_nextn_predict_layers);
  if (c.dspark) text += " + DSpark drafter";
  text += fmt::format("\n             hidden {}, {} heads of {}, {} experts of {} ({} active), vocabulary {}\n",
                      c.hidden_size, c.num_attention_heads, c.head_dim, c.n_routed_experts, c.moe_intermediate_size,
                      c.num_experts_per_tok, c.vocab_size);
  text += fmt::format("parameters   {} by config.json, {} active for a token (without the input embedding), MTP {}\n",
                      human_count(n.backbone), human_count(n.active), human_count(n.mtp));
  return text;
}

std::string row(const std::string& name, const InspectedGroup& g) {
  std::string formats;
  for (const auto& [format, bytes] : g.formats) formats += fmt::format("{}{}", formats.empty() ? "" : " ", format);
  return fmt::format("{:<15} {:>9} {:>13} {:>13}  {}\n", name, g.tensors, human_count(g.parameters),
                     human_bytes(g.bytes), formats);
}

nlohmann::ordered_json group_json(const InspectedGroup& g) {
  nlohmann::ordered_json j = {{"tensors", g.tensors}, {"parameters", g.parameters}, {"bytes", g.bytes}};
  for (const auto& [format, bytes] : g.formats) j["bytes_by_format"][format] = bytes;
  return j;
}
}  // namespace

std::string to_text(const Inspection& i) {
  std::string text =
      fmt::format("{}\nkind         {}{}\nfiles        {}, {} tensors, {}\n", i.path, i.kind,
                  i.layout.empty() ? "" : ", layout " + i.layout, i.files, i.total.tensors, human_bytes(i.total.bytes));
  if (i.config) text += config_text(*i.config);
  for (const auto& [key, value] : i.notes) text += fmt::format("{:<12} {}\n", key, value);
  text += fmt::format("\n{:<15} {:>9} {:>13} {:>13}  {}\n", "", "tensors", "parameters", "bytes", "formats");
  for (const auto& [name, g] : i.groups) text += row(name, g);
  text += row("total", i.total) + "\n";
  if (!i.extras.empty()) text += fmt::format("not used     {} tensors, such as {}\n", i.extras.size(), i.extras[0]);
  if (i.problem_count == 0)
    return text + (i.deep ? "no problems, values read\n" : "no problems in headers (--deep reads the values, too)\n");
  text += fmt::format("{} problem{}:\n", i.problem_count, i.problem_count == 1 ? "" : "s");
  for (const Problem& p : i.problems)
    text += fmt::format("  {}: {}{}\n", p.where, p.what, p.fix.empty() ? "" : " (" + p.fix + ")");
  if (i.problem_count > i.problems.size()) text += fmt::format("  and {} more\n", i.problem_count - i.problems.size());
  return text;
}

nlohmann::ordered_json to_json(const Inspection& i) {
  nlohmann::ordered_json j = {{"path", i.path}, {"kind", i.kind}, {"layout", i.layout}, {"files", i.files}};
  if (i.config) {
    const ParameterCounts n = count_parameters(*i.config);
    j["config"] = to_json(*i.config);
    j["parameters"] = {{"backbone", n.backbone}, {"active", n.active}, {"mtp", n.mtp}};
  }
  for (const auto& [key, value] : i.notes) j["notes"][key] = value;
  j["total"] = group_json(i.total);
  for (const auto& [name, g] : i.groups) j["groups"][name] = group_json(g);
  j["not_used"] = i.extras;
  j["problem_count"] = i.problem_count;
  j["problems"] = nlohmann::ordered_json::array();
  for (const Problem& p : i.problems) j["problems"].push_back({{"where", p.where}, {"what", p.what}, {"fix", p.fix}});
  return j;
}

}  // namespace plumb
