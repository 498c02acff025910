// Device memory for tensors.
#pragma once
#include "ops/device.h"

namespace plumb::ops::gpu {

DeviceStatus open_device();

}  // namespace plumb::ops::gpu
