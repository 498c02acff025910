// "Did you mean": the name closest to a mistyped one.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Least number of inserted, deleted, replaced or swapped neighbouring characters that turns a into b.
int edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance, the first of equals; "" if there is none within a third of the name's
// length.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace plumb
