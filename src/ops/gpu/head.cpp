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

std::vector<Drawn> draw_tokens(const Logits& logits, const std::vector<Draw>& draws) {
  const size_t count = draws.size();
  if (count == 0) return {};
  std::vector<hd::Draw> list;
  for (const Draw& d : draws) list.push_back({d.u, d.row, d.temperature, d.min_p, logits.normaliser[d.row].highest});
  const Tensor there = workspace(count * sizeof(hd::Draw)), found = workspace(count * sizeof(hd::Drawn));
  copy_bytes(there, Tensor::over(std::as_writable_bytes(std::span(list)).data(), there.shape(), DType::u8, nullptr));
  hd::draw(f32(logits.value), static_cast<int>(logits.value.size(1)), reinterpret_cast<const hd::Draw*>(there.raw()),
           static_cast<int>(count), reinterpret_cast<hd::Drawn*>(found.raw()), kStream);
  const Tensor here = to_host(found);
  std::vector<Drawn> drawn;
  for (const hd::Drawn& d : std::span(reinterpret_cast<const hd::Drawn*>(here.raw()), count))
    drawn.push_back({{d.found.token, d.found.logit}, d.total});
  return drawn;
}

std::vector<TokenLogit> most_likely_tokens(const Logits& logits, int count) {
  const int rows = rows_of(logits.value);
  if (rows == 0) return {};
  const size_t all = static_cast<size_t>(rows) * count;
  const Tensor found = workspace(all * sizeof(hd::TokenLogit));
  hd::best(f32(logits.value), rows, static_cast<int>(logits.value.size(1)), count,
           reinterpret_cast<hd::TokenLogit*>(found.raw()), logits.tiles.raw(), kStream);
  const Tensor here = to_host(found);
  std::vector<TokenLogit> tokens;
  for (const hd::TokenLogit& t : std::span(reinterpret_cast<const hd::TokenLogit*>(here.raw()), all))
    tokens.push_back({t.token, t.logit});
  return tokens;
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
