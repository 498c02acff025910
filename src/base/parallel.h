// Loops over the machine's cores. Nothing here changes a result: a body must write only what belongs to its own index
// range, and every sum is done inside one index in a fixed order, so that any number of threads gives the same bits.
#pragma once
#include <cstdint>
#include <functional>

namespace plumb {

// Calls body(begin, end) on disjoint ranges that cover [0, n), each at least `grain` long (but the last), on the pool's
// threads and the caller's. Returns when all are done; rethrows the first exception. Nested calls run on the calling
// thread alone.
void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

// Whether the caller is itself a body of parallel_for, so that a nested call would run on this thread alone.
bool inside_parallel_for();

// Threads used by parallel_for, the caller's included. Default: the cores this process may use. n >= 1.
int thread_count();
void set_thread_count(int n);

}  // namespace plumb
