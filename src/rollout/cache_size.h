// The sizes of an engine: of its steps where the model computes, and of its cache for a given amount of memory.
#pragma once
#include <cstdint>

#include "rollout/engine.h"

namespace plumb {

// Bytes of one page of each pool, over all layers, and of what each of max_running sequences has beside its pages.
struct CacheBytes {
  int64_t key_page = 0, entry_page = 0, lane = 0;
  int64_t total(const EngineOptions& o) const {
    return o.key_pages * key_page + o.entry_pages * entry_page + o.max_running * lane;
  }
};
CacheBytes cache_bytes(const ModelConfig& config, Space space = Space::host);

// Sets max_running and prefill_chunk where they are 0, to 16 and 256, on a GPU (which reads its weights once a step,
// for however many rows) to 256 and 1,024; and token_budget, so that every answer and four chunks fit into a step.
void set_step_sizes(EngineOptions& options, Space space);

// Sets key_pages and entry_pages so that the cache takes at most `budget` bytes: room for one request of `longest`
// tokens (prompt and answer) first, then for max_running of them as long as they can be, then for prefixes. Error: the
// budget is too small for one request, or for the lanes (says how much it takes).
void fit_cache(EngineOptions& options, const ModelConfig& config, int64_t budget, int longest,
               Space space = Space::host);

// The cache that an engine with these options has.
KvCache make_engine_cache(const ModelConfig& config, const EngineOptions& options, Space space = Space::host);

}  // namespace plumb
