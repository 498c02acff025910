#include "memory/device_weights.h"

#include "base/error.h"
#include "ops/device.h"

namespace plumb {
namespace {

Tensor upload(const Tensor& t) { return t.defined() ? to_device(t) : Tensor(); }
HyperWeights upload(const HyperWeights& w) { return {upload(w.fn), upload(w.base), upload(w.scale)}; }

CompressorPart<Linear> upload(const CompressorPart<Linear>& w, const std::string& name) {
  if (!w.wkv.defined()) return {};
  return {ops::upload_bf16(w.wkv, name + "wkv"), ops::upload_bf16(w.wgate, name + "wgate"), upload(w.ape),
          upload(w.norm)};
}

LayerWeights upload(const LayerWeights& w, int groups, const std::string& name) {
  const std::string a = name + "attn.", m = name + "ffn.";
  LayerWeights d;
  d.kind = w.kind;
  d.attn.wq_a = ops::upload_linear(w.attn.wq_a, a + "wq_a");
  d.attn.wq_b = ops::upload_linear(w.attn.wq_b, a + "wq_b");
  d.attn.wkv = ops::upload_linear(w.attn.wkv, a + "wkv");
  d.attn.wo_a = ops::upload_bf16(w.attn.wo_a, a + "wo_a");
  d.attn.wo_b = ops::upload_linear(w.attn.wo_b, a + "wo_b");
  d.attn.q_norm = upload(w.attn.q_norm), d.attn.kv_norm = upload(w.attn.kv_norm), d.attn.sink = upload(w.attn.sink);
  d.attn.compressor = upload(w.attn.compressor, a + "compressor.");
  if (w.kind == LayerKind::csa) {
    d.attn.indexer.wq_b = ops::upload_linear(w.attn.indexer.wq_b, a + "indexer.wq_b");
    d.attn.indexer.weights_proj = ops::upload_bf16(w.attn.indexer.weights_proj, a + "indexer.weights_proj");
    d.attn.indexer.compressor = upload(w.attn.indexer.compressor, a + "indexer.compressor.");
  }
  cut_groups(d, groups);
  d.router = {ops::upload_bf16(w.router.gate, m + "gate"), upload(w.router.bias), upload(w.router.tid2eid)};
  d.experts = ops::upload_experts(w.experts, m + "experts");
  d.shared = ops::upload_experts({w.shared}, m + "shared_experts")[0];
  d.hc_attn = upload(w.hc_attn), d.hc_ffn = upload(w.hc_ffn);
  d.attn_norm = upload(w.attn_norm), d.ffn_norm = upload(w.ffn_norm);
  return d;
}

}  // namespace

DeviceWeights::DeviceWeights(std::shared_ptr<WeightStore> host)
    : host_(std::move(host)), layers_(host_->config().num_hidden_layers) {
  const OuterWeights& w = host_->outer();
  outer_ = {ops::upload_bf16(w.embed, "embed"), ops::upload_bf16(w.head, "head"), upload(w.norm), upload(w.hc_head)};
}

LayerLease DeviceWeights::acquire(int layer) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<const LayerWeights>& w = layers_.at(layer);
  if (!w)
    w = std::make_shared<const LayerWeights>(
        upload(*host_->acquire(layer), host_->config().o_groups, "layers." + std::to_string(layer) + "."));
  return w;
}

const MtpWeights& DeviceWeights::mtp(int) const { fail("mtp", "multi-token prediction has no GPU kernels"); }

PlacedWeights place_weights(std::shared_ptr<ResidentWeights> weights, const std::string& kernels, Numerics numerics) {
  const auto on_cpu = [&](std::string warning) { return PlacedWeights{weights, "CPU", std::move(warning)}; };
  if (kernels == "reference") return on_cpu("");
  const bool must = kernels == "cuda";
  if (numerics != Numerics::released) {
    if (must)
      fail("model.kernels",
           std::string("the GPU kernels do not compute numerics = \"") + numerics_name(numerics) + "\"",
           "use numerics = \"released\" or kernels = \"reference\"");
    return on_cpu("");
  }
  const ops::DeviceStatus device = ops::open_device();
  if (!device.usable) {
    if (must) fail("model.kernels", device.what, "use kernels = \"reference\"");
    return on_cpu(device.present ? "kernels = \"reference\": " + device.what : "");
  }
  const ModelConfig& c = weights->config();
  // The shapes that all kernels share; each op checks its own and names them.
  if (!must && (c.head_dim != 512 || c.qk_rope_head_dim != 64 || c.hidden_size % 256 != 0))
    return on_cpu(
        "kernels = \"reference\": the GPU kernels take heads of 512 with 64 rotated channels, this model has " +
        std::to_string(c.head_dim) + " and " + std::to_string(c.qk_rope_head_dim));
  return {std::make_shared<DeviceWeights>(weights), device.what, device.warning};
}

}  // namespace plumb
