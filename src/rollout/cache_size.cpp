#include "rollout/cache_size.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "ops/indexer.h"

namespace plumb {
namespace {

constexpr int64_t kFloat = sizeof(float);

std::string megabytes(int64_t bytes) { return std::to_string((bytes + 999'999) / 1'000'000) + " MB"; }

}  // namespace

CacheBytes cache_bytes(const ModelConfig& c, Space space) {
  const PlanShape shape = plan_shape(c);
  const int64_t positions = page_positions(shape);
  const int64_t key = c.head_dim * (space == Space::device ? sizeof(uint16_t) : kFloat);  // as make_cache has them
  const Tensor index_keys = ops::empty_index_keys(0, c.index_head_dim, space);
  const int64_t index_key = index_keys.size(1) * dtype_size(index_keys.dtype());
  CacheBytes b;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    b.key_page += positions * key;
    if (c.kind(layer) == LayerKind::csa) {
      const int64_t pending = 2 * 2 * (c.head_dim + c.index_head_dim);  // floats a row: two windows, values and gates
      b.entry_page += positions / shape.csa_ratio * (key + index_key) + shape.csa_ratio * pending * kFloat;
      b.lane += 2 * shape.csa_ratio * pending * kFloat;
    } else if (c.kind(layer) == LayerKind::hca) {
      b.entry_page += positions / shape.hca_ratio * key;
      b.lane += shape.hca_ratio * 2 * c.head_dim * kFloat;
    }
  }
  return b;
}

void set_step_sizes(EngineOptions& o, Space space) {
  const bool gpu = space == Space::device;
  if (o.max_running == 0) o.max_running = gpu ? 256 : 16;
  if (o.prefill_chunk == 0) o.prefill_chunk = gpu ? 1024 : 256;
  o.token_budget = o.max_running + 4 * o.prefill_chunk;
}

void fit_cache(EngineOptions& o, const ModelConfig& config, int64_t budget, int longest, Space space) {
  const CacheBytes bytes = cache_bytes(config, space);
  const PlanShape shape = plan_shape(config);
  const int positions = page_positions(shape);
  const auto keys = [&](int length) { return most_key_pages(positions, shape.window, o.prefill_chunk, length); };
  const auto entries = [&](int length) { return (length + positions - 1) / positions; };
  // Pages for all sequences at `length` tokens, and at least for one at `longest`.
  const auto size_for = [&](int length) {
    const auto pages = [&](int each, int least) {
      return static_cast<int>(std::min<int64_t>(std::max<int64_t>(int64_t{each} * o.max_running, least),
                                                std::numeric_limits<int>::max() / positions));
    };
    o.key_pages = pages(keys(length), keys(longest)), o.entry_pages = pages(entries(length), entries(longest));
    return bytes.total(o);
  };
  if (const int64_t least = size_for(0); least > budget)
    fail("cache",
         "a request of " + std::to_string(longest) + " tokens and " + std::to_string(o.max_running) +
             " running sequences take " + megabytes(least) + ", more than the budget of " + megabytes(budget),
         "raise the budget, or allow fewer tokens or running sequences");
  int fits = 0, too_long = longest / positions + 2;  // in pages
  while (too_long - fits > 1) {
    const int middle = (fits + too_long) / 2;
    (size_for(std::min(longest, middle * positions)) <= budget ? fits : too_long) = middle;
  }
  const int64_t left = budget - size_for(std::min(longest, fits * positions));
  if (!o.prefix_cache) return;
  const int64_t most = std::numeric_limits<int>::max() / positions - std::max(o.key_pages, o.entry_pages);
  const int more = static_cast<int>(std::clamp<int64_t>(left / (bytes.key_page + bytes.entry_page), 0, most));
  o.key_pages += more, o.entry_pages += more;
}

KvCache make_engine_cache(const ModelConfig& config, const EngineOptions& o, Space space) {
  const PlanShape shape = plan_shape(config);
  const PageShape pages{page_positions(shape), o.key_pages, o.entry_pages};
  return make_cache(config, cache_shape(shape, pages), (o.entry_pages + o.max_running * 2) * shape.csa_ratio,
                    o.max_running * shape.hca_ratio, space);
}

}  // namespace plumb
