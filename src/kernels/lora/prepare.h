// One launch that makes what a product reads of a low-rank pair: the factor of the epilogue and the planes of the way
// down. Errors as in lora.h.
#pragma once
#include "kernels/lora/lora.h"
#include "kernels/row_linear/row_linear.h"

namespace plumb::kernels::lora {

// As pack_factor, which does this alone.
struct Factor {
  const float* from;  // aligned to 8 bytes
  int groups, n, rank;
  bool transposed, gate_up;
  uint32_t* packed;  // null: not wanted
};
// Where the addresses of the results are written, device memory, or null.
struct Addresses {
  const uint32_t** factor = nullptr;
  const uint16_t** planes = nullptr;
};
// planes.to: null if not wanted.
void prepare(const Factor& factor, const row_linear::Split& planes, const Addresses& addresses, cudaStream_t stream);

}  // namespace plumb::kernels::lora
