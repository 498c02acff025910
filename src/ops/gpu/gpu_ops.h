// The ops on device tensors: each has the contract of the op of the same name in src/ops, which calls it when its input
// is on the device. Results are device tensors: bf16 where the released profile rounds to a format that bf16 holds,
// FP32 elsewhere. Defined where there is CUDA only.
#pragma once
#include "ops/attention.h"
#include "ops/compressor.h"
#include "ops/draw.h"
#include "ops/grouped_output.h"
#include "ops/head.h"
#include "ops/head_divergence.h"
#include "ops/indexer.h"
#include "ops/mixture.h"
#include "ops/parameters.h"
#include "ops/plan_tensors.h"
#include "ops/rows.h"
#include "ops/sublayer.h"
#include "ops/vectors.h"

namespace plumb::ops::gpu {

// rows.cpp
Tensor embed(const Linear& table, const Tensor& token, int64_t copies);
Tensor gather_rows(const Tensor& x, const Tensor& row);
void scatter_add_rows(const Tensor& dy, const Tensor& row, const Tensor& into);
void copy_rows(const Tensor& from, const RowCopy& copy, const Tensor& to);
void add(const std::vector<Tensor>& terms, const Tensor& into);
Tensor scaled(const Tensor& x, float factor);
Tensor converted(const Tensor& x, DType type);  // f32 <-> bf16

// vectors.cpp
RotaryTable rotary_table(const std::vector<int>& position, const std::vector<float>& freq);
Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps, const RoundAt& at);
Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, float eps, const Tensor& dweight);
Tensor finish_vectors(const Tensor& x, const Tensor& weight, const RotaryTable& table, const VectorSteps& steps);
Tensor finish_vectors_backward(const Tensor& d_y, const Tensor& x, const Tensor& weight, const RotaryTable& table,
                               const VectorSteps& steps, const Tensor& dweight);

// plan_buffers.cpp
PlanTensors plan_tensors(const SequencePlan& plan, const RotaryFrequencies& frequencies, int index_topk);

// linear.cpp
Tensor linear(const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints& points,
              Tensor* low_rank = nullptr);
void low_rank_together(const Tensor& x, const std::vector<WayDown>& downs);
Tensor linear_backward(const Tensor& dy, const Tensor& x, const Linear& w, const LoraList& lora,
                       const LinearPoints& points, const std::vector<LoraGrad>& lora_grads, const Tensor& dw,
                       const Tensor& low_rank);
Tensor grouped_output(const Tensor& x, const GroupedWeight& w, const LoraList& lora, const RoundAt& at,
                      Tensor* low_rank);
Tensor grouped_output_backward(const Tensor& dy, const Tensor& x, const GroupedWeight& w, const LoraList& lora,
                               const std::vector<LoraGrad>& lora_grads, const Tensor& dw, const Tensor& low_rank);

// attention.cpp
RowLists merge_keys(const RowLists& window, const RowLists& entries, int key_rows);
Tensor empty_index_keys(int64_t entries, int64_t width);
Tensor index_values(const Tensor& vectors);
RowLists select_entries(const Tensor& q, const Tensor& w, const Tensor& keys, const Visibility& visible, int topk);
IndexerLossGrad indexer_loss(const IndexerLoss& options, const Tensor& q, const Tensor& w, const Tensor& keys,
                             const RowLists& valid, const Tensor& attn_q, const Tensor& attn_entries,
                             const Tensor& joint_lse);
RotatedAttention rotated_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                   const RotaryTable& table, Numerics numerics);
AttentionGrad rotated_attention_backward(const Tensor& d_turned, const Tensor& q, const Tensor& keys,
                                         const RowLists& lists, const Tensor& sink, const RotaryTable& table,
                                         const RotatedAttention& forward, const Tensor& d_sink);
Tensor pool_entries(const Compression& compression, const ProjectedRows& rows, const Tensor& ape, const RoundAt& at);
void pool_entries_backward(const Compression& compression, const ProjectedRows& rows, const Tensor& ape,
                           const Tensor& d_entries, const Tensor& d_kv, const Tensor& d_gate, const Tensor& d_ape);

// sublayer.cpp
SublayerInput enter_sublayer(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics);
Tensor leave_sublayer(const Tensor& out, const Tensor& streams, const HyperMix& mix, Numerics numerics);
Tensor pass_boundary(const Tensor& out, const Tensor& streams, const HyperMix& mix, const SublayerWeights& next,
                     const HyperOptions& o, Numerics numerics, SublayerInput& next_input);
LeaveGrad leave_sublayer_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix);
Tensor enter_sublayer_backward(const Tensor& d_x, const LeaveGrad& leave, const Tensor& streams,
                               const SublayerWeights& w, const HyperOptions& o, const SublayerInput& input,
                               const HyperGrads& grads, const Tensor& d_norm);
Tensor head_input(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics);
Tensor head_input_backward(const Tensor& d_hidden, const Tensor& streams, const SublayerWeights& w,
                           const HyperOptions& o, Numerics numerics, const HyperGrads& grads, const Tensor& d_norm);

// mixture.cpp
Routing route(const Tensor& x, const Tensor& token, const RouterWeights& w, const RouterOptions& o,
              const Tensor& forced);
Tensor route_backward(const Tensor& d_weight, const Tensor& d_score_extra, const Tensor& x, const RouterWeights& w,
                      const Routing& r, const RouterOptions& o, const Tensor& d_gate);
double balance_loss(const Routing& r, const std::vector<int>& document, float coefficient, const Tensor& d_score);
Tensor mixture(const Tensor& x, const Routing& r, const MixtureWeights& w, const MixtureLora& lora, Numerics numerics,
               MixtureSaved* saved);
RoutedBackward mixture_backward(const Tensor& d_sum, const Tensor& x, const Routing& r, const MixtureWeights& w,
                                const MixtureLora& lora, Numerics numerics, const MixtureGrads& grads,
                                const MixtureSaved& saved);

// head.cpp; log-probabilities are host tensors, what the layers above read
Logits head_logits(const Tensor& hidden, const Linear& head);
Tensor head_logprobs(const Tensor& hidden, const Linear& head, const std::vector<int>& target);
Tensor head_logprobs_backward(const Tensor& d_logprob, const Tensor& hidden, const Linear& head,
                              const std::vector<int>& target, const Tensor& d_head, Tensor* logprobs);
std::vector<Drawn> draw_tokens(const Logits& logits, const std::vector<Draw>& draws);
std::vector<TokenLogit> most_likely_tokens(const Logits& logits, int count);

// parameters.cpp
ParameterTable parameter_table(const std::vector<ParameterTensors>& parameters);
double gradient_norm(const ParameterTable& table);
void adamw(const ParameterTable& table, const AdamWStep& step);

Tensor head_divergence(Divergence kind, const HeadRows& student, const HeadRows& teacher);
Tensor head_divergence_backward(Divergence kind, const Tensor& d_divergence, const HeadRows& student,
                                const HeadRows& teacher, const Tensor& d_head, Tensor* divergence);

}  // namespace plumb::ops::gpu
