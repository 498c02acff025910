#include "train/rl_step.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/head.h"
#include "train/step.h"

namespace plumb {
namespace {

// A shared token must not be the one that predicts the first trained token: its row would have several targets.
int shareable_tokens(const RlSample& s) {
  const auto first = std::find(s.mask.begin(), s.mask.end(), 1) - s.mask.begin();
  return std::min(s.prompt, static_cast<int>(first) - 1);
}

// rows: of the sample's tokens.
void add_sample(RlRow& row, const std::vector<int>& rows, int index, const RlSample& sample,
                const SampleWeight& weight) {
  for (size_t p = 1; p < sample.tokens.size(); ++p) {
    if (!sample.mask[p]) continue;
    row.plan.wanted.push_back(rows[p - 1]);
    row.target.push_back(sample.tokens[p]);
    row.tokens.push_back({sample.logprob[p], sample.logprob[p], std::numeric_limits<float>::quiet_NaN(),
                          weight.advantage, weight.weight, index});
    row.origin.push_back({index, static_cast<int>(p)});
  }
}

// Strict (reference_trainer 4.8): a route for every row but the last, and each of them a possible choice.
void check_routes(const RlSample& s, const ReplayShape& shape, int index) {
  const std::string where = "sample " + std::to_string(index);
  const size_t k = static_cast<size_t>(shape.experts_per_token);
  if (s.routed.size() != (s.tokens.size() - 1) * static_cast<size_t>(shape.layers) * k)
    fail(where,
         "has " + std::to_string(s.routed.size()) + " routes for " + std::to_string(s.tokens.size() - 1) + " rows of " +
             std::to_string(shape.layers) + " layers",
         "record them while sampling");
  for (size_t i = 0; i < s.routed.size(); i += k)
    for (size_t a = i; a < i + k; ++a)
      if (s.routed[a] >= shape.experts || std::count(s.routed.begin() + i, s.routed.begin() + a, s.routed[a]) > 0)
        fail(where,
             "was routed to expert " + std::to_string(s.routed[a]) + ", twice or of " + std::to_string(shape.experts),
             "the routes are of another model, or damaged");
}

void begin_replay(RlRow& row, const ReplayShape& shape) {
  const int64_t k = shape.experts_per_token;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const Tensor t = Tensor::empty({row.plan.rows(), k}, DType::i32);
    for (int64_t i = 0; i < t.numel(); ++i) t.ptr<int32_t>()[i] = static_cast<int32_t>(i % k);
    row.replay[layer] = t;
  }
}

// rows: of the sample's tokens.
void add_routes(RlRow& row, const std::vector<int>& rows, const RlSample& s, const ReplayShape& shape) {
  const int k = shape.experts_per_token;
  const uint16_t* from = s.routed.data();
  for (size_t p = 0; p + 1 < s.tokens.size(); ++p)
    for (int layer = 0; layer < shape.layers; ++layer, from += k)
      std::copy(from, from + k, row.replay[layer].ptr<int32_t>() + int64_t{rows[p]} * k);
}

ForwardOptions forward_options(const AdapterBatch* adapters, Numerics numerics, const RlRow& row) {
  ForwardOptions o;
  o.numerics = numerics;
  o.adapters = adapters;
  o.replay = row.replay;
  return o;
}

int64_t count_trained(const std::vector<RlRow>& rows) {
  int64_t trained = 0;
  for (const RlRow& row : rows) trained += static_cast<int64_t>(row.target.size());
  return trained;
}

int64_t count_weighted(const std::vector<RlRow>& rows) {
  int64_t weighted = 0;
  for (const RlRow& row : rows)
    weighted += std::count_if(row.tokens.begin(), row.tokens.end(), [](const RlToken& t) { return t.weight != 0; });
  return weighted;
}

double sum_of(const Tensor& values) { return std::accumulate(values.f32(), values.f32() + values.numel(), 0.0); }

// [wanted, d] of the teacher. Its model may have windows and ratios of its own, so it has a plan of its own, and it
// chooses its experts itself.
Tensor teacher_hidden(const Teacher& teacher, const RlRow& row, Numerics numerics) {
  SequencePlan plan = plan_trees(plan_shape(teacher.weights->config()), row.segments);
  plan.wanted = row.plan.wanted;
  ForwardOptions o;
  o.numerics = numerics;
  o.adapters = &teacher.adapters;
  return forward(*teacher.weights, plan, o).hidden;
}

}  // namespace

int64_t RlSample::trained() const { return std::count(mask.begin(), mask.end(), 1); }

RlRows make_rl_rows(const PlanShape& shape, const std::vector<RlSample>& samples,
                    const std::vector<SampleWeight>& weights, const TreeOptions& options, const ReplayShape& replay) {
  PLUMB_CHECK(samples.size() == weights.size());
  std::vector<TreeSample> trees;
  std::vector<int> index;  // of the samples that are kept
  for (size_t i = 0; i < samples.size(); ++i) {
    const RlSample& s = samples[i];
    PLUMB_CHECK(s.tokens.size() == s.mask.size() && s.tokens.size() == s.logprob.size());
    PLUMB_CHECK(s.tokens.empty() || !s.mask[0], "nothing predicts the first token");
    if (!weights[i].kept) continue;
    if (replay.layers > 0) check_routes(s, replay, static_cast<int>(i));
    index.push_back(static_cast<int>(i));
    trees.push_back({s.tokens, std::max(0, shareable_tokens(s)), s.group});
  }
  const TreePacking packing = pack_trees(trees, options);
  RlRows result;
  result.logical_tokens = packing.logical_tokens;
  result.physical_tokens = packing.physical_tokens;
  for (const TreeRow& tree : packing.rows) {
    RlRow& row = result.rows.emplace_back();
    row.segments = tree.segments;
    row.plan = plan_trees(shape, tree.segments);
    row.plan.wanted.clear();
    begin_replay(row, replay);
    for (const TreeRow::Leaf& leaf : tree.leaves) {
      const int i = index[leaf.sample];
      const std::vector<int> rows = path_rows(tree, leaf.segment);
      add_sample(row, rows, i, samples[i], weights[i]);
      add_routes(row, rows, samples[i], replay);
    }
    PLUMB_CHECK(std::is_sorted(row.plan.wanted.begin(), row.plan.wanted.end()));
    result.trained += static_cast<int64_t>(row.target.size());
  }
  return result;
}

Tensor row_logprobs(WeightStore& weights, const AdapterBatch* adapters, const RlRow& row, Numerics numerics) {
  const ForwardResult r = forward(weights, row.plan, forward_options(adapters, numerics, row));
  return ops::head_logprobs(r.hidden, weights.outer().head, row.target);
}

RlStepResult accumulate_rl_gradients(Trainee& t, const std::vector<RlRow>& rows, Numerics numerics,
                                     const RlLossOptions& options, const Teacher* teacher) {
  const int64_t trained = count_trained(rows), weighted = count_weighted(rows);
  PLUMB_CHECK(teacher ? trained > 0 : weighted > 0);
  const double scale = weighted > 0 ? 1.0 / static_cast<double>(weighted) : 0;
  const AdapterBatch* adapters = t.adapter ? &t.adapters : nullptr;

  KlSum kl;  // its mean over the whole step is needed before the first gradient; kl of the sample needs no forward pass
  if (options.kl_coefficient > 0 && weighted > 0)
    for (const RlRow& row : rows) {
      const bool recorded = options.kl_source == KlSource::sample;
      const Tensor fresh = recorded ? Tensor() : row_logprobs(*t.weights, adapters, row, numerics);
      add_kl(options, row.tokens, recorded ? nullptr : fresh.f32(), kl);
    }

  const Linear& head = t.weights->outer().head;
  const Tensor& d_head = t.gradients.outer.head;
  RlStepResult result;
  for (const RlRow& row : rows) {
    const Tensor taught = teacher ? teacher_hidden(*teacher, row, numerics) : Tensor();
    ForwardOptions o = forward_options(adapters, numerics, row);
    o.keep = kept_of(t.weights->config(), row.plan.rows());
    const ForwardResult r = forward(*t.weights, row.plan, o);
    const Tensor logprob = ops::head_logprobs(r.hidden, head, row.target);
    const RlLoss loss = rl_loss(options, row.tokens, logprob.f32(), kl.mean(), scale);
    result.policy_loss += loss.sum;
    result.stats.add(loss.stats);
    result.logprobs.push_back(logprob);
    const Tensor d_hidden =
        weighted > 0 ? ops::head_logprobs_backward(Tensor::of(loss.d_logprob), r.hidden, head, row.target, d_head)
                     : Tensor::zeros(r.hidden.shape(), DType::f32, r.hidden.space());
    if (teacher) {
      const double share = teacher->coefficient / static_cast<double>(trained);
      Tensor divergence;
      const Tensor more = ops::head_divergence_backward(
          teacher->divergence, Tensor::full({r.hidden.size(0)}, static_cast<float>(share)), {r.hidden, head},
          {taught, teacher->weights->outer().head}, d_head, &divergence);
      result.divergence += sum_of(divergence) / static_cast<double>(trained);
      ops::add(std::vector{more}, d_hidden);
    }
    backward(*t.weights, row.plan, o, r, d_hidden, {}, t.gradients, {});
  }
  result.loss = result.policy_loss + (teacher ? teacher->coefficient * result.divergence : 0);
  return result;
}

double mean_divergence(WeightStore& weights, const AdapterBatch* adapters, const std::vector<RlRow>& rows,
                       Numerics numerics, const Teacher& teacher) {
  double sum = 0;
  for (const RlRow& row : rows) {
    const Tensor taught = teacher_hidden(teacher, row, numerics);
    const Tensor hidden = forward(weights, row.plan, forward_options(adapters, numerics, row)).hidden;
    sum += sum_of(ops::head_divergence(teacher.divergence, {hidden, weights.outer().head},
                                       {taught, teacher.weights->outer().head}));
  }
  return sum / static_cast<double>(count_trained(rows));
}

}  // namespace plumb
