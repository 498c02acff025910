// Event files of TensorBoard, written without TensorFlow: records of the TFRecord format (length, masked CRC-32C, data,
// masked CRC-32C) that hold Event messages in the protobuf wire format.
// https://www.tensorflow.org/tutorials/load_data/tfrecord, tensorflow/core/util/event.proto
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace plumb {

uint32_t crc32c(std::string_view data);  // Castagnoli polynomial, as in iSCSI (RFC 3720)

// Appends to a new file in `folder`. TensorBoard shows all files of a folder as one run; what older files say of
// first_step and later is replaced by what this one says.
class EventFile {
 public:
  EventFile(const std::string& folder, int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  // wall_time: seconds since 1970. The record is handed to the system at once.
  void add_scalars(int64_t step, double wall_time, const std::vector<std::pair<std::string, double>>& values);
  const std::string& path() const { return path_; }

 private:
  void write_record(std::string_view data);
  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace plumb
