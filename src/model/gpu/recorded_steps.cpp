#include "model/gpu/recorded_steps.h"

#include <algorithm>

#include "base/error.h"
#include "model/device_adapters.h"

namespace plumb {
namespace {

constexpr int kMostRows = 512;      // beyond, launching costs the host less than computing costs the device
constexpr size_t kMostGraphs = 64;  // the shapes of one batch as it grows, finishes and makes entries

// 1, 2, 4, then 1 and 1.5 times each power of two: at most a third of the rows is filled up.
int rows_of_graph(int rows) {
  for (int size = 1;; size *= 2) {
    if (rows <= size) return size;
    if (size >= 4 && rows <= size + size / 2) return size + size / 2;
  }
}

int power_of_two(int64_t n) {
  int size = 8;
  while (size < n) size *= 2;
  return size;
}

int longest(const std::vector<int>& begin) {
  int most = 0;
  for (size_t i = 1; i < begin.size(); ++i) most = std::max(most, begin[i] - begin[i - 1]);
  return most;
}

}  // namespace

bool RecordedSteps::fits(const SequencePlan& plan, const ForwardOptions& o) const {
  if (o.cache != &cache_ || o.taps || o.keep != Keep::nothing || !o.replay.empty()) return false;
  const int rows = plan.rows();
  if (rows == 0 || rows > kMostRows || static_cast<int>(plan.wanted.size()) != rows) return false;
  for (int r = 1; r < rows; ++r)
    if (plan.document[r] == plan.document[r - 1]) return false;  // several rows of one sequence
  return !o.adapters || std::none_of(o.adapters->parts.begin(), o.adapters->parts.end(),
                                     [](const AdapterBatch::Part& p) { return p.grads != nullptr; });
}

RecordedSteps::Step RecordedSteps::make_step(const SequencePlan& plan, const ForwardOptions& o) const {
  const ModelConfig& c = weights_.config();
  Step step;
  StepShape& shape = step.shape;
  const int rows = shape.size.rows = rows_of_graph(plan.rows());
  // Small batches often make no entry: a graph without the compressors' kernels is shorter.
  shape.size.csa_entries = plan.csa.new_entries() > 0 ? rows : 0;
  shape.size.hca_entries = plan.hca.new_entries() > 0 ? rows : 0;
  step.plan = pad_step(plan, shape.size);
  step.numbers = ops::gpu::plan_numbers(step.plan, c.index_topk, 1);
  shape.room = {c.sliding_window, power_of_two(longest(step.numbers.attended.begin)),
                power_of_two(longest(step.numbers.groups.tile_begin))};

  step.part.assign(rows, -1);
  if (!o.adapters) return step;
  for (const AdapterBatch::Part& p : o.adapters->parts)
    if (p.all || !p.rows.empty()) step.adapters.push_back(p.adapter);
  std::sort(step.adapters.begin(), step.adapters.end());
  step.adapters.erase(std::unique(step.adapters.begin(), step.adapters.end()), step.adapters.end());
  for (const auto& adapter : step.adapters) shape.adapters.push_back(adapter.get());
  for (const AdapterBatch::Part& p : o.adapters->parts) {
    const auto at = std::lower_bound(step.adapters.begin(), step.adapters.end(), p.adapter);
    const int number = static_cast<int>(at - step.adapters.begin());
    if (p.all) std::fill_n(step.part.begin(), plan.rows(), number);
    for (size_t i = 0; !p.all && i < p.rows.size(); ++i) step.part[p.rows[i]] = number;
  }
  std::fill(step.part.begin() + plan.rows(), step.part.end(), step.part[0]);
  shape.one_for_all = std::count(step.part.begin(), step.part.end(), 0) == rows;
  return step;
}

// Graphs of adapters that are gone go as well; of the others, the one that was not used for the longest time.
RecordedSteps::Graph& RecordedSteps::graph_of(const Step& step) {
  graphs_.remove_if([](const Graph& g) {
    return std::any_of(g.adapters.begin(), g.adapters.end(), [](const auto& a) { return a.expired(); });
  });
  const auto known =
      std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& g) { return g.shape == step.shape; });
  if (known != graphs_.end()) {
    graphs_.splice(graphs_.begin(), graphs_, known);
    return graphs_.front();
  }
  if (graphs_.size() == kMostGraphs) graphs_.pop_back();
  Graph& g = graphs_.emplace_front();
  g.shape = step.shape;
  g.adapters.assign(step.adapters.begin(), step.adapters.end());
  return g;
}

Tensor RecordedSteps::forward(const SequencePlan& plan, const ForwardOptions& o) {
  if (!fits(plan, o)) return plumb::forward(weights_, plan, o).hidden;
  Step step = make_step(plan, o);
  Graph& g = graph_of(step);
  if (++g.uses == 1) return plumb::forward(weights_, plan, o).hidden;  // it may be the only one
  if (!g.recording) return record(g, step, o).rows(0, plan.rows());
  g.inputs->fill(step.plan, step.numbers);
  set_adapters(g, step.part);
  g.recording->replay();
  ++replays_;
  return g.hidden.rows(0, plan.rows());
}

// Runs the step in the graph's memory, which also makes all that is made only once, and then records it.
Tensor RecordedSteps::record(Graph& g, Step& step, const ForwardOptions& o) {
  const ModelConfig& c = weights_.config();
  AdapterBatch host;
  for (size_t i = 0; i < step.adapters.size(); ++i) {
    AdapterBatch::Part& p = host.parts.emplace_back(AdapterBatch::Part{step.adapters[i], {}, g.shape.one_for_all});
    for (int r = 0; r < g.shape.size.rows; ++r)
      if (step.part[r] == static_cast<int>(i)) p.rows.push_back(r);
  }
  g.batch = device_batch(host);
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) g.layers.push_back(weights_.acquire(layer));
  g.plan = std::move(step.plan);
  g.inputs =
      std::make_unique<ops::gpu::PlanBuffers>(g.plan, step.numbers, rotary_frequencies(c), c.index_topk, &g.shape.room);
  PassContext ctx{c, g.plan, o.numerics, g.inputs->tensors(), nullptr, &cache_.layers, nullptr, {}};
  if (!g.batch.parts.empty()) ctx.adapters = &g.batch;
  const auto run = [&] {
    g.inputs->make_tables();
    return plumb::forward(weights_, ctx, Keep::nothing).hidden;
  };
  const Tensor hidden = run();
  g.recording = std::make_unique<ops::gpu::Recording>(memory_, [&] { g.hidden = run(); });
  g.recorded_part = g.part = step.part;
  ++recordings_;
  return hidden;
}

// Which adapter each row uses reaches the ops as vectors with one or several numbers a row, the same for all rows of an
// adapter. All adapters of the graph had rows when it was recorded: there the numbers of each can be read.
void RecordedSteps::set_adapters(Graph& g, const std::vector<int>& part) {
  if (part == g.part) return;
  const size_t rows = part.size();
  for (const ops::gpu::RowNumbers& n : g.recording->row_numbers()) {
    const size_t each = n.values.size() / rows;
    std::vector<int> values(n.values.size(), -1);
    for (size_t r = 0; r < rows; ++r) {
      if (part[r] < 0) continue;
      const auto like = std::find(g.recorded_part.begin(), g.recorded_part.end(), part[r]) - g.recorded_part.begin();
      std::copy_n(n.values.begin() + like * each, each, values.begin() + r * each);
    }
    copy_bytes(n.device, Tensor::of(values));
  }
  g.part = part;
}

DecodeGraphStats RecordedSteps::stats() const {
  DecodeGraphStats s{0, recordings_, replays_, static_cast<int64_t>(memory_->bytes())};
  for (const Graph& g : graphs_)
    if (g.recording) ++s.graphs, s.bytes += static_cast<int64_t>(g.recording->bytes() + g.inputs->bytes());
  return s;
}

}  // namespace plumb
