#include "checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/json.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t max_header_bytes = 100'000'000;  // the limit of the reference implementation
constexpr const char* download_again = "the file is damaged: copy or download it again";

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr DTypeName dtype_names[] = {
    {"F32", DType::f32},         {"F64", DType::f64},         {"BF16", DType::bf16}, {"F16", DType::f16},
    {"F8_E4M3", DType::f8_e4m3}, {"F8_E8M0", DType::f8_e8m0}, {"U8", DType::u8},     {"I8", DType::i8},
    {"I32", DType::i32},         {"I64", DType::i64},
};

DType parse_dtype(const std::string& name, const std::string& where) {
  for (const DTypeName& d : dtype_names)
    if (name == d.name) return d.dtype;
  fail(where, "dtype " + name + " is not known", "convert the tensor to one of F32, BF16, F8_E4M3, I8, I64");
}

// ---- One header
// ------------------------------------------------------------------------------------------------------

uint64_t header_number(const json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned()) fail(where, fmt::format("{} {} is no size", what, value.dump()), download_again);
  return value.get<uint64_t>();
}

// `entry` = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}; data starts at data_begin in a file of
// `file_size` bytes.
StoredTensor parse_entry(const std::string& name, const json& entry, const MappedFile& file, uint64_t data_begin) {
  const std::string where = file.path() + ": " + name;
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!entry.is_object() || !entry.contains(key)) fail(where, fmt::format("has no {}", key), download_again);
  const json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2)
    fail(where, "has a header entry of the wrong form: " + entry.dump(), download_again);
  StoredTensor t;
  t.name = name;
  t.dtype = parse_dtype(dtype.get<std::string>(), where);
  uint64_t bytes = dtype_size(t.dtype);
  for (const json& s : shape) {
    const uint64_t size = header_number(s, where, "shape entry");
    if (__builtin_mul_overflow(bytes, size, &bytes) || bytes > uint64_t{1} << 60)
      fail(where, "shape " + shape.dump() + " is too large", download_again);
    t.shape.push_back(static_cast<int64_t>(size));
  }
  const uint64_t begin = header_number(offsets[0], where, "offset"), end = header_number(offsets[1], where, "offset");
  const uint64_t available = file.size() - data_begin;
  if (end < begin || end - begin != bytes)
    fail(where,
         fmt::format("{} {} takes {} bytes, the header gives the range {}..{}", safetensors_dtype(t.dtype),
                     to_string(t.shape), bytes, begin, end),
         download_again);
  if (end > available)
    fail(where, fmt::format("data ends at byte {}, the file has {} bytes of data: it is truncated", end, available),
         download_again);
  t.begin = data_begin + begin;
  return t;
}

void check_ranges(std::vector<StoredTensor> tensors, const MappedFile& file, uint64_t data_begin) {
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.bytes()) < std::pair(b.begin, b.bytes());
  });
  uint64_t expected = data_begin;
  const std::string* before = nullptr;
  for (const StoredTensor& t : tensors) {
    if (t.begin < expected) fail(file.path() + ": " + t.name, "data overlaps with that of " + *before, download_again);
    if (t.begin > expected)
      fail(file.path() + ": " + t.name, fmt::format("a gap of {} bytes lies before its data", t.begin - expected),
           download_again);
    expected = t.begin + t.bytes();
    before = &t.name;
  }
  if (expected != file.size())
    fail(file.path(), fmt::format("{} bytes follow the last tensor", file.size() - expected), download_again);
}

// Reads the header of `file` entry by entry, so that no document of the whole header is ever in memory.
std::vector<StoredTensor> parse_header(const MappedFile& file, Metadata& metadata) {
  const std::string& path = file.path();
  if (file.size() < 8) fail(path, "is too short for a safetensors file", download_again);
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  if (length > max_header_bytes)
    fail(path,
         fmt::format("header length {} is beyond the limit of {}: not a safetensors file", length, max_header_bytes),
         download_again);
  if (length > file.size() - 8)
    fail(path, fmt::format("header needs {} bytes, the file has {}: it is truncated", length, file.size() - 8),
         download_again);
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (length == 0 || text[0] != '{') fail(path, "header is not a JSON object: not a safetensors file", download_again);
  std::vector<StoredTensor> tensors;
  std::set<std::string> names;
  std::string name;
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth == 1 && event == json::parse_event_t::key) {
      name = parsed.get<std::string>();
      if (!names.insert(name).second) fail(path + ": " + name, "occurs twice in the header", download_again);
    }
    if (depth != 1 || event == json::parse_event_t::key || event == json::parse_event_t::object_start) return true;
    if (event == json::parse_event_t::array_start) return true;
    if (name == "__metadata__") {
      for (const auto& [key, value] : parsed.items())
        if (value.is_string()) metadata[key] = value.get<std::string>();
    } else {
      tensors.push_back(parse_entry(name, parsed, file, 8 + length));
    }
    return false;  // the entry is not kept in the document
  };
  try {
    const json rest = json::parse(text, text + length, callback);
    PLUMB_CHECK(rest.empty(), path);
  } catch (const json::exception& e) {
    fail(path, std::string("header is not valid JSON: ") + e.what(), download_again);
  }
  check_ranges(tensors, file, 8 + length);
  file.drop(0, 8 + length);
  return tensors;
}

// ---- Folders
// ---------------------------------------------------------------------------------------------------------

std::string find_in_folder(const std::string& folder) {
  for (const char* name : {"model.safetensors.index.json", "model.safetensors"})
    if (fs::exists(fs::path(folder) / name)) return (fs::path(folder) / name).string();
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path().string());
  if (found.size() == 1) return found[0];
  fail(folder,
       found.empty() ? "holds no .safetensors file"
                     : fmt::format("holds {} .safetensors files, but no model.safetensors.index.json", found.size()),
       "give the folder of a checkpoint, or one file");
}
}  // namespace

const char* safetensors_dtype(DType t) {
  for (const DTypeName& d : dtype_names)
    if (d.dtype == t) return d.name;
  return "?";
}

Safetensors Safetensors::open(const std::string& path) {
  Safetensors s;
  s.path_ = path;
  const std::string file = fs::is_directory(path) ? find_in_folder(path) : path;
  if (fs::path(file).extension() == ".json")
    s.add_index(file);
  else
    s.add_file(file);
  s.sort_by_name();
  return s;
}

void Safetensors::add_file(const std::string& path) {
  files_.push_back(MappedFile::open(path));
  for (StoredTensor& t : parse_header(*files_.back(), metadata_)) {
    t.file = static_cast<int>(files_.size()) - 1;
    tensors_.push_back(std::move(t));
  }
}

void Safetensors::add_index(const std::string& path) {
  std::unordered_map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  {
    const json index = read_json_file(path);
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
      fail(path, "has no weight_map", "give the index of a sharded checkpoint");
    for (const auto& [name, file] : index["weight_map"].items()) {
      if (!file.is_string() || fs::path(file.get<std::string>()).filename() != fs::path(file.get<std::string>()))
        fail(path + ": " + name, file.dump() + " is not the name of a file in this folder", download_again);
      shard_of[name] = file.get<std::string>();
      shards.insert(shard_of[name]);
    }
  }
  const fs::path folder = fs::path(path).parent_path();
  for (const std::string& shard : shards) {
    const std::string file = (folder / shard).string();
    if (!fs::exists(file)) fail(file, "is missing, the index lists it", "download the missing shard");
    const size_t first = tensors_.size();
    add_file(file);
    for (size_t i = first; i < tensors_.size(); ++i) {
      const auto listed = shard_of.find(tensors_[i].name);
      if (listed == shard_of.end() || listed->second != shard)
        fail(file + ": " + tensors_[i].name, "is not listed for this file in " + path,
             "index and shards are of different checkpoints: download both again");
      shard_of.erase(listed);
    }
  }
  if (!shard_of.empty())
    fail((folder / shard_of.begin()->second).string() + ": " + shard_of.begin()->first,
         "is not in the file, the index lists it",
         "index and shards are of different checkpoints: download both again");
}

void Safetensors::sort_by_name() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
}

const StoredTensor* Safetensors::find(const std::string& name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const StoredTensor& t, const std::string& n) { return t.name < n; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

const StoredTensor& Safetensors::at(const std::string& name) const {
  const StoredTensor* t = find(name);
  if (!t) fail(path_ + ": " + name, "is missing", "check that the file belongs to this model");
  return *t;
}

Tensor Safetensors::tensor(const StoredTensor& t) const { return slice(t, 0, t.shape); }

Tensor Safetensors::slice(const StoredTensor& t, int64_t first, Shape shape) const {
  PLUMB_CHECK(0 <= first && first + numel_of(shape) <= numel_of(t.shape), t.name + to_string(shape));
  const auto& file = files_[t.file];
  std::byte* data = const_cast<std::byte*>(file->data()) + t.begin + static_cast<size_t>(first) * dtype_size(t.dtype);
  Tensor mapped = Tensor::over(data, std::move(shape), t.dtype, std::const_pointer_cast<MappedFile>(file));
  return reinterpret_cast<uintptr_t>(data) % dtype_size(t.dtype) == 0 ? mapped : mapped.clone();
}

void Safetensors::drop(const Tensor& mapped, const StoredTensor& t) const {
  const MappedFile& file = *files_[t.file];
  if (mapped.raw() >= file.data() && mapped.raw() < file.data() + file.size())  // else it is a copy
    file.drop(static_cast<size_t>(mapped.raw() - file.data()), mapped.bytes());
}

// ---- Writing
// ---------------------------------------------------------------------------------------------------------

namespace {
// Written by hand rather than through a JSON document: names are escaped, numbers need no thought.
std::string make_header(const std::vector<TensorSpec>& specs, const Metadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + json(metadata).dump() + (specs.empty() ? "" : ",");
  uint64_t offset = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& t = specs[i];
    text +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", i ? "," : "",
                    json(t.name).dump(), safetensors_dtype(t.dtype), to_string(t.shape), offset, offset + t.bytes());
    offset += t.bytes();
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data starts at a multiple of 8
  return text;
}
}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs, const Metadata& metadata)
    : file_(path), path_(path), specs_(std::move(specs)) {
  const std::string header = make_header(specs_, metadata);
  const uint64_t length = header.size();
  file_.write(&length, 8);
  file_.write(header);
  skip_finished();
}

void SafetensorsWriter::skip_finished() {
  while (current_ < specs_.size() && filled_ == specs_[current_].bytes()) ++current_, filled_ = 0;
}

void SafetensorsWriter::append(const void* data, uint64_t bytes) {
  if (bytes == 0) return;
  PLUMB_CHECK(
      current_ < specs_.size() && filled_ + bytes <= specs_[current_].bytes(),
      path_ + ": more data than " + (current_ < specs_.size() ? specs_[current_].name : "the tensors") + " takes");
  file_.write(data, bytes);
  filled_ += bytes;
  skip_finished();
}

void SafetensorsWriter::append(const Tensor& t) {
  PLUMB_CHECK(t.bytes() == 0 || (current_ < specs_.size() && specs_[current_].dtype == t.dtype()), path_);
  append(t.raw(), t.bytes());
}

void SafetensorsWriter::commit() {
  PLUMB_CHECK(complete(), path_ + ": " + (complete() ? "" : specs_[current_].name) + " is not complete");
  file_.commit();
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const Metadata& metadata) {
  std::vector<const std::pair<std::string, Tensor>*> order;
  for (const auto& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return dtype_size(a->second.dtype()) > dtype_size(b->second.dtype());  // keeps every tensor aligned
  });
  std::vector<TensorSpec> specs;
  for (const auto* t : order) specs.push_back({t->first, t->second.dtype(), t->second.shape()});
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const auto* t : order) writer.append(t->second);
  writer.commit();
}

ShardedWriter::ShardedWriter(std::string folder, const std::vector<TensorSpec>& specs, uint64_t max_shard_bytes)
    : folder_(std::move(folder)), specs_(specs) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (bytes > 0 && bytes + specs_[i].bytes() > max_shard_bytes) shard_ends_.push_back(i), bytes = 0;
    bytes += specs_[i].bytes();
  }
  shard_ends_.push_back(specs_.size());
  size_t begin = 0;
  for (size_t end : shard_ends_) {
    std::stable_sort(
        specs_.begin() + static_cast<ptrdiff_t>(begin), specs_.begin() + static_cast<ptrdiff_t>(end),
        [](const TensorSpec& a, const TensorSpec& b) { return dtype_size(a.dtype) > dtype_size(b.dtype); });
    begin = end;
  }
  open_next_shard();
}

std::string ShardedWriter::shard_name(size_t shard) const {
  if (shard_ends_.size() == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shard_ends_.size());
}

void ShardedWriter::open_next_shard() {
  const size_t begin = next_shard_ == 0 ? 0 : shard_ends_[next_shard_ - 1];
  std::vector<TensorSpec> part(specs_.begin() + static_cast<ptrdiff_t>(begin),
                               specs_.begin() + static_cast<ptrdiff_t>(shard_ends_[next_shard_]));
  shard_ = std::make_unique<SafetensorsWriter>((fs::path(folder_) / shard_name(next_shard_)).string(), std::move(part),
                                               Metadata{{"format", "pt"}});
  ++next_shard_;
}

void ShardedWriter::append(const void* data, uint64_t bytes) {
  while (shard_->complete() && bytes > 0) {
    PLUMB_CHECK(next_shard_ < shard_ends_.size(), folder_ + ": more data than tensors");
    shard_->commit();
    open_next_shard();
  }
  shard_->append(data, bytes);
}

void ShardedWriter::commit() {
  PLUMB_CHECK(next_shard_ == shard_ends_.size(), folder_ + ": tensors are missing");
  shard_->commit();
  if (shard_ends_.size() == 1) return;
  uint64_t total = 0;
  json map = json::object();
  for (size_t shard = 0, i = 0; shard < shard_ends_.size(); ++shard)
    for (; i < shard_ends_[shard]; ++i) map[specs_[i].name] = shard_name(shard), total += specs_[i].bytes();
  json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = std::move(map);
  write_text((fs::path(folder_) / "model.safetensors.index.json").string(), index.dump(1) + "\n");
}

}  // namespace plumb
