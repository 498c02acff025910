// The size of the cache against the memory that it really takes.
#include "rollout/cache_size.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

int64_t bytes_of(const KvCache& cache) {
  int64_t bytes = 0;
  for (const LayerCache& l : cache.layers)
    for (const Tensor* t :
         {&l.keys, &l.index_keys, &l.pending_kv, &l.pending_gate, &l.index_pending_kv, &l.index_pending_gate})
      bytes += static_cast<int64_t>(t->bytes());
  return bytes;
}

TEST(CacheSize, FillsTheBudgetAndNoMore) {
  for (const bool prefixes : {false, true})
    for (const int ratio : {16, 128}) {
      ModelConfig c = testing::tiny_config();
      c.hca_ratio = ratio;
      const CacheBytes bytes = cache_bytes(c);
      for (const int64_t budget : {int64_t{2} << 20, int64_t{5} << 20, int64_t{30} << 20}) {
        EngineOptions o;
        o.max_running = 5, o.prefill_chunk = 40, o.prefix_cache = prefixes;
        fit_cache(o, c, budget, 1000);
        const int64_t used = bytes_of(make_engine_cache(c, o));
        EXPECT_EQ(used, bytes.total(o));
        EXPECT_LE(used, budget);
        const int positions = page_positions(plan_shape(c));
        EXPECT_GE(o.entry_pages, (1000 + positions - 1) / positions);
        EXPECT_GE(o.key_pages, most_key_pages(positions, c.sliding_window, 40, 1000));
        if (prefixes) {
          EXPECT_GT(used, budget - bytes.key_page - bytes.entry_page);
        } else {
          EXPECT_LE(o.entry_pages, 5 * ((1000 + positions - 1) / positions));  // what requests can use
        }
      }
    }
}

TEST(CacheSize, ABudgetThatIsTooSmallSaysWhatIsNeeded) {
  const ModelConfig c = testing::tiny_config();
  EngineOptions o;
  try {
    fit_cache(o, c, 1000, 4000);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.where(), "cache");
    EXPECT_NE(std::string(e.what()).find("4000 tokens"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace plumb
