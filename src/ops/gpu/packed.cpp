#include "ops/gpu/packed.h"

#include <map>
#include <mutex>
#include <utility>

#include "ops/gpu/recording.h"

namespace plumb::ops::gpu {

namespace gl = kernels::grouped_linear;

Groups one_group(int64_t rows) {
  // Few different numbers of rows occur in a run; never freed, because at exit CUDA is gone before they would be.
  static std::mutex mutex;
  static auto& known = *new std::map<int64_t, Tensor>;
  std::lock_guard lock(mutex);
  Tensor& first_row = known[rows];
  if (!first_row.defined()) first_row = upload(std::vector<int>{0, static_cast<int>(rows)});
  return {1, first_row};
}

gl::Activations Quantised::activations() const {
  return {bytes(values), f32(scales), static_cast<int>(values.size(0))};
}

Quantised empty_quantised(int64_t rows, int64_t k) {
  return {empty({rows, k}, DType::f8_e4m3), empty({rows, gl::block_stride(static_cast<int>(k))}, DType::f32)};
}

Quantised quantise(const Tensor& x, const Tensor& source_row) {
  const int64_t rows = source_row.defined() ? source_row.numel() : x.size(0), k = x.size(1);
  Quantised q = empty_quantised(rows, k);
  gl::quantise_rows(bf16(x), i32(source_row), static_cast<int>(rows), static_cast<int>(k), bytes(q.values),
                    f32(q.scales), kStream);
  return q;
}

gl::Weights packed(const Linear& w, int groups) {
  PLUMB_CHECK(w.format == WeightFormat::fp8 || w.format == WeightFormat::fp4);
  return {w.format == WeightFormat::fp8 ? gl::WeightFormat::fp8 : gl::WeightFormat::fp4,
          groups,
          w.out,
          w.in,
          bytes(w.data),
          f32(w.scale)};
}

namespace {
constexpr int kWide = 256;  // rows of a tile of the kernels for many rows, which hand out tiles from a queue

WorkList empty_list(int groups, int64_t rows, int outputs, int width) {
  const int n = static_cast<int>(rows);
  WorkList list;
  list.memory = workspace(gl::plan_bytes(groups, n, outputs, width));
  list.plan = {groups, n, outputs, width, list.memory.raw()};
  return list;
}
WorkList list_of(const Groups& groups, int64_t rows, int outputs, int width) {
  WorkList list = empty_list(groups.count, rows, outputs, width);
  gl::make_plan(i32(groups.first_row), list.plan, kStream);
  return list;
}
}  // namespace

WorkList empty_work_list(int groups, int64_t rows, int outputs) {
  return empty_list(groups, rows, outputs, gl::best_width(static_cast<int>(rows), groups));
}

WorkList work_list(const Groups& groups, int64_t rows, int outputs) {
  const int width = gl::best_width(static_cast<int>(rows), groups.count);
  if (groups.count > 1 || width == kWide) return list_of(groups, rows, outputs, width);
  // The few rows of decoding: the list is the same in every layer and step, and costs a tenth of the launches.
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<int64_t, int>, WorkList>;  // never freed, like one_group's
  std::lock_guard lock(mutex);
  WorkList& list = known[{rows, outputs}];
  if (!list.memory.defined()) {
    require_not_recording("a work list that is kept");
    const WorkList fresh = list = list_of(groups, rows, outputs, width);
    list.plan.settled = true;  // in all later calls
    return fresh;
  }
  return list;
}
WorkList wide_work_list(const Groups& groups, int64_t rows, int outputs) {
  return list_of(groups, rows, outputs, kWide);
}

}  // namespace plumb::ops::gpu
