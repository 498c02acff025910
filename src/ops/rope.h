// Rotary embedding of the last channels of a vector, interleaved pairs, spec 3.2. No magnitude factor anywhere.
#pragma once
#include <vector>

#include "base/tensor.h"
#include "config/model_config.h"

namespace plumb::ops {

// Angular frequency of each of dim/2 pairs; yarn = nullptr: plain base^(-2j/dim).
std::vector<float> rotary_frequencies(int dim, double base, const Yarn* yarn);

// Cosines and sines of position * freq, [rows, pairs]: made once for rows that are rotated many times.
struct RotaryTable {
  int64_t rows = 0, pairs = 0;
  std::vector<float> cosine, sine;
  Tensor device;  // on a GPU instead of these two: f32 [rows, pairs, 2]
};
RotaryTable rotary_table(const std::vector<int>& position, const std::vector<float>& freq, Space space = Space::host);

// In place: rotates the last 2*freq.size() channels of x [rows, vectors, width] by position[row] * freq (angle rounded
// to FP32, cos and sin from FP64). inverse: by minus the angle, which is also the backward of the forward rotation.
void rotate(float* x, int64_t rows, int64_t vectors, int64_t width, const std::vector<int>& position,
            const std::vector<float>& freq, bool inverse);
void rotate(float* x, int64_t vectors, int64_t width, const RotaryTable& table, bool inverse);

// In place Hadamard transform of each row of width n (a power of two), Sylvester order, times n^-1/2: its own inverse
// and backward.
void hadamard(float* x, int64_t rows, int64_t n);

}  // namespace plumb::ops
