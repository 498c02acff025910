#include "ops/device.h"

#include <mutex>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/parallel.h"
#include "kernels/grouped_linear/weight_format.h"
#ifdef PLUMB_HAS_CUDA
#include "ops/gpu/memory.h"
#endif

namespace plumb::ops {
namespace {

namespace gl = kernels::grouped_linear;

// How a matrix is packed. FP4 whose blocks span too many exponents for that fits into FP8, at twice the memory.
enum class Layout { fp8, fp4, fp4_as_fp8 };
bool is_packed(const Linear& w) { return w.format == WeightFormat::fp8 || w.format == WeightFormat::fp4; }
std::vector<Layout> layouts_of(const Linear& w) {
  return w.format == WeightFormat::fp8 ? std::vector{Layout::fp8} : std::vector{Layout::fp4, Layout::fp4_as_fp8};
}
WeightFormat format_of(Layout layout) { return layout == Layout::fp4 ? WeightFormat::fp4 : WeightFormat::fp8; }

// Calls f with w as the packer wants it.
template <class F>
gl::PackReport with_matrix(Layout layout, F&& f) {
  switch (layout) {
    case Layout::fp4:
      return f([](const Linear& w) { return gl::Fp4Matrix{w.data.ptr<uint8_t>(), w.scale.ptr<uint8_t>()}; });
    case Layout::fp4_as_fp8:
      return f([](const Linear& w) { return gl::Fp4AsFp8Matrix{{w.data.ptr<uint8_t>(), w.scale.ptr<uint8_t>()}}; });
    case Layout::fp8:
      return f([](const Linear& w) { return gl::Fp8Matrix{w.data.ptr<uint8_t>(), w.scale.ptr<uint8_t>()}; });
  }
  return {};
}

// One matrix, or a gate and an up matrix together, in host memory.
struct Packing {
  Tensor records, bases;
  gl::PackReport report;
};
Packing pack(const Linear& w, const Linear* up, Layout layout, const std::string& name) {
  const int n = up ? 2 * w.out : w.out, k = w.in;
  if (n % gl::kRecordRows != 0 || k % gl::kBlock != 0)
    fail(name, "a packed matrix of " + std::to_string(n) + " outputs and " + std::to_string(k) + " inputs",
         "the GPU kernels take multiples of 256 and 128; use kernels = \"reference\"");
  PLUMB_CHECK(!up || (up->format == w.format && up->out == w.out && up->in == w.in), name);
  const auto kind = layout == Layout::fp4 ? gl::WeightFormat::fp4 : gl::WeightFormat::fp8;
  Packing p{Tensor::zeros({int64_t{n / gl::kRecordRows} * (k / gl::kBlock) * gl::record_bytes(kind)}, DType::u8),
            Tensor::zeros({int64_t{n / gl::kBlock} * gl::block_stride(k)}),
            {}};
  uint8_t* records = p.records.ptr<uint8_t>();
  float* bases = p.bases.f32();
  std::mutex mutex;
  parallel_for(n / gl::kRecordRows, 1, [&](int64_t begin, int64_t end) {
    const int first = static_cast<int>(begin), last = static_cast<int>(end);
    const gl::PackReport part = with_matrix(layout, [&](auto&& matrix) {
      return up ? gl::pack_gate_up_rows(matrix(w), matrix(*up), k, first, last, records, bases)
                : gl::pack_rows(matrix(w), k, first, last, records, bases);
    });
    std::lock_guard lock(mutex);
    if (part.ok()) return;
    if (p.report.row < 0 || part.row < p.report.row)
      p.report.row = part.row, p.report.column = part.column, p.report.span = part.span;
    p.report.wide_blocks += part.wide_blocks, p.report.nans += part.nans;
  });
  return p;
}

[[noreturn]] void refuse(const std::string& name, const gl::PackReport& report) {
  fail(name, gl::describe(report), "use kernels = \"reference\" for this checkpoint");
}

}  // namespace

DeviceStatus open_device() {
#ifdef PLUMB_HAS_CUDA
  return gpu::open_device();
#else
  return {false, false, "this program was built without CUDA"};
#endif
}

int64_t free_device_memory() {
#ifdef PLUMB_HAS_CUDA
  return gpu::free_device_memory();
#else
  return 0;
#endif
}

Linear upload_linear(const Linear& w, const std::string& name) {
  if (!is_packed(w)) return {to_device(w.data), {}, w.format, w.out, w.in};
  gl::PackReport report;
  for (Layout layout : layouts_of(w)) {
    const Packing p = pack(w, nullptr, layout, name);
    if (p.report.ok()) return {to_device(p.records), to_device(p.bases), format_of(layout), w.out, w.in};
    report = p.report;
  }
  refuse(name, report);
}

Linear upload_bf16(const Linear& w, const std::string& name) {
  if (w.format == WeightFormat::bf16) return upload_linear(w, name);
  if (w.format == WeightFormat::f32)
    fail(name, "is stored in FP32", "the GPU kernels take bf16; use kernels = \"reference\"");
  const Tensor values = dequantise(w), packed = Tensor::empty({w.out, w.in}, DType::bf16);
  for (int64_t i = 0; i < values.numel(); ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(values.f32()[i]);
  return {to_device(packed), {}, WeightFormat::bf16, w.out, w.in};
}

namespace {

// One matrix of all experts (up: null, or the ups that belong to it), one behind the other on the device.
std::vector<Linear> upload_stack(const std::vector<const Linear*>& w, const std::vector<const Linear*>& up,
                                 const std::string& name) {
  const int64_t count = static_cast<int64_t>(w.size());
  gl::PackReport report;
  for (Layout layout : layouts_of(*w[0])) {
    Tensor records, bases;
    std::vector<Linear> stack;
    for (int64_t e = 0; e < count; ++e) {
      const Packing p = pack(*w[e], up[e], layout, name + "." + std::to_string(e));
      report = p.report;
      if (!report.ok()) break;  // all experts of a layer have one format
      if (e == 0) {
        records = Tensor::empty({count, p.records.numel()}, DType::u8, Space::device);
        bases = Tensor::empty({count, p.bases.numel()}, DType::f32, Space::device);
      }
      stack.push_back({records.rows(e, e + 1), bases.rows(e, e + 1), format_of(layout),
                       up[e] ? 2 * w[e]->out : w[e]->out, w[e]->in});
      copy_bytes(stack.back().data, p.records);
      copy_bytes(stack.back().scale, p.bases);
    }
    if (static_cast<int64_t>(stack.size()) == count) return stack;
  }
  refuse(name, report);
}

}  // namespace

std::vector<ExpertWeights> upload_experts(const std::vector<ExpertWeights>& experts, const std::string& name) {
  std::vector<const Linear*> gate, up, down;
  for (const ExpertWeights& w : experts) {
    if (!is_packed(w.w1) || !is_packed(w.w2))
      fail(name, "are not stored in FP8 or FP4", "the GPU kernels take these formats; use kernels = \"reference\"");
    gate.push_back(&w.w1), up.push_back(&w.w3), down.push_back(&w.w2);
  }
  const std::vector<Linear> first = upload_stack(gate, up, name + " (w1, w3)"),
                            second = upload_stack(down, std::vector<const Linear*>(down.size()), name + " (w2)");
  std::vector<ExpertWeights> on_device(experts.size());
  for (size_t e = 0; e < experts.size(); ++e) on_device[e] = {first[e], {}, second[e]};
  return on_device;
}

}  // namespace plumb::ops
