#include "config/nearest.h"

#include <algorithm>

namespace plumb {

int edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the usual table: two before, one before, current.
  std::vector<int> before(b.size() + 1), previous(b.size() + 1), row(b.size() + 1);
  for (size_t k = 0; k <= b.size(); ++k) row[k] = static_cast<int>(k);
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(previous);
    previous.swap(row);
    row[0] = static_cast<int>(i);
    for (size_t k = 1; k <= b.size(); ++k) {
      row[k] = std::min({previous[k] + 1, row[k - 1] + 1, previous[k - 1] + (a[i - 1] != b[k - 1])});
      if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1]) row[k] = std::min(row[k], before[k - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = std::max<int>(2, static_cast<int>(name.size()) / 3) + 1;
  for (const std::string& candidate : candidates)
    if (const int distance = edit_distance(name, candidate); distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  return best;
}

}  // namespace plumb
