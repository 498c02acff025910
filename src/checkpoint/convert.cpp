#include "checkpoint/convert.h"

#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "checkpoint/checkpoint.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

class StoredSource : public WeightSource {
 public:
  explicit StoredSource(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  Codec codec(const InventoryEntry& e) const override { return checkpoint_.codec(e.name); }

  Weight rows(const InventoryEntry& e, int64_t begin, int64_t end) const override {
    Weight w = checkpoint_.weight(e.name);
    if (w.scale.defined()) {
      const bool fp8 = w.data.dtype() == DType::f8_e4m3;
      w.scale = fp8 ? w.scale.rows(begin / fp8_block, (end + fp8_block - 1) / fp8_block) : w.scale.rows(begin, end);
    }
    w.data = w.data.rows(begin, end);
    return w;
  }

  Tensor table(const InventoryEntry& e) const override {
    checkpoint_.table(e.name);  // refuses ids out of range
    return checkpoint_.weight(e.name).data;
  }

  void done(const InventoryEntry& e) const override { checkpoint_.drop(e.name); }

 private:
  const Checkpoint& checkpoint_;
};

constexpr uintmax_t largest_copied_file = 256 << 20;

std::vector<std::string> copy_other_files(const std::string& in, const std::string& out) {
  std::vector<std::string> copied;
  for (const auto& file : fs::directory_iterator(in)) {
    const std::string name = file.path().filename().string();
    const bool weights = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    if (!file.is_regular_file() || weights || name == "config.json" || file.file_size() > largest_copied_file) continue;
    write_text((fs::path(out) / name).string(), read_text(file.path().string()));
    copied.push_back(name);
  }
  return copied;
}
}  // namespace

ConvertReport convert_checkpoint(const std::string& in, const std::string& out, const WriteOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(in);
  FolderWriter folder(out);
  std::vector<std::pair<std::string, Tensor>> extras;
  for (const std::string& name : checkpoint.extras()) extras.emplace_back(name, checkpoint.extra(name));
  ConvertReport report;
  static_cast<WriteReport&>(report) = stream_checkpoint(folder.partial(), checkpoint.config(), checkpoint.entries(),
                                                        StoredSource(checkpoint), extras, options);
  report.from = checkpoint.layout();
  report.copied_files = copy_other_files(in, folder.partial());
  folder.commit();
  return report;
}

}  // namespace plumb
