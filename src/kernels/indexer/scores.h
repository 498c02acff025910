// What the score kernels share: their arguments, and which tiles a block walks over.
#pragma once
#include <cuda_runtime.h>

#include "kernels/indexer/indexer.h"

namespace plumb::kernels::indexer {

struct Arguments {
  const float* w;
  IndexGroupsDevice groups;
  float* scores;
  int first_group, last_group, rows, columns, topk;
};

#ifdef __CUDACC__
// Grid: (groups, splits): block (x, y) has every gridDim.y-th tile of a group from its y-th on.
struct Walk {
  int group, tile_begin, first_tile;
  int tiles;  // 0 or less: nothing to do, or every row of the group takes all it sees
};
__device__ __forceinline__ Walk walk_of(const Arguments& p, int group_rows) {
  const int group = p.last_group - 1 - static_cast<int>(blockIdx.x);  // the longest first
  bool selects = false;
  for (int i = 0; i < group_rows; ++i) {
    const int row = group * group_rows + i;
    selects |= row < p.rows && __ldg(p.groups.visible_count + row) > p.topk;
  }
  const int begin = __ldg(p.groups.tile_begin + group), all = __ldg(p.groups.tile_begin + group + 1) - begin;
  const int first = blockIdx.y, splits = gridDim.y;
  return {group, begin, first, selects && first < all ? (all - first + splits - 1) / splits : 0};
}
#endif

// Any GPU, any form (kernels/portable).
cudaError_t scores_portable(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream);
// Hopper.
cudaError_t scores_of_bf16(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream);
cudaError_t scores_of_records(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream);

}  // namespace plumb::kernels::indexer
