// Muon (Jordan et al. 2024) as the technical report of DeepSeek-V4 uses it, spec/model.md 9.1: the momentum of a matrix
// is replaced by the nearest matrix with orthogonal rows (or columns) before it is applied.
#pragma once
#include "base/tensor.h"

namespace plumb {

struct MuonOptions {
  double momentum = 0.95, weight_decay = 0.1;
};

// m f32 [rows, cols] -> about U V^T of its singular value decomposition: ten Newton-Schulz steps X <- a X + b (X X^T) X
// + c (X X^T)^2 X on m / ||m||_F, eight with (3.4445, -4.7750, 2.0315), which lift small singular values, and two with
// (2, -1.5, 0.5), which bring all close to 1. A zero matrix gives zero.
Tensor orthogonalise(const Tensor& m);

// One step of a matrix w f32 [rows, cols] that consists of `blocks` independent blocks of rows. With g = grad_scale *
// grad:  M = mu M + g;  O = orthogonalise(mu M + g);  w = w (1 - lr wd) - lr 0.18 sqrt(max(rows, cols)) O,
// rows being those of a block. The factor gives O about the root mean square of an AdamW step, so that both share one
// learning rate.
void muon_step(const Tensor& w, const Tensor& grad, const Tensor& momentum, int blocks, const MuonOptions& options,
               double lr, double grad_scale);

}  // namespace plumb
