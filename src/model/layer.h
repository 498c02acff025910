// One decoder layer, forward and backward: attention.cpp has the first half, layer.cpp the whole.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "model/lora.h"
#include "model/weights.h"
#include "ops/attention.h"
#include "ops/compressor.h"
#include "ops/indexer.h"
#include "ops/mixture.h"
#include "ops/plan_tensors.h"
#include "ops/sublayer.h"
#include "plan/sequence_plan.h"

namespace plumb {

// Named intermediate values of a forward pass, for tests, `plumb score --dump-layers` and routing replay. Names of
// layer N: q.N kv.N ckv.N iq.N iw.N ik.N o.N mid.N streams.N route_weights.N (f32), routed.N selected.N (i64).
struct Taps {
  std::map<std::string, Tensor> values;
  bool choices_only = false;  // only routed.N and selected.N
};

// What one layer keeps of the past when decoding. Slots are given out by the plan (CacheSlots).
struct LayerCache {
  Tensor keys;                      // [key_rows + entries, c]: window keys, then compressed entries
  Tensor index_keys;                // [csa entries, cI]; kind csa
  Tensor pending_kv, pending_gate;  // projected rows of open compression windows [slots, co*c]
  Tensor index_pending_kv, index_pending_gate;
};

// Losses that a layer adds by itself, spec 4.3 and 4.6.
struct AuxiliaryLosses {
  ops::IndexerLoss indexer;  // coefficient 0: none
  float balance = 0;         // coefficient of the sequence-wise balance loss
};
struct AuxiliaryResults {  // of all layers visited, without coefficients
  double indexer = 0, balance = 0;
  std::vector<std::vector<int64_t>> expert_rows;  // [layer][expert]: rows routed to it
};

// Everything that is the same for all layers of a pass.
struct PassContext {
  const ModelConfig& config;
  const SequencePlan& plan;
  Numerics numerics;
  ops::PlanTensors tensors;  // what ops read of the plan
  const AdapterBatch* adapters = nullptr;
  std::vector<LayerCache>* cache = nullptr;
  Taps* taps = nullptr;
  std::map<int, Tensor> replay;  // layer -> i32 [rows,K] experts that replace the router's choice
};
// space: where the pass is computed.
PassContext make_context(const ModelConfig& config, const SequencePlan& plan, Numerics numerics,
                         Space space = Space::host);

struct CompressorSaved {
  ops::ProjectedRows rows;
  Tensor pooled;  // [new entries, c] before the norm
  Tensor low_rank_kv, low_rank_gate;
};
struct AttentionSaved {
  Tensor x;       // [T, d] input
  Tensor qa, qr;  // [T, d_q] before and after q_norm
  Tensor qb, q;   // [T, H, c] before the head norm; as the core meets it
  Tensor kva;     // [T, 1, c] before kv_norm
  Tensor keys;    // key buffer
  CompressorSaved main, index;
  Tensor iq, iw, ik;       // indexer's queries, weights, key buffer
  ops::RowLists selected;  // kind csa: entries that each row attends to
  ops::RowLists lists;
  ops::RotatedAttention core;
  Tensor u;  // [T, g*d_g] output of wo_a
  // x A^T of the products' adapters, see ops::linear.
  Tensor low_rank_wq_a, low_rank_wq_b, low_rank_wkv, low_rank_wo_a, low_rank_wo_b;
};

struct LayerSaved {  // what the backward pass of a layer needs
  ops::SublayerInput in_attn, in_ffn;
  AttentionSaved attn;
  Tensor a;    // [T,d] output of the attention
  Tensor mid;  // [T,n,d] streams between the halves
  ops::Routing routing;
  ops::MixtureSaved experts;
  Tensor f;  // [T,d] output of the experts
};

// What a layer made that is dear to compute and small: with it a recomputation leaves out the indexer, wo_a, wo_b and
// the whole mixture (whose backward pass makes its hidden rows itself).
struct LayerOutputs {
  ops::RowLists selected;  // kind csa
  Tensor u;                // [T, g*d_g] output of wo_a
  Tensor a, f;             // [T,d] outputs of the two halves
  Tensor low_rank_wo_a, low_rank_wo_b;
};

// x [T,d] (normed) -> [T,d]. known: outputs of an earlier run with the same input, or empty.
Tensor attention_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x, AttentionSaved& s,
                         const LayerOutputs& known = {});
// -> dx [T,d]. grads may have undefined members (frozen).
Tensor attention_backward(const PassContext& ctx, const LayerWeights& w, int layer, const AttentionSaved& s,
                          const Tensor& d_out, LayerGrads& grads, const AuxiliaryLosses& aux,
                          AuxiliaryResults& results);

// streams [T,n,d] -> [T,n,d]. s: what the layer made; enough for layer_backward if keep_hidden.
Tensor layer_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams, LayerSaved& s,
                     bool keep_hidden = false);
LayerOutputs outputs_of(const LayerSaved& s);
// What the backward pass needs, computed again from the input streams: the same bits. known: from the layer's forward
// pass, or empty.
LayerSaved recompute_layer(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                           LayerOutputs known, const AuxiliaryLosses& aux);
// Goes back through the layer. -> gradient of the input streams. s: from layer_forward or recompute_layer.
Tensor layer_backward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                      const Tensor& d_next, LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results,
                      const LayerSaved& s);

HyperOptions hyper_options(const ModelConfig& config);
ops::RotaryFrequencies rotary_frequencies(const ModelConfig& config);

// The adapters of one matrix of one layer, and where their gradients go (the same order).
LoraList lora_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair);
std::vector<LoraGrad> lora_grads_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair,
                                    LoraGrad LayerLoraGrad::*grad);

}  // namespace plumb
