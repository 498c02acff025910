// The model: one forward pass for training, scoring, prefill and decoding, and its backward pass. forward.cpp is the
// page to read.
#pragma once
#include <memory>
#include <vector>

#include "model/layer.h"
#include "model/weights.h"

namespace plumb {

// The cache of a decoding session: one LayerCache a backbone layer, shaped by the totals of the plan's slots.
struct KvCache {
  std::vector<LayerCache> layers;
};
KvCache make_cache(const ModelConfig& config, const CacheShape& shape, int csa_pending, int hca_pending,
                   Space space = Space::host);

// What a forward pass keeps for the backward pass. The results are the same bits; in bytes a row and layer of Flash on
// a GPU: 32 K, 66 K, about 400 K.
enum class Keep {
  nothing,
  streams,  // each layer's input: all else is recomputed
  outputs,  // and LayerOutputs, which spares the recomputation its last products
  all,      // nothing is recomputed
};

struct ForwardOptions {
  Numerics numerics = Numerics::released;
  const AdapterBatch* adapters = nullptr;
  KvCache* cache = nullptr;  // decoding: keys of the past, and where new ones go
  Taps* taps = nullptr;
  Keep keep = Keep::nothing;
  std::map<int, Tensor> replay;  // forced experts, see PassContext
};
struct ForwardResult {
  Tensor hidden;                      // [wanted, d] normed rows in front of the LM head
  std::vector<Tensor> streams;        // unless Keep::nothing: [T,n,d] before each layer, and after the last
  std::vector<LayerOutputs> outputs;  // Keep::outputs: [layers]
  std::vector<LayerSaved> layers;     // Keep::all: [layers]
};

// What Keep::all costs for a plan of `rows` rows: bytes, within about a tenth.
int64_t kept_layer_bytes(const ModelConfig& config, int64_t rows);

ForwardResult forward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& options);
// The same in a context that exists already.
ForwardResult forward(WeightStore& weights, const PassContext& ctx, Keep keep);

// Gradients of a model; members that are undefined are frozen. Adapters' gradients hang at AdapterBatch::Part::grads.
struct Gradients {
  OuterGrads outer;
  std::vector<LayerGrads> layers;  // [layers] or empty
  std::vector<MtpGrads> mtp;       // [MTP layers] or empty
};

// d_hidden [wanted,d]; d_last [T,n,d] or undefined: a further gradient of the last streams (MTP). Recomputes layer by
// layer what the forward pass did not keep. Layers in front of the first trained parameter are not visited. options:
// those of the forward pass; adapters must not have changed since.
AuxiliaryResults backward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& options,
                          const ForwardResult& result, const Tensor& d_hidden, const Tensor& d_last,
                          Gradients& gradients, const AuxiliaryLosses& aux);

// ---- Multi-token prediction, spec 3.10
// ------------------------------------------------------------------------------------------

// MTP layer j reads the last streams of row i and the next token. plan: documents without their last token(s), whose
// tokens are the NEXT ids; source_row[i]: row of `streams` that row i of the plan reads.
struct MtpInput {
  SequencePlan plan;
  std::vector<int> source_row;
};
MtpInput plan_mtp(const PlanShape& shape, const std::vector<std::vector<int>>& documents);

// last [T,n,d] -> hidden [plan rows, d]; row i predicts the token after next.
Tensor mtp_forward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last,
                   const ForwardOptions& options);
// d_last [T,n,d] += .
void mtp_backward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last, const ForwardOptions& options,
                  const Tensor& d_hidden, const Tensor& d_last, Gradients& gradients, const AuxiliaryLosses& aux,
                  AuxiliaryResults& results);

PlanShape plan_shape(const ModelConfig& config);

}  // namespace plumb
