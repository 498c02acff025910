// What sparse_attention.h needs of Hopper, for any GPU.
#pragma once
#include "kernels/sparse_attention/backward_workspace.cuh"

namespace plumb::kernels::attention {

// Arguments have been checked, there are queries.
cudaError_t launch_portable_forward(const SparseAttentionForward& arguments, cudaStream_t stream);
// dq and w.delta.
cudaError_t launch_portable_dq(const SparseAttentionBackward& arguments, const Workspace& w, cudaStream_t stream);
// A pass over every stride-th item that adds to the fixed-point sums of dkv and to their bounds (backward_parts.cuh).
cudaError_t launch_portable_dkv(const SparseAttentionBackward& arguments, const Workspace& w, int stride,
                                cudaStream_t stream);

}  // namespace plumb::kernels::attention
