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
template <class Forward, class Backward>
constexpr cpu_kernels kernels_of() {
  if constexpr (Forward::turns != turning::none && lanes<vec<float>>() == 1) return {};
  else
    return {forward<float, Forward>,
            backward<float, Backward>,
            forward<double, Forward>,
            backward<double, Backward>,
            forward<float, Forward, dtype::f32>,
            backward<float, Backward, dtype::f32>,
            forward<float, Forward, dtype::bf16>,
            backward<float, Backward, dtype::bf16>};
}

ONEPASS_END
#endif
