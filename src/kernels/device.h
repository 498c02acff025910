// What the machine offers to the kernels of this folder.
#pragma once

namespace plumb::kernels {

// GPUs that the CUDA runtime can see; 0 without a driver.
int device_count();

// Whether the GPU has compute capability 9.0, and with it the instructions of the fast kernels. On others the entry
// points that need them launch those of kernels/portable, which compute the same functions, with bits of their own, on
// everything from 8.0 on. Found once.
bool is_hopper();
// Makes is_hopper() false on any GPU, so that tests can run the portable kernels where there is a Hopper GPU.
void use_portable_for_test(bool portable);

// Of the current device, found once; -1 without one.
int multiprocessors();
// Bytes of shared memory that a block may have: 227 KB on Hopper, 163 or 99 KB on others.
int shared_memory_limit();

}  // namespace plumb::kernels
