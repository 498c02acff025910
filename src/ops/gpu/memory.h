// Device memory for tensors.
#pragma once
#include "ops/device.h"

namespace plumb::ops::gpu {

DeviceStatus open_device();
int64_t free_device_memory();

}  // namespace plumb::ops::gpu
