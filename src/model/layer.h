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
#include "ops/rope.h"
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
  const AdapterBatch* adapters = nullptr;
  std::vector<LayerCache>* cache = nullptr;
  Taps* taps = nullptr;
  std::vector<float> compressed_freq;                 // of the layers of ratio > 0, for the positions of entries
  ops::RotaryTable window_rotary, compressed_rotary;  // of the rows in layers of ratio 0 and in the others
  std::map<int, Tensor> replay;                       // layer -> i32 [rows,K] experts that replace the router's choice
};
PassContext make_context(const ModelConfig& config, const SequencePlan& plan, Numerics numerics);

struct CompressorSaved {
  ops::ProjectedRows rows;
  Tensor pooled;  // [new entries, c] before the norm
};
struct AttentionSaved {
  Tensor x;       // [T, d] input
  Tensor qa, qr;  // [T, d_q] before and after q_norm
  Tensor qb, q;   // [T, H, c] before the head norm; as the core meets it
  Tensor kva;     // [T, c] before kv_norm
  Tensor keys;    // key buffer
  CompressorSaved main, index;
  Tensor iq, iw, ik;  // indexer's queries, weights, key buffer
  KeyLists selected;  // entries that each row attends to
  KeyLists lists;
  ops::AttentionResult core;
  Tensor turned;  // [T, H, c] core.o rotated back
  Tensor u;       // [T, g*d_g] output of wo_a
};

struct LayerSaved {  // what the backward pass of a layer needs
  ops::HyperMix mix_attn, mix_ffn;
  Tensor y_attn, y_ffn;  // [T,d] contraction of the streams, before the norm
  AttentionSaved attn;
  Tensor a;      // [T,d] output of the attention
  Tensor mid;    // [T,n,d] streams between the halves
  Tensor x_ffn;  // [T,d] normed input of the experts
  ops::Routing routing;
  std::vector<ops::ExpertHidden> routed;  // [E]
  ops::ExpertHidden shared;
  Tensor f;  // [T,d] output of the experts
};

// x [T,d] (normed) -> [T,d].
Tensor attention_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x, AttentionSaved& s);
// -> dx [T,d]. grads may have undefined members (frozen).
Tensor attention_backward(const PassContext& ctx, const LayerWeights& w, int layer, const AttentionSaved& s,
                          const Tensor& d_out, LayerGrads& grads, const AuxiliaryLosses& aux,
                          AuxiliaryResults& results);

// streams [T,n,d] -> [T,n,d]; keep: filled for layer_backward, or nullptr
Tensor layer_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                     LayerSaved* keep = nullptr);
// Goes back through the layer. -> gradient of the input streams. kept: what layer_forward kept, or nullptr: the layer
// is recomputed from its input streams first (the same bits).
Tensor layer_backward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                      const Tensor& d_next, LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results,
                      const LayerSaved* kept = nullptr);

// The adapters of one matrix of one layer, and where their gradients go (the same order).
LoraList lora_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair);
std::vector<LoraGrad> lora_grads_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair,
                                    LoraGrad LayerLoraGrad::*grad);

}  // namespace plumb
