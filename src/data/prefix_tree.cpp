#include "data/prefix_tree.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/philox.h"

namespace plumb {
namespace {

// Tokens [first, last) of a sample, which stand for those of every sample below.
struct Node {
  int parent, sample, first, last;
  int size() const { return last - first; }
};

// The radix tree of one group.
class TreeBuilder {
 public:
  TreeBuilder(const std::vector<TreeSample>& samples, int min_shared, std::vector<Node>& nodes, std::vector<int>& leaf)
      : samples_(samples), min_shared_(min_shared), nodes_(nodes), leaf_(leaf) {}

  // Samples that agree in [0, seen) hang below `parent`, which ends at `from` <= seen.
  void add(const std::vector<int>& members, int parent, int from, int seen) {
    for (const std::vector<int>& same : split(members, seen)) {
      if (same.size() == 1) {
        add_leaf(same[0], parent, from);
        continue;
      }
      const int common = common_length(same, seen);
      if (common - from >= min_shared_) {
        nodes_.push_back({parent, same[0], from, common});
        add(same, static_cast<int>(nodes_.size()) - 1, common, common);
      } else {  // too short for all of them, but some may agree further
        add(same, parent, from, common);
      }
    }
  }

 private:
  int shareable(int sample) const {
    return std::min(samples_[sample].shareable, static_cast<int>(samples_[sample].tokens.size()) - 1);
  }
  // By the token at `at`, in order of first appearance; who may share no more stands alone.
  std::vector<std::vector<int>> split(const std::vector<int>& members, int at) const {
    std::vector<std::vector<int>> parts;
    std::map<int, size_t> part_of;
    for (int m : members) {
      if (at >= shareable(m)) {
        parts.push_back({m});
        continue;
      }
      const auto [it, fresh] = part_of.try_emplace(samples_[m].tokens[at], parts.size());
      if (fresh) parts.emplace_back();
      parts[it->second].push_back(m);
    }
    return parts;
  }
  int common_length(const std::vector<int>& members, int from) const {
    int length = shareable(members[0]);
    const std::vector<int>& first = samples_[members[0]].tokens;
    for (int m : members) {
      length = std::min(length, shareable(m));
      const std::vector<int>& other = samples_[m].tokens;
      length = static_cast<int>(
          std::mismatch(first.begin() + from, first.begin() + length, other.begin() + from).first - first.begin());
    }
    return length;
  }
  void add_leaf(int sample, int parent, int from) {
    leaf_[sample] = static_cast<int>(nodes_.size());
    nodes_.push_back({parent, sample, from, static_cast<int>(samples_[sample].tokens.size())});
  }

  const std::vector<TreeSample>& samples_;
  int min_shared_;
  std::vector<Node>& nodes_;
  std::vector<int>& leaf_;
};

// A row that is being filled: the nodes that it has, and the leaves of samples in order of arrival.
struct OpenRow {
  std::vector<int> samples;
  std::vector<int> nodes;  // ascending
  int tokens = 0;
};

// Tokens that a leaf would add to a row: those of its path that the row does not have yet. Ancestors of a node that is
// there are there too.
int added_tokens(const std::vector<Node>& nodes, int leaf, const OpenRow& row) {
  int tokens = 0;
  for (int n = leaf; n >= 0 && !std::binary_search(row.nodes.begin(), row.nodes.end(), n); n = nodes[n].parent)
    tokens += nodes[n].size();
  return tokens;
}

void put(const std::vector<Node>& nodes, int leaf, int sample, OpenRow& row) {
  row.tokens += added_tokens(nodes, leaf, row);
  row.samples.push_back(sample);
  for (int n = leaf; n >= 0; n = nodes[n].parent) {
    const auto at = std::lower_bound(row.nodes.begin(), row.nodes.end(), n);
    if (at != row.nodes.end() && *at == n) break;
    row.nodes.insert(at, n);
  }
}

// Nodes are numbered depth first, group by group, so ascending numbers put parents first and trees side by side.
TreeRow finish_row(const std::vector<TreeSample>& samples, const std::vector<Node>& nodes, const std::vector<int>& leaf,
                   const OpenRow& open) {
  TreeRow row;
  std::map<int, int> segment_of;
  int trees = 0;
  for (int n : open.nodes) {
    TreeSegment s;
    s.parent = nodes[n].parent < 0 ? -1 : segment_of.at(nodes[n].parent);
    s.document = s.parent < 0 ? trees++ : row.segments[s.parent].document;
    const std::vector<int>& tokens = samples[nodes[n].sample].tokens;
    s.tokens.assign(tokens.begin() + nodes[n].first, tokens.begin() + nodes[n].last);
    segment_of[n] = static_cast<int>(row.segments.size());
    row.segments.push_back(std::move(s));
  }
  for (int sample : open.samples) row.leaves.push_back({sample, segment_of.at(leaf[sample])});
  std::sort(row.leaves.begin(), row.leaves.end(), [](const auto& a, const auto& b) { return a.segment < b.segment; });
  row.tokens = open.tokens;
  return row;
}

void check_samples(const std::vector<TreeSample>& samples, const TreeOptions& options) {
  for (size_t i = 0; i < samples.size(); ++i) {
    const size_t length = samples[i].tokens.size();
    if (length == 0 || length > static_cast<size_t>(options.row_tokens))
      fail("sample " + std::to_string(i), "has " + std::to_string(length) + " tokens",
           "a row holds 1 to " + std::to_string(options.row_tokens) + " of them");
  }
}

// Order in which samples go into rows: groups with the longest sample first, so that small ones fill what is left.
std::vector<int> packing_order(const std::vector<TreeSample>& samples, const std::vector<int>& leaf) {
  std::map<int, size_t> longest;
  for (const TreeSample& s : samples) longest[s.group] = std::max(longest[s.group], s.tokens.size());
  std::vector<int> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const size_t la = longest[samples[a].group], lb = longest[samples[b].group];
    return la != lb ? la > lb : leaf[a] < leaf[b];  // leaves of a group: in the order of its tree
  });
  return order;
}

}  // namespace

TreePacking pack_trees(const std::vector<TreeSample>& samples, const TreeOptions& options) {
  check_samples(samples, options);
  std::map<int, std::vector<int>> groups;
  for (size_t i = 0; i < samples.size(); ++i) groups[samples[i].group].push_back(static_cast<int>(i));
  std::vector<Node> nodes;
  std::vector<int> leaf(samples.size());
  for (const auto& [group, members] : groups)
    TreeBuilder(samples, options.min_shared, nodes, leaf).add(members, -1, 0, 0);

  std::vector<OpenRow> open;
  for (int sample : packing_order(samples, leaf)) {
    // Where it adds the fewest tokens (beside its siblings), then where it leaves the least room.
    OpenRow* best = nullptr;
    std::pair<int, int> best_cost;
    for (OpenRow& row : open) {
      const int added = added_tokens(nodes, leaf[sample], row), left = options.row_tokens - row.tokens - added;
      const std::pair<int, int> cost{added, left};
      if (left >= 0 && (!best || cost < best_cost)) best = &row, best_cost = cost;
    }
    if (!best) best = &open.emplace_back();
    put(nodes, leaf[sample], sample, *best);
  }

  TreePacking packing;
  for (const OpenRow& row : open) {
    packing.rows.push_back(finish_row(samples, nodes, leaf, row));
    packing.physical_tokens += row.tokens;
  }
  for (const TreeSample& s : samples) packing.logical_tokens += static_cast<int64_t>(s.tokens.size());
  Random random(options.seed, hash_text("tree rows"));
  for (size_t i = packing.rows.size(); i > 1; --i)
    std::swap(packing.rows[i - 1], packing.rows[random.below(static_cast<uint32_t>(i))]);
  return packing;
}

std::vector<int> path_rows(const TreeRow& row, int segment) {
  std::vector<int> first(row.segments.size());  // row of each segment's first token
  for (size_t s = 1; s < row.segments.size(); ++s)
    first[s] = first[s - 1] + static_cast<int>(row.segments[s - 1].tokens.size());
  std::vector<int> path;
  for (int s = segment; s >= 0; s = row.segments[s].parent) path.push_back(s);
  std::vector<int> rows;
  for (size_t i = path.size(); i-- > 0;)
    for (size_t t = 0; t < row.segments[path[i]].tokens.size(); ++t)
      rows.push_back(first[path[i]] + static_cast<int>(t));
  return rows;
}

}  // namespace plumb
