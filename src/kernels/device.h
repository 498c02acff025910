// What the machine offers to the kernels of this folder.
#pragma once

namespace plumb::kernels {

// GPUs that the CUDA runtime can see; 0 without a driver.
int device_count();

}  // namespace plumb::kernels
