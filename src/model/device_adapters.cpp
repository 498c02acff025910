#include "model/device_adapters.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/elementwise.h"

namespace plumb {
namespace {

// Calls f for each single member of some layers' parts: pairs, their gradients.
template <class F, class... Parts>
void for_singles(F&& f, Parts&... p) {
  f(p.wq_a...), f(p.wq_b...), f(p.wkv...), f(p.wo_a...), f(p.wo_b...);
  f(p.compressor_wkv...), f(p.compressor_wgate...);
  f(p.shared_w1...), f(p.shared_w3...), f(p.shared_w2...);
}

// One rank for the whole batch. Looked up in every decoding step, so nothing is copied.
int padded_rank(const AdapterBatch& batch) {
  int64_t rank = 0;
  const auto look = [&](const LoraPair& p) {
    if (p.defined()) rank = std::max(rank, p.a.size(0));
  };
  for (const auto& part : batch.parts)
    for (const LayerLora& layer : part.adapter->layers) {
      for_singles(look, layer);
      std::for_each(layer.experts.gate_up.begin(), layer.experts.gate_up.end(), look);
      std::for_each(layer.experts.down.begin(), layer.experts.down.end(), look);
    }
  return static_cast<int>((rank + 3) / 4 * 4);
}

// Row i of `from` is the beginning of row i of `to`; the rest becomes zero.
void widen(const Tensor& from, const Tensor& to) {
  const int64_t columns = from.size(1), wide = to.size(1);
  for (int64_t i = 0; i < from.size(0); ++i) {
    std::copy_n(from.f32() + i * columns, columns, to.f32() + i * wide);
    std::fill_n(to.f32() + i * wide + columns, wide - columns, 0.0f);
  }
}
// a [r, in] -> [rank, in]; b [out, r] -> [out, rank].
void pad_a(const Tensor& a, const Tensor& to) {
  std::copy_n(a.f32(), a.numel(), to.f32());
  std::fill_n(to.f32() + a.numel(), to.numel() - a.numel(), 0.0f);
}
void pad_b(const Tensor& b, const Tensor& to) {
  if (b.size(1) == to.size(1))
    std::copy_n(b.f32(), b.numel(), to.f32());
  else
    widen(b, to);
}
void add_unpadded_a(const Tensor& from, const Tensor& a) { ops::add(from.f32(), a.numel(), a.f32()); }
void add_unpadded_b(const Tensor& from, const Tensor& b) {
  const int64_t columns = b.size(1), wide = from.size(1);
  if (columns == wide) return ops::add(from.f32(), b.numel(), b.f32());
  for (int64_t o = 0; o < b.size(0); ++o) ops::add(from.f32() + o * wide, columns, b.f32() + o * columns);
}

// Calls f(i) for i = 0 .. count - 1 on all threads.
template <class F>
void for_each_pair(int64_t count, F&& f) {
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Pairs of the same sizes (a single one, or those of a layer's experts), one behind the other. Of rank 8 on the experts
// of a layer of Flash they are 117 MB: put together on all threads, and copied in one piece. snapshot: they do not
// change any more.
std::vector<LoraPair> upload_pairs(const std::vector<LoraPair>& pairs, int rank, bool snapshot) {
  const int64_t count = static_cast<int64_t>(pairs.size());
  if (count == 0 || !pairs[0].defined()) return pairs;
  const int64_t in = pairs[0].a.size(1), out = pairs[0].b.size(0);
  for (const LoraPair& p : pairs)
    PLUMB_CHECK(p.defined() && p.a.size(1) == in && p.b.size(0) == out, "the experts of a layer are adapted alike");
  const Tensor a = staging({count * rank, in}), b = staging({count * out, rank});
  for_each_pair(count, [&](int64_t i) {
    pad_a(pairs[i].a, a.rows(i * rank, (i + 1) * rank));
    pad_b(pairs[i].b, b.rows(i * out, (i + 1) * out));
  });
  const Tensor device_a = to_device(a), device_b = to_device(b);
  std::vector<LoraPair> result;
  for (int64_t i = 0; i < count; ++i)
    result.push_back({device_a.rows(i * rank, (i + 1) * rank), device_b.rows(i * out, (i + 1) * out), pairs[i].scale});
  if (snapshot) result[0].prepared = std::make_shared<PreparedPair>();
  return result;
}

std::shared_ptr<const Adapter> upload(const Adapter& from, int rank, bool snapshot) {
  auto to = std::make_shared<Adapter>(from);
  for (LayerLora& layer : to->layers) {
    for_singles([&](LoraPair& pair) { pair = upload_pairs({pair}, rank, snapshot)[0]; }, layer);
    layer.experts.gate_up = upload_pairs(layer.experts.gate_up, rank, snapshot);
    layer.experts.down = upload_pairs(layer.experts.down, rank, snapshot);
  }
  return to;
}

// Copies of snapshots, by adapter and rank.
std::shared_ptr<const Adapter> kept_copy(const std::shared_ptr<const Adapter>& from, int rank) {
  struct Copy {
    std::weak_ptr<const Adapter> of;
    std::shared_ptr<const Adapter> copy;
  };
  static std::mutex mutex;
  static auto& kept = *new std::map<std::pair<const Adapter*, int>, Copy>;  // at exit the device may be gone
  std::lock_guard lock(mutex);
  std::erase_if(kept, [](const auto& entry) { return entry.second.of.expired(); });
  Copy& c = kept[{from.get(), rank}];
  if (!c.copy) c = {from, upload(*from, rank, true)};
  return c.copy;
}

}  // namespace

DeviceAdapters::DeviceAdapters(const AdapterBatch& host) : host_(host) {
  const int rank = padded_rank(host);
  for (const AdapterBatch::Part& part : host.parts) {
    AdapterBatch::Part& copy = batch_.parts.emplace_back(part);
    copy.adapter = part.grads ? upload(*part.adapter, rank, false) : kept_copy(part.adapter, rank);
    copy.grads = nullptr;
  }
}

// -> what a backward pass adds to: a stack's pieces.
std::vector<LoraGrad> DeviceAdapters::add_stack(const std::vector<LoraPair>& pairs,
                                                const std::vector<LoraGrad>& wanted) {
  if (pairs.empty() || wanted.empty() || !pairs[0].defined()) return {};
  const auto wants = [&](Tensor LoraGrad::*matrix) {
    return std::any_of(wanted.begin(), wanted.end(), [&](const LoraGrad& g) { return (g.*matrix).defined(); });
  };
  const int64_t count = static_cast<int64_t>(pairs.size()), rank = pairs[0].a.size(0), out = pairs[0].b.size(0);
  GradientStack stack{{}, {}, wanted};
  if (wants(&LoraGrad::a)) stack.a = Tensor::zeros({count * rank, pairs[0].a.size(1)}, DType::f32, Space::device);
  if (wants(&LoraGrad::b)) stack.b = Tensor::zeros({count * out, rank}, DType::f32, Space::device);
  std::vector<LoraGrad> grads;
  for (int64_t i = 0; i < count; ++i)
    grads.push_back({wanted[i].a.defined() ? stack.a.rows(i * rank, (i + 1) * rank) : Tensor(),
                     wanted[i].b.defined() ? stack.b.rows(i * out, (i + 1) * out) : Tensor()});
  stacks_.push_back(std::move(stack));
  return grads;
}

void DeviceAdapters::begin_gradients() {
  PLUMB_CHECK(grads_.empty(), "a backward pass is under way");
  for (size_t i = 0; i < batch_.parts.size(); ++i) {
    std::unique_ptr<AdapterGrads>& grads = grads_.emplace_back();
    if (!host_.parts[i].grads) continue;
    const auto& wanted = host_.parts[i].grads->layers;
    grads = std::make_unique<AdapterGrads>();
    grads->layers.resize(wanted.size());
    for (size_t l = 0; l < wanted.size(); ++l) {
      const LayerLora& pairs = batch_.parts[i].adapter->layers[l];
      for_singles(
          [&](const LoraPair& pair, const LoraGrad& host, LoraGrad& there) {
            if (const std::vector<LoraGrad> one = add_stack({pair}, {host}); !one.empty()) there = one[0];
          },
          pairs, wanted[l], grads->layers[l]);
      grads->layers[l].experts = {add_stack(pairs.experts.gate_up, wanted[l].experts.gate_up),
                                  add_stack(pairs.experts.down, wanted[l].experts.down)};
    }
    batch_.parts[i].grads = grads.get();
  }
}

void DeviceAdapters::finish_gradients() {
  // Calls add(piece of the stack, the host's gradient) for each pair.
  const auto bring_back = [](const Tensor& stack, const std::vector<LoraGrad>& host, Tensor LoraGrad::*matrix,
                             auto add) {
    if (!stack.defined()) return;
    const Tensor here = staging(stack.shape());
    copy_bytes(here, stack);
    const int64_t count = static_cast<int64_t>(host.size()), rows = stack.size(0) / count;
    for_each_pair(count, [&](int64_t i) {
      if ((host[i].*matrix).defined()) add(here.rows(i * rows, (i + 1) * rows), host[i].*matrix);
    });
  };
  for (const GradientStack& stack : stacks_) {
    bring_back(stack.a, stack.host, &LoraGrad::a, add_unpadded_a);
    bring_back(stack.b, stack.host, &LoraGrad::b, add_unpadded_b);
  }
  for (AdapterBatch::Part& part : batch_.parts) part.grads = nullptr;
  grads_.clear(), stacks_.clear();
}

}  // namespace plumb
