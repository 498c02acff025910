// The bf16 product for few rows: bound by reading the weight. The weight is the 64-row operand, the rows of x are the
// columns of the tensor cores' products; one chain over K in order, as in the wide product, so the bits are the same.
//
// A block computes 64 outputs of all rows. Warps 0 to 3 multiply, a thread of warp 4 feeds stages of 64 of K: as many
// as fit, or half of that for two blocks a multiprocessor where there are enough of them. An epilogue gets the
// accumulators.
#pragma once
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::narrow_product {

using namespace hopper;

constexpr int kOutputs = 64, kDepth = 64, kThreads = 160;
constexpr int kMostRows = 128;
constexpr int kWeightBytes = kOutputs * 128;

template <int kRows, bool kPairs>
struct Memory {
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kStages = (kPairs ? 112 : 224) * 1024 / kStageBytes;
  static constexpr int kBarrierStart = kStages * kStageBytes, kBytes = kBarrierStart + 2 * kStages * 8;
};

// x: [rows, groups * k], weight: [n, k]; outputs g * group_n .. of y meet columns g * k .. of x. group_n is a multiple
// of kOutputs where there are several groups.
struct Shape {
  int rows, n, k, group_n;
  __host__ __device__ int steps() const { return (k + kDepth - 1) / kDepth; }
};

// Where a thread's results lie: d[4 j + 2 h + b] is output `output` + 8 h of row `row` + 8 j + b.
struct Place {
  int output, row;
  int first_output;  // of the block
  int warp, lane;
};

template <int kRows, bool kPairs, typename Epilogue>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, const Shape shape,
                  const Epilogue epilogue) {
  if constexpr (!kHasCode) return __trap();
  using M = Memory<kRows, kPairs>;
  constexpr int kStages = M::kStages;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t start = uniform(shared_address(shared));
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, first_output = blockIdx.x * kOutputs;
  const auto full = [&](uint32_t slot) { return start + M::kBarrierStart + 8 * slot; };
  const auto empty = [&](uint32_t slot) { return full(kStages + slot); };
  if (threadIdx.x == 0) {
    prefetch_map(&weight), prefetch_map(&x);
    for (int i = 0; i < kStages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), 4);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp == 4 && lane == 0) {
    const auto send_weights = [&](int step, uint32_t slot) {
      barrier_arrive_expect(full(slot), M::kStageBytes);
      copy_tensor_2d(start + slot * M::kStageBytes, &weight, step * kDepth, first_output, full(slot));
    };
    const int ahead = min(kStages, shape.steps());  // on their way before x exists: see launch_dependent
    for (int step = 0; step < ahead; ++step) send_weights(step, step);
    wait_for_earlier_launches();
    let_next_launch_begin();
    const int first_input = first_output / shape.group_n * shape.k;
    RingPosition<kStages> at;
    for (int step = 0; step < shape.steps(); ++step, at = at.after(1)) {
      if (step >= ahead) {
        barrier_wait(empty(at.slot), at.parity ^ 1);
        send_weights(step, at.slot);
      }
      copy_tensor_2d(start + at.slot * M::kStageBytes + kWeightBytes, &x, first_input + step * kDepth, 0,
                     full(at.slot));
    }
  }
  wait_for_earlier_launches();
  if (warp == 4) return;
  float d[kRows / 2];
  RingPosition<kStages> at;
  for (int step = 0; step < shape.steps(); ++step, at = at.after(1)) {
    const uint32_t place = start + at.slot * M::kStageBytes;
    barrier_wait(full(at.slot), at.parity);
    const uint64_t a = tile_descriptor(place), b = tile_descriptor(place + kWeightBytes);
    product_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i)
      wgmma<kColumnsContracted, kColumnsContracted>(d, a + 2 * i, b + 2 * i, step > 0 || i > 0);
    product_commit();
    product_wait<0>();
    barrier_arrive_if(lane == 0, empty(at.slot));
  }
  pin(d);
  epilogue(d, shape, Place{first_output + warp * 16 + lane / 4, 2 * (lane % 4), first_output, warp, lane});
}

// Writes [rows, n]; T: float, or uint16_t for the bits of bf16.
template <typename T>
struct Store {
  T* out;
  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&d)[kCount], const Shape& s, const Place& place) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int output = place.output + i / 2 % 2 * 8, row = place.row + i / 4 * 8 + i % 2;
      if (row >= s.rows || output >= s.n) continue;
      T& to = out[static_cast<size_t>(row) * s.n + output];
      if constexpr (sizeof(T) == 4)
        to = d[i];
      else
        to = __bfloat16_as_ushort(__float2bfloat16_rn(d[i]));
    }
  }
};

// rows <= kMostRows. The launch directly before has not written the weight (launch_dependent).
template <typename Epilogue>
void launch(const uint16_t* x, const uint16_t* weight, const Shape& s, const Epilogue& epilogue, cudaStream_t stream) {
  const auto map = [](const uint16_t* matrix, int rows, int columns, int box_rows) {
    return matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, columns, box_rows, kDepth,
                      CU_TENSOR_MAP_SWIZZLE_128B);
  };
  const int blocks = (s.n + kOutputs - 1) / kOutputs;
  const auto run = [&]<int kRows, bool kPairs>() {
    launch_dependent(narrow_kernel<kRows, kPairs, Epilogue>,
                     {static_cast<unsigned>(blocks), kThreads, Memory<kRows, kPairs>::kBytes}, stream,
                     map(weight, s.n, s.k, kOutputs), map(x, s.rows, s.n / s.group_n * s.k, kRows), s, epilogue);
  };
  const auto with_rows = [&]<int kRows>() {
    blocks > multiprocessors() ? run.template operator()<kRows, true>() : run.template operator()<kRows, false>();
  };
  if (s.rows <= 8)
    with_rows.template operator()<8>();
  else if (s.rows <= 32)
    with_rows.template operator()<32>();
  else if (s.rows <= 64)
    with_rows.template operator()<64>();
  else
    with_rows.template operator()<128>();
}

}  // namespace plumb::kernels::narrow_product
