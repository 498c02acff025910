// What happens to a head, a key, an entry or an index vector between the product that makes it and its use, in one
// pass:
//   norm (none, plain or weighted) -> bf16 -> rotation of the last 64 channels -> bf16 -> storage form
// Storage forms: as it is; e4m3 with a power-of-two scale for 64 channels, all but the rotated ones (keys); Hadamard
// transform -> bf16 -> e2m1 with a power-of-two scale for 32 channels (index vectors). Keys are written as bf16, which
// holds the stored values exactly, index vectors as records (kernels/indexer/indexer.h), which FP8 products take.
// Rotation is of interleaved pairs, without a magnitude factor. A vector's bits depend on itself and on its position
// alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels {

constexpr int kRotaryChannels = 64;

// table[r, j] = (cos, sin) of position[r] * frequency[j], the angle rounded to FP32, cos and sin from FP64.
// position [rows], frequency [32], table float2 [rows, 32]; device memory, the table aligned to 16 bytes.
cudaError_t rotary_table(const int* position, const float* frequency, int rows, void* table, cudaStream_t stream);

enum class VectorNorm { none, plain, weighted };
enum class VectorStorage { plain, fp8, fp4_record };

// Device memory, aligned to 16 bytes; "bf16" pointers are untyped.
struct FinishVectors {
  const void* x;        // bf16 [rows, vectors, width]
  const float* weight;  // [width] with VectorNorm::weighted, else null
  const void* table;    // rotary table of the rows
  const int* slot;      // [rows] row of y for each row of x; null: the same
  void* y;              // bf16 [*, vectors, width], written; may be x without slots. fp4_record: records [*, vectors]
  int rows, vectors;    // rows may be 0
  int width;            // 512, or 128 (index vectors)
  VectorNorm norm;
  VectorStorage storage;  // fp8: width 512; fp4_record: width 128, norm none or weighted
  float eps;
};
cudaError_t finish_vectors(const FinishVectors& arguments, cudaStream_t stream);

// d_y -> d_x, straight through the roundings: Hadamard transform (fp4_record), inverse rotation, norm.
struct FinishVectorsBackward {
  const void* x;    // bf16 [rows, vectors, width], as the forward pass read it; null with VectorNorm::none
  const void* d_y;  // bf16 [rows, vectors, width], not in slots
  const float* weight;
  const void* table;
  void* d_x;        // bf16, written; may be d_y
  float* d_weight;  // FP32 [width], +=, rows in a fixed tree; null: frozen or no weight
  void* workspace;  // finish_vectors_backward_workspace() bytes; null without d_weight
  int rows, vectors, width;
  VectorNorm norm;
  VectorStorage storage;
  float eps;
};
cudaError_t finish_vectors_backward(const FinishVectorsBackward& arguments, cudaStream_t stream);
size_t finish_vectors_backward_workspace(int rows, int vectors, int width);

// In place: rotates the last 64 channels of x, bf16 [rows, vectors, width], by the table's angles or back, and rounds
// them to bf16. Outputs of the attention are rotated back; the backward pass rotates their gradients forth.
cudaError_t rotate_tails(void* x, const void* table, int rows, int vectors, int width, bool inverse,
                         cudaStream_t stream);

}  // namespace plumb::kernels
