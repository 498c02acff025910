#include "ops/head.h"

#include <algorithm>

#include "kernels/head/divergence.h"
#include "kernels/head/draw.h"
#include "kernels/head/head.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

namespace hd = kernels::head;

hd::Weight weight_of(const Linear& head) {
  if (head.format != WeightFormat::bf16)
    fail("head", "an LM head of FP32 on the GPU", "use a checkpoint in bf16, or kernels = \"reference\"");
  return {bf16(head.data), head.out, head.in};
}
int rows_of(const Tensor& hidden) { return static_cast<int>(hidden.size(0)); }

struct LogProbabilities {
  Tensor value, normaliser;  // device: f32 [rows], [rows, 2]
};
LogProbabilities log_probabilities(const Tensor& hidden, const Linear& head, const Tensor& target) {
  const int rows = rows_of(hidden);
  LogProbabilities p{empty({rows}, DType::f32), empty({rows, 2}, DType::f32)};
  const Tensor memory = workspace(hd::workspace_bytes(rows, head.out));
  hd::log_probabilities(bf16(hidden), rows, weight_of(head), i32(target), f32(p.value),
                        reinterpret_cast<hd::Normaliser*>(p.normaliser.raw()), memory.raw(), kStream);
  return p;
}

}  // namespace

Logits head_logits(const Tensor& hidden, const Linear& head) {
  const int rows = rows_of(hidden);
  Logits result{empty({rows, head.out}, DType::f32), {}, {}};
  if (rows == 0) return result;
  const Tensor normaliser = empty({rows, 2}, DType::f32);
  result.tiles = workspace(hd::workspace_bytes(rows, head.out));
  hd::logits(bf16(hidden), rows, weight_of(head), f32(result.value),
             reinterpret_cast<hd::Normaliser*>(normaliser.raw()), result.tiles.raw(), kStream);
  const Tensor pairs = to_host(normaliser);
  for (int r = 0; r < rows; ++r) result.normaliser.push_back({pairs.f32()[2 * r], pairs.f32()[2 * r + 1]});
  return result;
}

namespace {

std::vector<TokenLogit> tokens_of(const Tensor& found) {
  const Tensor host = to_host(found);
  const auto* token = reinterpret_cast<const hd::TokenLogit*>(host.raw());
  std::vector<TokenLogit> tokens;
  for (int64_t i = 0; i < host.numel() / 2; ++i) tokens.push_back({token[i].token, token[i].logit});
  return tokens;
}
hd::TokenLogit* result_of(const Tensor& t) { return reinterpret_cast<hd::TokenLogit*>(t.raw()); }

}  // namespace

std::vector<TokenLogit> draw_tokens(const Logits& logits, const std::vector<Draw>& draws) {
  const int count = static_cast<int>(draws.size());
  if (count == 0) return {};
  const Tensor list = Tensor::empty({static_cast<int64_t>(count * sizeof(hd::Draw))}, DType::u8);
  for (int i = 0; i < count; ++i) {
    const Draw& d = draws[i];
    reinterpret_cast<hd::Draw*>(list.raw())[i] = {d.u, d.row, d.temperature, d.min_p, logits.normaliser[d.row].highest};
  }
  const Tensor there = to_device(list), found = empty({count, 2}, DType::i32);
  hd::draw(f32(logits.value), static_cast<int>(logits.value.size(1)), reinterpret_cast<const hd::Draw*>(there.raw()),
           count, result_of(found), kStream);
  return tokens_of(found);
}

std::vector<TokenLogit> most_likely_tokens(const Logits& logits, int count) {
  const int rows = rows_of(logits.value);
  if (rows == 0) return {};
  const Tensor found = empty({rows, count, 2}, DType::i32);
  hd::best(f32(logits.value), rows, static_cast<int>(logits.value.size(1)), count, result_of(found), logits.tiles.raw(),
           kStream);
  return tokens_of(found);
}

Tensor head_logprobs(const Tensor& hidden, const Linear& head, const std::vector<int>& target) {
  if (rows_of(hidden) == 0) return Tensor::empty({0});
  return to_host(log_probabilities(hidden, head, upload(target)).value);
}

Tensor head_logprobs_backward(const Tensor& d_logprob, const Tensor& hidden, const Linear& head,
                              const std::vector<int>& target, const Tensor& d_head, Tensor* logprobs) {
  if (d_head.defined()) not_on_gpu("training of the LM head");
  const int rows = rows_of(hidden);
  Tensor d_hidden = empty(hidden.shape(), DType::f32);
  if (logprobs) *logprobs = Tensor::empty({rows});
  if (rows == 0) return d_hidden;
  constexpr int kChunk = 2048;  // rows whose gradients of logits exist at a time: 530 MB at 129,280 tokens
  const int chunk = std::min(kChunk, rows);
  const Tensor targets = upload(target), d = to_device(d_logprob);
  const LogProbabilities p = log_probabilities(hidden, head, targets);
  const Tensor memory = workspace(hd::backward_workspace_bytes(chunk, head.out));
  hd::log_probabilities_backward(f32(d), bf16(hidden), rows, weight_of(head), i32(targets),
                                 reinterpret_cast<const hd::Normaliser*>(p.normaliser.raw()), chunk, f32(d_hidden),
                                 nullptr, memory.raw(), kStream);
  if (logprobs) *logprobs = to_host(p.value);
  return d_hidden;
}

// ---- divergence
namespace {

// -> [rows] on the device; d_hidden is assigned if d_divergence is defined.
Tensor divergence(Divergence kind, const HeadRows& student, const HeadRows& teacher, const Tensor& d_divergence,
                  const Tensor& d_hidden) {
  constexpr int kChunk = 512;  // rows whose logits exist at a time: 660 MB with their gradients at 129,280 tokens
  const int rows = rows_of(student.hidden), chunk = std::min(kChunk, rows);
  const Tensor value = empty({rows}, DType::f32);
  const Tensor memory = workspace(hd::divergence_workspace_bytes(chunk, student.head.out));
  const auto model = [](const HeadRows& m) { return hd::Model{bf16(m.hidden), weight_of(m.head)}; };
  hd::divergence(kind == Divergence::reverse_kl ? hd::Divergence::reverse_kl : hd::Divergence::forward_kl,
                 model(student), model(teacher), rows, chunk, f32(value), f32(d_divergence), f32(d_hidden),
                 memory.raw(), kStream);
  return value;
}

}  // namespace

Tensor head_divergence(Divergence kind, const HeadRows& student, const HeadRows& teacher) {
  if (rows_of(student.hidden) == 0) return Tensor::empty({0});
  return to_host(divergence(kind, student, teacher, {}, {}));
}

Tensor head_divergence_backward(Divergence kind, const Tensor& d_divergence, const HeadRows& student,
                                const HeadRows& teacher, const Tensor& d_head, Tensor* result) {
  if (d_head.defined()) not_on_gpu("training of the LM head");
  Tensor d_hidden = empty(student.hidden.shape(), DType::f32);
  const bool any = rows_of(student.hidden) > 0;
  const Tensor value = any ? divergence(kind, student, teacher, to_device(d_divergence), d_hidden) : Tensor();
  if (result) *result = any ? to_host(value) : Tensor::empty({0});
  return d_hidden;
}

}  // namespace plumb::ops::gpu
