// finish_vectors for records of index vectors.
#pragma once
#include "kernels/rotary/rotary.h"

namespace plumb::kernels::rotary {

cudaError_t finish_index_vectors(const FinishVectors& arguments, cudaStream_t stream);

}  // namespace plumb::kernels::rotary
