// Work of the device that is recorded once and then repeated without the host's part of it (a CUDA graph).
//
// A recording keeps addresses, so everything that its kernels touch must stay where it is. What exists before (weights,
// caches, a plan's tensors in PlanBuffers) is the caller's to keep; tensors that are made meanwhile come from
// RecordedMemory; numbers and addresses that an op would copy from the host (`constant`, `row_numbers`) belong to the
// recording.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/tensor.h"

namespace plumb::ops::gpu {

// Device memory for the tensors that are made while a thread records. Recordings may share it: replays follow each
// other on one stream, so what one leaves behind is dead when the next begins; a tensor that somebody still holds is
// never given away.
class RecordedMemory : public std::enable_shared_from_this<RecordedMemory> {
 public:
  RecordedMemory() = default;
  RecordedMemory(const RecordedMemory&) = delete;
  ~RecordedMemory();
  std::shared_ptr<void> allocate(size_t bytes);
  size_t bytes() const { return bytes_; }  // taken from the device

 private:
  void give_back(std::byte* begin, size_t bytes);
  std::mutex mutex_;
  std::map<std::byte*, size_t> free_;
  std::vector<void*> chunks_;
  size_t bytes_ = 0;
};

// Numbers that an op uploaded while recording, one or several a row of the batch: which adapter each row uses. The
// owner of the recording writes others into `device` when rows change their adapters.
struct RowNumbers {
  std::vector<int> values;  // as they were recorded
  Tensor device;            // i32
};

class Recording {
 public:
  // Calls work() in this thread. Nothing that it enqueues is executed. What it makes only once (packed weights, kept
  // lists and the like) must exist already: call it once before. Error: whatever cannot be repeated without the host,
  // such as a copy to or from it, by the name of the op or of the copy.
  Recording(std::shared_ptr<RecordedMemory> memory, const std::function<void()>& work);
  Recording(const Recording&) = delete;
  ~Recording();

  void replay() const;  // enqueues all of it on the program's stream
  size_t nodes() const { return nodes_; }
  size_t bytes() const { return bytes_; }  // of the device, for the graph itself
  std::vector<RowNumbers>& row_numbers() { return row_numbers_; }

 private:
  friend Tensor recorded_constant(const Tensor& host);
  friend Tensor recorded_row_numbers(const std::vector<int>& values);
  std::shared_ptr<RecordedMemory> memory_;
  std::vector<Tensor> constants_;
  std::vector<RowNumbers> row_numbers_;
  cudaGraphExec_t graph_ = nullptr;
  size_t nodes_ = 0, bytes_ = 0;
};

// The stream on which everything is executed; kStream, unless this thread is recording.
cudaStream_t program_stream();
// Whether this thread is recording.
bool recording();
// Where tensors come from that are made now, or null: not from a recording's memory.
RecordedMemory* recorded_memory();
// While recording: a copy of host numbers that the recording's kernels read and that never changes.
Tensor recorded_constant(const Tensor& host);
Tensor recorded_row_numbers(const std::vector<int>& values);
// Error if this thread is recording: `what` cannot be part of a recording.
void require_not_recording(const char* what);

}  // namespace plumb::ops::gpu
