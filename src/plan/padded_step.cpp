#include <string>

#include "base/error.h"
#include "plan/sequence_plan.h"

namespace plumb {
namespace {

void pad_compression(CompressionPlan& plan, int rows, const StepSize& size, int entries) {
  if (plan.ratio == 0) return;
  PLUMB_CHECK(plan.new_entries() <= entries && static_cast<int>(plan.pending_row.size()) <= size.rows,
              std::to_string(plan.new_entries()) + " entries");
  for (int& source : plan.source)
    if (source >= rows) source += size.rows - rows;  // pending rows are numbered behind the batch's
  while (plan.new_entries() < entries) {
    plan.source.push_back(0);
    plan.source.resize(plan.source.size() + plan.slots - 1, -1);
    plan.position.push_back(0);
    plan.slot.push_back(-1);
  }
  const EntryRanges& visible = plan.visible;
  const std::vector<EntryRange> seen(visible.range.begin(), visible.range.begin() + visible.begin[1]);
  for (int row = rows; row < size.rows; ++row) {
    plan.visible.range.insert(plan.visible.range.end(), seen.begin(), seen.end());
    plan.visible.begin.push_back(static_cast<int>(plan.visible.range.size()));
  }
  plan.pending_row.resize(size.rows, -1), plan.pending_slot.resize(size.rows, -1);
}

}  // namespace

SequencePlan pad_step(const SequencePlan& step, const StepSize& size) {
  const int rows = step.rows();
  PLUMB_CHECK(0 < rows && rows <= size.rows && !step.key_slot.empty() && static_cast<int>(step.wanted.size()) == rows,
              std::to_string(rows) + " rows");
  SequencePlan plan = step;
  const std::vector<int> keys(plan.window.row.begin(), plan.window.row.begin() + plan.window.begin[1]);
  for (int row = rows; row < size.rows; ++row) {
    plan.token.push_back(plan.token[0]), plan.position.push_back(plan.position[0]);
    plan.document.push_back(plan.document[0]);
    plan.window.row.insert(plan.window.row.end(), keys.begin(), keys.end());
    plan.window.begin.push_back(static_cast<int>(plan.window.row.size()));
    plan.key_slot.push_back(-1);
    plan.wanted.push_back(row);
  }
  pad_compression(plan.csa, rows, size, size.csa_entries);
  pad_compression(plan.hca, rows, size, size.hca_entries);
  return plan;
}

}  // namespace plumb
