// The host program's threads.
#include "src/cpu/threads.h"

#include <algorithm>
#include <atomic>

namespace onepass::cpu {
namespace {

void in_this_thread(int64 count, int64, void (*body)(void*, int64, int64), void* context) { body(context, 0, count); }

std::atomic<parallel_for> parallel{in_this_thread};
std::atomic<thread_count> counted{nullptr};

}  // namespace

void set_parallel_for(parallel_for with, thread_count count) { parallel = with, counted = count; }

parallel_for threads_for() { return parallel.load(); }

int count_threads() {
  const thread_count count = counted.load();
  return count ? std::max(count(), 1) : 1;
}

}  // namespace onepass::cpu
