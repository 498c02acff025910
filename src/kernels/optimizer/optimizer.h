// AdamW over many tensors in one launch, and the gradient norm before it. Nothing synchronises with the host: the norm,
// the clipping factor and the step use each other's results on the device.
//
// Each element is computed in FP64 with separately rounded operations and then rounded: the bits of train/adamw.h.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plumb::kernels::optimizer {

// A parameter: FP32 device arrays of `count`, aligned to 16 bytes.
struct Tensor {
  float *weight, *gradient, *first, *second;  // first, second: Adam's moments, null where only the norm is taken
  int64_t count;
};

// All parameters of a run in pieces of at most kPieceElements, made once and copied to the device by the caller.
constexpr int kPieceElements = 4096;
std::vector<Tensor> pieces_of(const std::vector<Tensor>& tensors);

// norm[0] = the Euclidean norm of all gradients times `scale`, in FP64. A piece is summed in a fixed tree, the pieces
// in order. pieces: device. workspace: FP64 [piece_count], device.
void gradient_norm(const Tensor* pieces, int piece_count, double scale, double* workspace, double* norm,
                   cudaStream_t stream);

struct AdamW {
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-13, weight_decay = 0;
  double learning_rate = 0, gradient_scale = 1;
  double largest_norm = 0;  // gradients are scaled down to this norm; 0: never
  int64_t step = 1;         // from 1
};
// norm: device, from gradient_norm; may be null if nothing is clipped. Gradients are set to 0 if clear_gradients.
void adamw(const Tensor* pieces, int piece_count, const AdamW& options, const double* norm, bool clear_gradients,
           cudaStream_t stream);

}  // namespace plumb::kernels::optimizer
