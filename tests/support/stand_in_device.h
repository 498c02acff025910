// Device memory for tests on machines without a device: the host's, while an object of this class lives.
#pragma once
#include <cstdlib>
#include <cstring>

#include "base/tensor.h"

namespace plumb::testing {

class StandInDevice : public DeviceMemory {
 public:
  StandInDevice() { set_device_memory(this); }
  ~StandInDevice() override { set_device_memory(nullptr); }
  StandInDevice(const StandInDevice&) = delete;

  std::shared_ptr<void> allocate(size_t bytes) override {
    ++*alive_;
    return std::shared_ptr<void>(std::malloc(bytes), [alive = alive_](void* p) { std::free(p), --*alive; });
  }
  std::shared_ptr<void> staging(size_t bytes) override { return std::shared_ptr<void>(std::malloc(bytes), std::free); }
  void zero(void* to, size_t bytes) override { std::memset(to, 0, bytes); }
  void copy(void* to, Space, const void* from, Space, size_t bytes) override {
    std::memcpy(to, from, bytes);
    copied_ += bytes;
  }
  int alive() const { return *alive_; }  // blocks that have not been given back
  size_t copied() const { return copied_; }

 private:
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);  // blocks may outlive the device
  size_t copied_ = 0;
};

}  // namespace plumb::testing
