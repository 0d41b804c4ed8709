// The kernels of one line on the CPU, as the ahead-of-time table and the compiler at first use both make them.
#if defined(ONEPASS_KERNEL_ROW_KERNELS_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_ROW_KERNELS_CPU_H_
#undef ONEPASS_KERNEL_ROW_KERNELS_CPU_H_
#else
#define ONEPASS_KERNEL_ROW_KERNELS_CPU_H_
#endif

#include "onepass/kernel/cpu_kernels.h"
#include "onepass/kernel/row/elementwise.cpu.h"
#include "onepass/kernel/row/rowwise.cpu.h"

ONEPASS_BEGIN

template <class T, class Line, dtype Stored = dtype::none>
void forward(const arguments& a, int64 begin, int64 end) {
  if constexpr (same_type<typename Line::row, void>) elementwise_forward<T, Line, Stored>(a, begin, end);
  else rowwise_forward<T, Line, Stored>(a, begin, end);
}

template <class T, class Line, dtype Stored = dtype::none>
void backward(const arguments& a, int64 begin, int64 end) {
  if constexpr (same_type<typename Line::row, void>) elementwise_backward<T, Line, Stored>(a, begin, end);
  else rowwise_backward<T, Line, Stored>(a, begin, end);
}

// Forward and Backward differ where backward resumes from a kept value or from the result. The scalar target's lanes
// have no room for the pairs that `rope` turns: there are no kernels of it there.
template <class T, class Forward, class Backward, dtype Stored = dtype::none>
constexpr cpu_kernel_pair pair_of() {
  if constexpr (Forward::turns != turning::none && lanes<vec<float>>() == 1) return {};
  else return {forward<T, Forward, Stored>, backward<T, Backward, Stored>};
}

template <class Forward, class Backward>
constexpr cpu_kernels kernels_of() {
  return {pair_of<float, Forward, Backward>(), pair_of<double, Forward, Backward>(),
          pair_of<float, Forward, Backward, dtype::f32>(), pair_of<float, Forward, Backward, dtype::bf16>()};
}

ONEPASS_END
#endif
