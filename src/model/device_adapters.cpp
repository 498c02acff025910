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

// The largest rank. Looked up in every decoding step, so nothing is copied.
int64_t largest_rank(const Adapter& adapter) {
  int64_t rank = 0;
  const auto look = [&](const LoraPair& p) {
    if (p.defined()) rank = std::max(rank, p.a.size(0));
  };
  for (const LayerLora& layer : adapter.layers) {
    for_singles(look, layer);
    std::for_each(layer.experts.gate_up.begin(), layer.experts.gate_up.end(), look);
    std::for_each(layer.experts.down.begin(), layer.experts.down.end(), look);
  }
  return rank;
}
int padded(int64_t rank) { return static_cast<int>((rank + 3) / 4 * 4); }

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
// And back.
void unpad_a(const Tensor& from, const Tensor& a) { std::copy_n(from.f32(), a.numel(), a.f32()); }
void unpad_b(const Tensor& from, const Tensor& b) {
  const int64_t columns = b.size(1), wide = from.size(1);
  for (int64_t o = 0; o < b.size(0); ++o) std::copy_n(from.f32() + o * wide, columns, b.f32() + o * columns);
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

std::shared_ptr<Adapter> upload(const Adapter& from, int rank, bool snapshot) {
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

// Gradients of pairs of the same sizes, zero, one behind the other.
std::vector<LoraGrad> zero_stack(const std::vector<LoraPair>& pairs, std::vector<Tensor>& memory) {
  if (pairs.empty() || !pairs[0].defined()) return {};
  const int64_t count = static_cast<int64_t>(pairs.size()), rank = pairs[0].a.size(0), out = pairs[0].b.size(0);
  const Tensor a = Tensor::zeros({count * rank, pairs[0].a.size(1)}, DType::f32, Space::device);
  const Tensor b = Tensor::zeros({count * out, rank}, DType::f32, Space::device);
  memory.push_back(a), memory.push_back(b);
  std::vector<LoraGrad> grads;
  for (int64_t i = 0; i < count; ++i)
    grads.push_back({a.rows(i * rank, (i + 1) * rank), b.rows(i * out, (i + 1) * out)});
  return grads;
}

// Pairs (or gradients) of the same sizes that lie one behind the other, into the host's.
template <class P>
void stack_home(const std::vector<P>& device, const std::vector<P>& host) {
  if (device.empty() || !device[0].a.defined()) return;
  PLUMB_CHECK(device.size() == host.size());
  const auto bring = [&](Tensor P::*matrix, auto unpad) {
    const Tensor& first = device[0].*matrix;
    const int64_t count = static_cast<int64_t>(device.size()), rows = first.size(0);
    const Tensor here = staging({count * rows, first.size(1)});
    copy_bytes(here, Tensor::over(first.raw(), here.shape(), DType::f32, nullptr, Space::device));
    for_each_pair(count, [&](int64_t i) { unpad(here.rows(i * rows, (i + 1) * rows), host[i].*matrix); });
  };
  bring(&P::a, unpad_a), bring(&P::b, unpad_b);
}

template <class Layers>
void layers_home(const Layers& device, const Layers& host) {
  for (size_t l = 0; l < device.size(); ++l) {
    for_singles([](const auto& from, const auto& to) { stack_home(std::vector{from}, std::vector{to}); }, device[l],
                host[l]);
    stack_home(device[l].experts.gate_up, host[l].experts.gate_up);
    stack_home(device[l].experts.down, host[l].experts.down);
  }
}

}  // namespace

bool on_device(const Adapter& adapter) {
  bool found = false;
  const auto look = [&](const LoraPair& p) { found = found || p.a.on_device(); };
  for (const LayerLora& layer : adapter.layers) {
    for_singles(look, layer);
    for (const auto& experts : {&layer.experts.gate_up, &layer.experts.down})
      if (!experts->empty()) look(experts->front());
    if (found) return true;
  }
  return false;
}

AdapterBatch device_batch(const AdapterBatch& batch) {
  AdapterBatch there = batch;
  int64_t rank = 0;
  for (const AdapterBatch::Part& part : batch.parts) rank = std::max(rank, largest_rank(*part.adapter));
  for (AdapterBatch::Part& part : there.parts) {
    if (on_device(*part.adapter)) continue;
    PLUMB_CHECK(!part.grads, "an adapter in training must be on the device");
    part.adapter = kept_copy(part.adapter, padded(rank));
  }
  return there;
}

DeviceAdapter train_on_device(const Adapter& host) {
  DeviceAdapter d;
  d.adapter = upload(host, padded(largest_rank(host)), false);
  for (LayerLora& pairs : d.adapter->layers) {
    LayerLoraGrad& grads = d.grads.layers.emplace_back();
    for_singles(
        [&](const LoraPair& pair, LoraGrad& grad) {
          if (const std::vector<LoraGrad> one = zero_stack({pair}, d.gradient_memory); !one.empty()) grad = one[0];
        },
        pairs, grads);
    grads.experts = {zero_stack(pairs.experts.gate_up, d.gradient_memory),
                     zero_stack(pairs.experts.down, d.gradient_memory)};
  }
  return d;
}

void bring_home(const Adapter& device, const Adapter& host) { layers_home(device.layers, host.layers); }
void bring_home(const AdapterGrads& device, const AdapterGrads& host) { layers_home(device.layers, host.layers); }

}  // namespace plumb
