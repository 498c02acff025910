#include "model/device_adapters.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "base/error.h"

namespace plumb {
namespace {

// Calls f(pair) for every pair of the adapter that is there.
template <class F>
void for_pairs(const Adapter& adapter, F&& f) {
  for (const LayerLora& layer : adapter.layers) {
    LayerLora pairs = layer;  // visit_lora wants to change what it visits
    LayerLoraGrad unused;
    visit_lora(pairs, unused, [&](const std::string&, LoraPair& p, LoraGrad&) {
      if (p.defined()) f(p);
    });
  }
}

int padded_rank(const AdapterBatch& batch) {
  int64_t rank = 0;
  for (const auto& part : batch.parts)
    for_pairs(*part.adapter, [&](const LoraPair& p) { rank = std::max(rank, p.a.size(0)); });
  return static_cast<int>((rank + 3) / 4 * 4);
}

// a [r, in] -> [rank, in]; b [out, r] -> [out, rank], at `to`, which holds zeros.
void pad_a(const Tensor& a, const Tensor& to) { std::copy_n(a.f32(), a.numel(), to.f32()); }
void pad_b(const Tensor& b, const Tensor& to) {
  for (int64_t o = 0; o < b.size(0); ++o) std::copy_n(b.f32() + o * b.size(1), b.size(1), to.f32() + o * to.size(1));
}
void add_unpadded_a(const Tensor& from, const Tensor& a) {
  for (int64_t i = 0; i < a.numel(); ++i) a.f32()[i] += from.f32()[i];
}
void add_unpadded_b(const Tensor& from, const Tensor& b) {
  for (int64_t o = 0; o < b.size(0); ++o)
    for (int64_t j = 0; j < b.size(1); ++j) b.f32()[o * b.size(1) + j] += from.f32()[o * from.size(1) + j];
}

// Pairs of the same sizes (a single one, or those of a layer's experts), one behind the other.
std::vector<LoraPair> upload_pairs(const std::vector<LoraPair>& pairs, int rank) {
  const int64_t count = static_cast<int64_t>(pairs.size());
  if (count == 0 || !pairs[0].defined()) return pairs;
  const int64_t in = pairs[0].a.size(1), out = pairs[0].b.size(0);
  const Tensor a = Tensor::zeros({count * rank, in}), b = Tensor::zeros({count * out, rank});
  for (int64_t i = 0; i < count; ++i) {
    PLUMB_CHECK(pairs[i].defined() && pairs[i].a.size(1) == in && pairs[i].b.size(0) == out,
                "the experts of a layer are adapted alike");
    pad_a(pairs[i].a, a.rows(i * rank, (i + 1) * rank));
    pad_b(pairs[i].b, b.rows(i * out, (i + 1) * out));
  }
  const Tensor device_a = to_device(a), device_b = to_device(b);
  std::vector<LoraPair> result;
  for (int64_t i = 0; i < count; ++i)
    result.push_back({device_a.rows(i * rank, (i + 1) * rank), device_b.rows(i * out, (i + 1) * out), pairs[i].scale});
  return result;
}

// Calls f(members of a layer's pairs, the same of its gradients) for each single pair and each list of experts' pairs.
template <class P, class E, class G, class H, class F>
void for_lists(LoraPart<P, E>& pairs, LoraPart<G, H>& grads, F&& f) {
  f(pairs.wq_a, grads.wq_a), f(pairs.wq_b, grads.wq_b), f(pairs.wkv, grads.wkv);
  f(pairs.wo_a, grads.wo_a), f(pairs.wo_b, grads.wo_b);
  f(pairs.compressor_wkv, grads.compressor_wkv), f(pairs.compressor_wgate, grads.compressor_wgate);
  f(pairs.shared_w1, grads.shared_w1), f(pairs.shared_w3, grads.shared_w3), f(pairs.shared_w2, grads.shared_w2);
}

std::shared_ptr<const Adapter> upload(const Adapter& from, int rank) {
  auto to = std::make_shared<Adapter>(from);
  for (LayerLora& layer : to->layers) {
    for_lists(layer, layer, [&](LoraPair& pair, LoraPair&) { pair = upload_pairs({pair}, rank)[0]; });
    layer.experts.gate_up = upload_pairs(layer.experts.gate_up, rank);
    layer.experts.down = upload_pairs(layer.experts.down, rank);
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
  if (!c.copy) c = {from, upload(*from, rank)};
  return c.copy;
}

LoraGrad zero_grad(const LoraPair& device, const LoraGrad& wanted) {
  return {wanted.a.defined() ? zeros_like(device.a) : Tensor(), wanted.b.defined() ? zeros_like(device.b) : Tensor()};
}

// Gradients on the device for those that the host wants; the experts' lie one behind the other like the pairs.
std::vector<LoraGrad> zero_grads(const std::vector<LoraPair>& device, const std::vector<LoraGrad>& wanted) {
  std::vector<LoraGrad> grads;
  if (device.empty() || wanted.empty() || !device[0].defined()) return grads;
  const int64_t count = static_cast<int64_t>(device.size()), rank = device[0].a.size(0), out = device[0].b.size(0);
  const Tensor a = Tensor::zeros({count * rank, device[0].a.size(1)}, DType::f32, Space::device);
  const Tensor b = Tensor::zeros({count * out, rank}, DType::f32, Space::device);
  for (int64_t i = 0; i < count; ++i)
    grads.push_back({wanted[i].a.defined() ? a.rows(i * rank, (i + 1) * rank) : Tensor(),
                     wanted[i].b.defined() ? b.rows(i * out, (i + 1) * out) : Tensor()});
  return grads;
}

void add_back(const LoraGrad& device, const LoraGrad& host) {
  if (host.a.defined() && device.a.defined()) add_unpadded_a(to_host(device.a), host.a);
  if (host.b.defined() && device.b.defined()) add_unpadded_b(to_host(device.b), host.b);
}
void add_back(const std::vector<LoraGrad>& device, const std::vector<LoraGrad>& host) {
  for (size_t i = 0; i < device.size(); ++i) add_back(device[i], host[i]);
}

}  // namespace

DeviceAdapters::DeviceAdapters(const AdapterBatch& host) : host_(host) {
  const int rank = padded_rank(host);
  for (const AdapterBatch::Part& part : host.parts) {
    AdapterBatch::Part& copy = batch_.parts.emplace_back(part);
    copy.adapter = part.grads ? upload(*part.adapter, rank) : kept_copy(part.adapter, rank);
    std::unique_ptr<AdapterGrads>& grads = grads_.emplace_back();
    if (!part.grads) continue;
    grads = std::make_unique<AdapterGrads>();
    grads->layers.resize(part.grads->layers.size());
    for (size_t l = 0; l < grads->layers.size(); ++l) {
      LayerLora pairs = copy.adapter->layers[l];
      LayerLoraGrad wanted = part.grads->layers[l];
      for_lists(wanted, grads->layers[l], [](LoraGrad& from, LoraGrad& to) { to = from; });
      for_lists(pairs, grads->layers[l], [](LoraPair& pair, LoraGrad& grad) { grad = zero_grad(pair, grad); });
      grads->layers[l].experts = {zero_grads(pairs.experts.gate_up, wanted.experts.gate_up),
                                  zero_grads(pairs.experts.down, wanted.experts.down)};
    }
    copy.grads = grads.get();
  }
}

void DeviceAdapters::add_gradients() const {
  for (size_t i = 0; i < grads_.size(); ++i) {
    if (!grads_[i]) continue;
    for (size_t l = 0; l < grads_[i]->layers.size(); ++l) {
      LayerLoraGrad &device = grads_[i]->layers[l], &host = host_.parts[i].grads->layers[l];
      for_lists(device, host, [](LoraGrad& from, LoraGrad& to) { add_back(from, to); });
      add_back(device.experts.gate_up, host.experts.gate_up);
      add_back(device.experts.down, host.experts.down);
    }
  }
}

}  // namespace plumb
