#include "ops/gpu/memory.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device.h"
#include "ops/gpu/recording.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

// Pinned blocks, which take the driver milliseconds to make: they are kept.
class PinnedBlocks {
 public:
  std::shared_ptr<void> take(size_t bytes) {
    std::lock_guard lock(mutex_);
    Block* best = nullptr;
    for (const auto& b : blocks_)
      if (b->free && b->bytes >= bytes && (!best || b->bytes < best->bytes)) best = b.get();
    if (!best) best = make(bytes);
    best->free = false;
    return std::shared_ptr<void>(best->memory, [this, best](void*) {
      std::lock_guard again(mutex_);
      best->free = true;
    });
  }
  bool holds(const void* p) {
    std::lock_guard lock(mutex_);
    return std::any_of(blocks_.begin(), blocks_.end(), [p](const auto& b) {
      return p >= b->memory && p < static_cast<const std::byte*>(b->memory) + b->bytes;
    });
  }

 private:
  struct Block {
    void* memory = nullptr;
    size_t bytes = 0;
    bool free = true;
  };
  Block* make(size_t bytes) {
    constexpr size_t kGranule = size_t{1} << 20;
    auto block = std::make_unique<Block>();
    block->bytes = (bytes + kGranule - 1) / kGranule * kGranule;
    check(cudaHostAlloc(&block->memory, block->bytes, cudaHostAllocDefault), "pinning host memory");
    return blocks_.emplace_back(std::move(block)).get();
  }
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

// Blocks come from the driver's pool in order of the stream: what one op frees, the next may use. The pool keeps what
// it has, since every pass asks for the same sizes again.
class StreamMemory : public DeviceMemory {
 public:
  explicit StreamMemory(int device) {
    cudaMemPool_t pool;
    check(cudaDeviceGetDefaultMemPool(&pool, device), "asking for the memory pool");
    uint64_t keep = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "setting up the memory pool");
  }
  std::shared_ptr<void> allocate(size_t bytes) override {
    if (RecordedMemory* recorded = recorded_memory()) return recorded->allocate(bytes);
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, kStream), ("allocating " + std::to_string(bytes) + " bytes").c_str());
    return std::shared_ptr<void>(memory,
                                 [](void* p) { cudaFreeAsync(p, program_stream()); });  // at exit CUDA may be gone
  }
  std::shared_ptr<void> staging(size_t bytes) override { return pinned_.take(bytes); }
  void zero(void* to, size_t bytes) override { check(cudaMemsetAsync(to, 0, bytes, kStream), "clearing memory"); }
  void copy(void* to, Space to_space, const void* from, Space from_space, size_t bytes) override {
    if (to_space == Space::device && from_space == Space::device)
      return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, kStream), "copying on the device");
    require_not_recording(("a copy of " + std::to_string(bytes) + " bytes to or from the host").c_str());
    // From memory that is not pinned the call returns when the bytes have left it.
    const auto kind = to_space == Space::device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    check(cudaMemcpyAsync(to, from, bytes, kind, kStream), "copying to or from the device");
    if (kind == cudaMemcpyDeviceToHost || pinned_.holds(from))
      check(cudaStreamSynchronize(kStream), "the device's work");
  }

 private:
  PinnedBlocks pinned_;
};

DeviceStatus look() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0)
    return {false, false,
            error == cudaSuccess ? "there is no GPU" : std::string("no GPU: ") + cudaGetErrorString(error)};
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "asking for the device");
  const std::string capability = std::string(properties.name) + " has compute capability " +
                                 std::to_string(properties.major) + "." + std::to_string(properties.minor);
  if (properties.major < 8) return {true, false, capability + ", the kernels need 8.0"};
  static auto& memory = *new StreamMemory(device);
  set_device_memory(&memory);
  DeviceStatus found{true, true, properties.name};
  if (!kernels::is_hopper())
    found.warning = capability + ": portable kernels, correct but slow; the fast ones need 9.0";
  return found;
}

}  // namespace

DeviceStatus open_device() {
  static const DeviceStatus status = look();
  return status;
}

int64_t free_device_memory() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return static_cast<int64_t>(free);
}

}  // namespace plumb::ops::gpu
