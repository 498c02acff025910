// LoRA adapters as the forward pass uses them: FP32 pairs per matrix, unmerged in training and in serving alike.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "ops/moe.h"

namespace plumb {

// P = LoraPair: the adapter of one layer; P = LoraGrad: its gradients. An undefined pair = target not adapted.
template <class P, class Experts>
struct LoraPart {
  P wq_a, wq_b, wkv;
  P wo_a;  // one A [r, H*c/g] for all groups; b [g*d_g, r], the rows of group g meet group g's input only
  P wo_b;
  P compressor_wkv, compressor_wgate;
  P shared_w1, shared_w3, shared_w2;
  Experts experts;
};
using LayerLora = LoraPart<LoraPair, ops::ExpertLora>;
using LayerLoraGrad = LoraPart<LoraGrad, ops::ExpertLoraGrad>;

struct Adapter {
  int rank = 0;
  float alpha = 0;
  std::vector<std::string> targets;  // canonical names, see lora_targets()
  std::vector<LayerLora> layers;     // backbone layers
};
struct AdapterGrads {
  std::vector<LayerLoraGrad> layers;
};
AdapterGrads zero_grads(const Adapter& adapter);  // for all of its pairs, in the host's memory

// Which adapter each row of a batch uses. Rows that are in no part use the base model.
struct AdapterBatch {
  struct Part {
    std::shared_ptr<const Adapter> adapter;
    std::vector<int> rows;          // ascending; ignored if all
    bool all = true;                // every row of the batch
    AdapterGrads* grads = nullptr;  // where a backward pass adds, or nullptr
  };
  std::vector<Part> parts;
};

// Calls f(suffix, pair, grad) for every pair of a layer; suffix as in the released names ("attn.wq_a",
// "ffn.shared_experts.w1", "ffn.experts.5.gate_up", "ffn.experts.5.w2").
template <class F>
void visit_lora(LayerLora& p, LayerLoraGrad& g, F&& f);

// The eleven targets of the reference trainer: q_a_proj, q_b_proj, kv_proj, o_a_proj, o_b_proj, compressor.kv_proj,
// compressor.gate_proj, gate_proj, up_proj, down_proj, experts.
const std::vector<std::string>& lora_targets();

template <class F>
void visit_lora(LayerLora& p, LayerLoraGrad& g, F&& f) {
  f("attn.wq_a", p.wq_a, g.wq_a);
  f("attn.wq_b", p.wq_b, g.wq_b);
  f("attn.wkv", p.wkv, g.wkv);
  f("attn.wo_a", p.wo_a, g.wo_a);
  f("attn.wo_b", p.wo_b, g.wo_b);
  f("attn.compressor.wkv", p.compressor_wkv, g.compressor_wkv);
  f("attn.compressor.wgate", p.compressor_wgate, g.compressor_wgate);
  f("ffn.shared_experts.w1", p.shared_w1, g.shared_w1);
  f("ffn.shared_experts.w3", p.shared_w3, g.shared_w3);
  f("ffn.shared_experts.w2", p.shared_w2, g.shared_w2);
  g.experts.gate_up.resize(p.experts.gate_up.size());
  g.experts.down.resize(p.experts.down.size());
  for (size_t e = 0; e < p.experts.gate_up.size(); ++e)
    f("ffn.experts." + std::to_string(e) + ".gate_up", p.experts.gate_up[e], g.experts.gate_up[e]);
  for (size_t e = 0; e < p.experts.down.size(); ++e)
    f("ffn.experts." + std::to_string(e) + ".w2", p.experts.down[e], g.experts.down[e]);
}

}  // namespace plumb
