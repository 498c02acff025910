// The safetensors format: an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
// then the data. A checkpoint is one such file or shards listed by an index {"weight_map": {name: file}}.
// https://huggingface.co/docs/safetensors
#pragma once
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/tensor.h"

namespace plumb {

// What is known of a tensor before its data is.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  uint64_t bytes() const { return static_cast<uint64_t>(numel_of(shape)) * dtype_size(dtype); }
};

struct StoredTensor : TensorSpec {
  uint64_t begin = 0;  // offset in the file
  int file = 0;
};

using Metadata = std::map<std::string, std::string>;  // free text in the header, "format": "pt" by custom

// One file or a set of shards, mapped. Opening reads the headers only and checks all that a header can get wrong:
// truncation, sizes that do not fit shape and dtype, ranges that overlap or leave a gap, duplicate names, unknown
// dtypes, shards that are missing or do not hold what the index says. Errors name file and tensor.
class Safetensors {
 public:
  // path: a .safetensors file, an index (.json), or a folder with model.safetensors or model.safetensors.index.json (or
  // one single .safetensors file).
  static Safetensors open(const std::string& path);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in order of name
  const StoredTensor* find(const std::string& name) const;               // null if absent
  const StoredTensor& at(const std::string& name) const;                 // Error if absent
  // The data, without a copy (read-only!); copied only if the file does not align it for its dtype.
  Tensor tensor(const StoredTensor& t) const;
  Tensor tensor(const std::string& name) const { return tensor(at(name)); }
  // `shape` elements from element `first` of the flattened tensor on.
  Tensor slice(const StoredTensor& t, int64_t first, Shape shape) const;
  // The pages of this tensor may leave memory until they are touched again.
  void drop(const StoredTensor& t) const { files_[t.file]->drop(t.begin, t.bytes()); }
  void drop(const Tensor& mapped, const StoredTensor& t) const;  // the pages of a slice of t

  size_t file_count() const { return files_.size(); }
  const std::string& file_path(const StoredTensor& t) const { return files_[t.file]->path(); }
  const std::string& path() const { return path_; }  // as given to open
  const Metadata& metadata() const { return metadata_; }

 private:
  void add_file(const std::string& path);
  void add_index(const std::string& path);
  void sort_by_name();
  std::string path_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<StoredTensor> tensors_;
  Metadata metadata_;
};

// "F32", "BF16", "F8_E4M3", ...: the header's spelling of a dtype.
const char* safetensors_dtype(DType t);

// Writes one file tensor by tensor, in the order of the specs: the data of each may come in several pieces. Appears
// under its name at commit().
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs, const Metadata& metadata = {});
  void append(const void* data, uint64_t bytes);  // the next bytes of the current tensor; must not run over its end
  void append(const Tensor& t);                   // dtype must be the current tensor's
  bool complete() const { return current_ == specs_.size(); }
  void commit();

 private:
  void skip_finished();
  FileWriter file_;
  std::string path_;
  std::vector<TensorSpec> specs_;
  size_t current_ = 0;
  uint64_t filled_ = 0;  // bytes of the current tensor
};

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const Metadata& metadata = {});

// Writes a checkpoint folder: model.safetensors, or shards of at most max_shard_bytes (a larger tensor gets a shard of
// its own) with their index. Tensors of one shard are reordered by the size of their element so that each is aligned;
// append data in the order of specs().
class ShardedWriter {
 public:
  ShardedWriter(std::string folder, const std::vector<TensorSpec>& specs, uint64_t max_shard_bytes);
  const std::vector<TensorSpec>& specs() const { return specs_; }
  void append(const void* data, uint64_t bytes);
  void append(const Tensor& t) { append(t.raw(), t.bytes()); }
  void commit();  // after the last tensor: writes the index

 private:
  void open_next_shard();
  std::string shard_name(size_t shard) const;
  std::string folder_;
  std::vector<TensorSpec> specs_;
  std::vector<size_t> shard_ends_;  // index in specs_ after the last tensor of each shard
  size_t next_shard_ = 0;
  std::unique_ptr<SafetensorsWriter> shard_;
};

inline constexpr uint64_t default_shard_bytes = 5'000'000'000;

}  // namespace plumb
