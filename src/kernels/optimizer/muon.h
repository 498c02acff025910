// Muon (train/muon.h, where the formulas come from) for batches of matrices of one shape: momentum, ten Newton-Schulz
// steps on bf16 tensor cores, and the update. Nothing synchronises with the host.
//
// The iterate, its Gram matrix and the polynomial of that are kept in bf16 between products, whose accumulators are
// FP32. Every sum has one order: the same bits in every run, whatever else is in the batch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels::optimizer {

// `count` matrices [rows, columns] behind each other (experts; the groups of wo_a). FP32 device arrays, aligned to 16
// bytes. rows a multiple of 64, columns of 8.
struct Matrices {
  float *weight, *gradient, *momentum;
  int count, rows, columns;
};

struct Muon {
  double momentum = 0.95, weight_decay = 0.1;
  double learning_rate = 0, gradient_scale = 1;
  double largest_norm = 0;  // gradients are scaled down to this norm (of all parameters); 0: never
};

// One step of each matrix. at_once: matrices that are in the workspace together; 8 are enough to fill the GPU from
// 2,048 x 2,048 on. norm: device, from gradient_norm; may be null if nothing is clipped.
size_t muon_bytes(const Matrices& matrices, int at_once);
void muon(const Matrices& matrices, const Muon& options, const double* norm, int at_once, void* workspace,
          cudaStream_t stream);

// The ten steps alone: x, bf16 bits [count, rows, columns], each matrix divided by its Frobenius norm, is replaced by
// about U V^T of its singular value decomposition. scratch: bf16, as many elements; gram, polynomial: bf16
// [count, s, s], s the smaller of rows and columns. All aligned to 16 bytes.
void newton_schulz(uint16_t* x, uint16_t* scratch, uint16_t* gram, uint16_t* polynomial, int count, int rows,
                   int columns, cudaStream_t stream);

}  // namespace plumb::kernels::optimizer
