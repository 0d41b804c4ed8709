// The second stage of column gradients.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/row/reduce.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "onepass/kernel/row/task.cpu.h"
#include "src/cpu/row/reduce.h"

ONEPASS_BEGIN

void sum_parts(const double* partial, int64 parts, int64 columns, int64 begin, int64 end, const view& output) {
  using L = vec<double>;
  for_columns<L, true>(begin, end, [&](int64 c, int count) ONEPASS_LAMBDA {
    L total(0.0);
    for (int64 part = 0; part < parts; ++part) {
      const double* from = partial + part * columns;
      total = total + (count == lanes<L>() ? load_lane<L>(from + c) : load_partial<L>(from, dtype::f64, c, count));
    }
    if (count == lanes<L>()) store(output.data, output.type, c, total);
    else store_partial(output.data, output.type, c, total, count);
  });
}

ONEPASS_END

#if HWY_ONCE
namespace onepass {
HWY_EXPORT(sum_parts);
namespace cpu {
void sum_parts(const double* partial, int64 parts, int64 columns, int64 begin, int64 end, const view& output) {
  HWY_DYNAMIC_DISPATCH(sum_parts)(partial, parts, columns, begin, end, output);
}
}  // namespace cpu
}  // namespace onepass
#endif
