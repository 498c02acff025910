// What the parts of the backward pass hand to each other.
#pragma once
#include "kernels/hyper_connections/parts.cuh"

namespace plumb::kernels::hyper {

// What a token's streams need in the backward pass.
struct Record {              // seven times 16 bytes
  float mix[kHyperOutputs];  // rho * d_mix
  float factor;              // of the streams themselves: the path through rho
  float norm_rho, slope;     // of the norm: d_y = norm_rho * (norm_weight d_x - slope y)
  float padding;
};
constexpr int kRecordFloats = sizeof(Record) / 4;

// ---- fn_gradient.cu ----
constexpr int kTokenChunks = 8;

struct FnArguments {
  const uint8_t* streams;
  const Record* records;
  float* partial;  // [kTokenChunks][24][4 * width]
  int rows, width;
};
cudaError_t fn_gradient(const FnArguments& arguments, int outputs, float* d_fn, cudaStream_t stream);

}  // namespace plumb::kernels::hyper
