#include "ops/elementwise.h"

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/vector_math.h"

namespace plumb::ops {

void add(const float* x, int64_t n, float* into) {
  for_lanes(n, [&](int64_t i, int64_t count) {
    store_part(into + i, load_part(into + i, count) + load_part(x + i, count), count);
  });
}

void add(const std::vector<Tensor>& terms, const Tensor& into) {
  for (const Tensor& x : terms)
    PLUMB_CHECK(x.numel() == into.numel(), to_string(x.shape()) + " into " + to_string(into.shape()));
  PLUMB_ON_GPU(into, add(terms, into));
  float* to = into.f32();
  parallel_for(into.numel(), 65536, [&](int64_t begin, int64_t end) {
    for (const Tensor& x : terms) add(x.f32() + begin, end - begin, to + begin);
  });
}

void add(const Tensor& x, const Tensor& into) { add(std::vector{x}, into); }

Tensor scaled(const Tensor& x, float factor) {
  PLUMB_ON_GPU(x, scaled(x, factor));
  Tensor y = Tensor::empty(x.shape());
  const float* from = x.f32();
  float* to = y.f32();
  parallel_for(x.numel(), 65536, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = from[i] * factor;
  });
  return y;
}

}  // namespace plumb::ops
