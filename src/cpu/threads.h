// The host program's threads.
#pragma once

#include "onepass/lane/types.h"

namespace onepass::cpu {

// Calls body(context, begin, end) over [0, count), at least `grain` in one call; and how many threads it has.
using parallel_for = void (*)(int64 count, int64 grain, void (*body)(void*, int64, int64), void* context);
using thread_count = int (*)();

// Set once by the host; until then the calling thread does it all.
void set_parallel_for(parallel_for, thread_count = nullptr);
parallel_for threads_for();
int count_threads();  // 1 where the host does not say

// Calls body(begin, end).
template <class Body>
void in_threads(int64 count, int64 grain, const Body& body) {
  threads_for()(
      count, grain, [](void* p, int64 begin, int64 end) { (*static_cast<const Body*>(p))(begin, end); },
      const_cast<Body*>(&body));
}

}  // namespace onepass::cpu
