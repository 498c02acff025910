// The weights of a model as the forward pass sees them, and their gradients, under the released names (spec 2.1).
// Matrices stay in the format of the checkpoint; norms, sinks, ape and mHC parameters are FP32.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "ops/hyper_connections.h"
#include "ops/linear.h"
#include "ops/moe.h"

namespace plumb {

// M = Linear: weights. M = Tensor: their gradients, f32, undefined = frozen. The same for all parts below.
template <class M>
struct CompressorPart {
  M wkv, wgate;      // [co*c, d]
  Tensor ape, norm;  // [ratio, co*c], [c]
};
template <class M>
struct IndexerPart {
  M wq_b;                        // [HI*cI, d_q]
  M weights_proj;                // [HI, d]
  CompressorPart<M> compressor;  // c = index_head_dim
};
template <class M>
struct AttentionPart {
  M wq_a, wq_b, wkv;  // [d_q, d], [H*c, d_q], [c, d]
  M wo_a, wo_b;       // [g*d_g, H*c/g], [d, g*d_g]
  Tensor q_norm, kv_norm, sink;
  CompressorPart<M> compressor;  // kinds csa and hca
  IndexerPart<M> indexer;        // kind csa
};

struct LayerWeights {
  LayerKind kind = LayerKind::window;
  AttentionPart<Linear> attn;
  std::vector<Linear> wo_a_group;  // attn.wo_a cut into its groups, [d_g, H*c/g] each; see cut_groups
  RouterWeights router;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
  HyperWeights hc_attn, hc_ffn;
  Tensor attn_norm, ffn_norm;
};
struct LayerGrads {
  AttentionPart<Tensor> attn;
  Tensor gate;                            // router
  std::vector<ops::ExpertGrads> experts;  // [E] or empty
  ops::ExpertGrads shared;
  HyperGrads hc_attn, hc_ffn;
  Tensor attn_norm, ffn_norm;
};

template <class M, class H, class L>
struct MtpPart {  // one multi-token-prediction layer, spec 3.10; embedding and head are the backbone's
  M e_proj, h_proj;
  Tensor enorm, hnorm, norm;
  H hc_head;
  L block;
};
using MtpWeights = MtpPart<Linear, HyperWeights, LayerWeights>;
using MtpGrads = MtpPart<Tensor, HyperGrads, LayerGrads>;

template <class M, class H>
struct OuterPart {  // what is not in a layer
  M embed, head;    // [V, d]
  Tensor norm;
  H hc_head;
};
using OuterWeights = OuterPart<Linear, HyperWeights>;
using OuterGrads = OuterPart<Tensor, HyperGrads>;

// Calls f(name, weight, grad) for every trainable parameter of a layer, weight being a Linear& or a Tensor&, grad its
// Tensor&, and f.buffer(name, tensor) for what is not trained by gradients (gate.bias, gate.tid2eid). Used by loading,
// training and saving, so that the names exist once. prefix: "layers.3." or "mtp.0.".
template <class F>
void visit_layer(const std::string& prefix, bool hash, LayerWeights& w, LayerGrads& g, F&& f);
template <class F>
void visit_outer(OuterWeights& w, OuterGrads& g, F&& f);
template <class F>
void visit_mtp(const std::string& prefix, MtpWeights& w, MtpGrads& g, F&& f);

// Refreshes wo_a_group after attn.wo_a changed. Groups share memory with wo_a where the scale blocks allow it;
// otherwise they are an exact bf16 copy (an e4m3 value times a power of two is a bf16 value).
void cut_groups(LayerWeights& w, int groups);

// How a layer's weights get to where they are used. A lease keeps them there while it lives.
using LayerLease = std::shared_ptr<const LayerWeights>;

class WeightStore {
 public:
  virtual ~WeightStore() = default;
  virtual Space space() const { return Space::host; }  // where the tensors below are, and so all that is computed
  virtual const ModelConfig& config() const = 0;
  virtual const OuterWeights& outer() const = 0;
  // layer < num_hidden_layers: backbone; num_hidden_layers + j: the block of MTP layer j.
  virtual LayerLease acquire(int layer) = 0;
  virtual const MtpWeights& mtp(int j) const = 0;  // its `block` is only valid through acquire
  virtual int mtp_count() const = 0;               // MTP layers that the checkpoint really has
};

// Everything in memory; tensors of a mapped checkpoint are not copied, so the file's pages are the memory.
class ResidentWeights : public WeightStore {
 public:
  ModelConfig model;
  OuterWeights outer_weights;
  std::vector<LayerWeights> layers;
  std::vector<MtpWeights> mtps;

  const ModelConfig& config() const override { return model; }
  const OuterWeights& outer() const override { return outer_weights; }
  LayerLease acquire(int layer) override;
  const MtpWeights& mtp(int j) const override { return mtps.at(j); }
  int mtp_count() const override { return static_cast<int>(mtps.size()); }
};

// Loads all weights of a checkpoint (strictly: Checkpoint has checked names, shapes and scales).
std::shared_ptr<ResidentWeights> load_weights(const Checkpoint& checkpoint);

// ---------------------------------------------------------------------------------------------------------------------------------

namespace detail {
template <class F>
void visit_compressor(const std::string& p, CompressorPart<Linear>& w, CompressorPart<Tensor>& g, F&& f) {
  f(p + "wkv.weight", w.wkv, g.wkv);
  f(p + "wgate.weight", w.wgate, g.wgate);
  f(p + "ape", w.ape, g.ape);
  f(p + "norm.weight", w.norm, g.norm);
}
template <class F>
void visit_expert(const std::string& p, ExpertWeights& w, ops::ExpertGrads& g, F&& f) {
  f(p + "w1.weight", w.w1, g.w1);
  f(p + "w3.weight", w.w3, g.w3);
  f(p + "w2.weight", w.w2, g.w2);
}
template <class F>
void visit_hyper(const std::string& p, HyperWeights& w, HyperGrads& g, F&& f) {
  f(p + "_fn", w.fn, g.fn);
  f(p + "_base", w.base, g.base);
  f(p + "_scale", w.scale, g.scale);
}
}  // namespace detail

template <class F>
void visit_layer(const std::string& prefix, bool hash, LayerWeights& w, LayerGrads& g, F&& f) {
  const std::string a = prefix + "attn.", m = prefix + "ffn.";
  f(prefix + "attn_norm.weight", w.attn_norm, g.attn_norm);
  f(a + "wq_a.weight", w.attn.wq_a, g.attn.wq_a);
  f(a + "q_norm.weight", w.attn.q_norm, g.attn.q_norm);
  f(a + "wq_b.weight", w.attn.wq_b, g.attn.wq_b);
  f(a + "wkv.weight", w.attn.wkv, g.attn.wkv);
  f(a + "kv_norm.weight", w.attn.kv_norm, g.attn.kv_norm);
  f(a + "wo_a.weight", w.attn.wo_a, g.attn.wo_a);
  f(a + "wo_b.weight", w.attn.wo_b, g.attn.wo_b);
  f(a + "attn_sink", w.attn.sink, g.attn.sink);
  if (w.kind != LayerKind::window) detail::visit_compressor(a + "compressor.", w.attn.compressor, g.attn.compressor, f);
  if (w.kind == LayerKind::csa) {
    f(a + "indexer.wq_b.weight", w.attn.indexer.wq_b, g.attn.indexer.wq_b);
    f(a + "indexer.weights_proj.weight", w.attn.indexer.weights_proj, g.attn.indexer.weights_proj);
    detail::visit_compressor(a + "indexer.compressor.", w.attn.indexer.compressor, g.attn.indexer.compressor, f);
  }
  f(prefix + "ffn_norm.weight", w.ffn_norm, g.ffn_norm);
  f(m + "gate.weight", w.router.gate, g.gate);
  if (hash)
    f.buffer(m + "gate.tid2eid", w.router.tid2eid);
  else
    f.buffer(m + "gate.bias", w.router.bias);
  if (g.experts.size() != w.experts.size()) g.experts.resize(w.experts.size());
  for (size_t e = 0; e < w.experts.size(); ++e)
    detail::visit_expert(m + "experts." + std::to_string(e) + ".", w.experts[e], g.experts[e], f);
  detail::visit_expert(m + "shared_experts.", w.shared, g.shared, f);
  detail::visit_hyper(prefix + "hc_attn", w.hc_attn, g.hc_attn, f);
  detail::visit_hyper(prefix + "hc_ffn", w.hc_ffn, g.hc_ffn, f);
}

template <class F>
void visit_outer(OuterWeights& w, OuterGrads& g, F&& f) {
  f("embed.weight", w.embed, g.embed);
  f("head.weight", w.head, g.head);
  f("norm.weight", w.norm, g.norm);
  detail::visit_hyper("hc_head", w.hc_head, g.hc_head, f);
}

template <class F>
void visit_mtp(const std::string& prefix, MtpWeights& w, MtpGrads& g, F&& f) {
  f(prefix + "e_proj.weight", w.e_proj, g.e_proj);
  f(prefix + "h_proj.weight", w.h_proj, g.h_proj);
  f(prefix + "enorm.weight", w.enorm, g.enorm);
  f(prefix + "hnorm.weight", w.hnorm, g.hnorm);
  f(prefix + "norm.weight", w.norm, g.norm);
  detail::visit_hyper(prefix + "hc_head", w.hc_head, g.hc_head, f);
  visit_layer(prefix, false, w.block, g.block, f);
}

}  // namespace plumb
