#include "ops/gpu/recording.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return stream;
}
// What this thread records into: its ops enqueue on `stream`, which is being captured.
struct Current {
  Recording* recording = nullptr;
  RecordedMemory* memory = nullptr;
  cudaStream_t stream = nullptr;
};
thread_local Current current;

// Calls that a capturing thread may not make are allowed while this lives: they concern other streams.
class Relaxed {
 public:
  Relaxed() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "relaxing a capture"); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

size_t free_memory() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

// The thread's ops go to a stream that is being captured, until it is finished or the object dies.
class Capture {
 public:
  Capture(Recording* recording, RecordedMemory* memory) {
    const cudaStream_t stream = new_stream();
    // Calls of this thread that a graph cannot hold are errors; other threads go on.
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning to record");
    current = {recording, memory, stream};
  }
  ~Capture() {
    if (!current.stream) return;
    cudaGraph_t unfinished = nullptr;  // an op failed; what it says matters more than what this might
    cudaStreamEndCapture(current.stream, &unfinished);
    if (unfinished) cudaGraphDestroy(unfinished);
    cudaGetLastError();
    leave();
  }
  Capture(const Capture&) = delete;
  cudaGraph_t finish() {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(current.stream, &graph);
    leave();
    check(error, "recording");
    return graph;
  }

 private:
  static void leave() { cudaStreamDestroy(std::exchange(current, {}).stream); }
};

}  // namespace

cudaStream_t program_stream() {
  static const cudaStream_t stream = new_stream();
  return stream;
}

Stream::operator cudaStream_t() const { return current.stream ? current.stream : program_stream(); }

// ---- Memory

RecordedMemory::~RecordedMemory() {
  for (void* chunk : chunks_) cudaFreeAsync(chunk, program_stream());
}

// The smallest free piece that is large enough; the rest of it stays free.
std::shared_ptr<void> RecordedMemory::allocate(size_t bytes) {
  constexpr size_t kAlignment = 256, kChunk = size_t{32} << 20;
  bytes = std::max<size_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
  std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)
    if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
  if (best == free_.end()) {
    const size_t size = (bytes + kChunk - 1) / kChunk * kChunk;
    void* chunk = nullptr;
    Relaxed relaxed;
    // One alignment more than is handed out: pieces of two chunks never touch, so they are never joined.
    check(cudaMallocAsync(&chunk, size + kAlignment, program_stream()), "memory for a recording");
    chunks_.push_back(chunk), bytes_ += size + kAlignment;
    best = free_.emplace(static_cast<std::byte*>(chunk), size).first;
  }
  const auto [begin, size] = *best;
  free_.erase(best);
  if (size > bytes) free_.emplace(begin + bytes, size - bytes);
  return std::shared_ptr<void>(
      begin, [self = shared_from_this(), bytes](void* p) { self->give_back(static_cast<std::byte*>(p), bytes); });
}

void RecordedMemory::give_back(std::byte* begin, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto next = free_.lower_bound(begin);
  if (next != free_.begin())
    if (const auto before = std::prev(next); before->first + before->second == begin) {
      begin = before->first, bytes += before->second;
      free_.erase(before);
    }
  if (next != free_.end() && begin + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  free_.emplace(begin, bytes);
}

// ---- Recording

Recording::Recording(std::shared_ptr<RecordedMemory> memory, const std::function<void()>& work)
    : memory_(std::move(memory)) {
  require_not_recording("another recording");
  cudaGraph_t graph = nullptr;
  {
    Capture capture(this, memory_.get());
    work();
    graph = capture.finish();
  }
  const size_t free_before = free_memory();
  const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
  cudaGraphGetNodes(graph, nullptr, &nodes_);
  cudaGraphDestroy(graph);
  check(error, "making a graph of what was recorded");
  check(cudaGraphUpload(graph_, kStream), "bringing a graph to the device");
  const size_t free_after = free_memory();
  bytes_ = free_before > free_after ? free_before - free_after : 0;
}

Recording::~Recording() {
  if (graph_) cudaGraphExecDestroy(graph_);  // waits until it is not running
}

void Recording::replay() const { check(cudaGraphLaunch(graph_, kStream), "repeating what was recorded"); }

bool recording() { return current.recording != nullptr; }
RecordedMemory* recorded_memory() { return current.memory; }

void require_not_recording(const char* what) {
  if (recording())
    fail("recording", std::string(what) + " cannot be part of work that is repeated without the host",
         "make it before, or outside of what is recorded");
}

namespace {

// The thread enqueues and allocates as if it were not recording.
class OutsideOfRecording {
 public:
  OutsideOfRecording() : was_(std::exchange(current, {})) {}
  ~OutsideOfRecording() { current = was_; }
  OutsideOfRecording(const OutsideOfRecording&) = delete;
  Recording& recording() const { return *was_.recording; }

 private:
  Current was_;
  Relaxed relaxed_;
};

}  // namespace

Tensor recorded_constant(const Tensor& host) {
  const OutsideOfRecording outside;
  return outside.recording().constants_.emplace_back(to_device(host));
}

Tensor recorded_row_numbers(const std::vector<int>& values) {
  const OutsideOfRecording outside;
  std::vector<RowNumbers>& known = outside.recording().row_numbers_;
  for (const RowNumbers& n : known)
    if (n.values == values) return n.device;
  return known.emplace_back(values, upload(values)).device;
}

}  // namespace plumb::ops::gpu
