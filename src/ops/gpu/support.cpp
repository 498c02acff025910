#include "ops/gpu/support.h"

#include <string>

namespace plumb::ops::gpu {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fail("GPU", std::string(what) + ": " + cudaGetErrorString(error),
       error == cudaErrorMemoryAllocation ? "use shorter rows, fewer running requests or a smaller model" : "");
}

void require_kind(const RoundAt& at, PointKind kind, const char* op) {
  if (point_kind(at.numerics, at.point) == kind) return;
  fail(op,
       std::string("the GPU kernel does not compute the numerics profile ") + numerics_name(at.numerics) + " at " +
           point_name(at.point),
       "use numerics = \"released\", or kernels = \"reference\"");
}

void not_on_gpu(const char* what) { fail("GPU", std::string(what) + " has no kernel", "use kernels = \"reference\""); }

}  // namespace plumb::ops::gpu
