// Samples that begin alike share their common beginning: groups of rollouts as prefix trees, and trees packed into
// rows. Deterministic in its inputs. (reference_trainer 4.6)
#pragma once
#include <cstdint>
#include <vector>

#include "plan/sequence_plan.h"

namespace plumb {

struct TreeSample {
  std::vector<int> tokens;
  // The first so many tokens may be shared. A shared token carries no loss, so this is at most the number of tokens in
  // front of the one whose row predicts the first trained token.
  int shareable = 0;
  int group = 0;  // only samples of one group share
};

struct TreeOptions {
  int row_tokens = 0;   // most tokens of a row
  int min_shared = 64;  // shorter beginnings are not shared: a segment costs more than it saves
  uint64_t seed = 0;    // of the order of the rows
};

struct TreeRow {
  struct Leaf {
    int sample, segment;  // the path to this segment holds the sample's tokens
  };
  std::vector<TreeSegment> segments;  // parents first, a tree's segments side by side; document = number of the tree
  std::vector<Leaf> leaves;
  int tokens = 0;
};

struct TreePacking {
  std::vector<TreeRow> rows;
  int64_t logical_tokens = 0;   // of all samples
  int64_t physical_tokens = 0;  // of all rows: what is computed
};

// Every sample goes into one row. A group whose tree does not fit into a row is split over several, each with the
// ancestors that its samples need. shareable: clamped to the sample's length - 1. Error: a sample that is empty or
// longer than a row (named by its index).
TreePacking pack_trees(const std::vector<TreeSample>& samples, const TreeOptions& options);

// Row numbers (in plan_trees of the row's segments) of the tokens of the path that ends with `segment`.
std::vector<int> path_rows(const TreeRow& row, int segment);

}  // namespace plumb
