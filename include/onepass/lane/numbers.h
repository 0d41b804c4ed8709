// Lanes beside plain numbers, as users write them: 2 * x + 1, where(x > 0, x, 0), max(x, 0).
#if defined(ONEPASS_LANE_NUMBERS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_NUMBERS_H_
#undef ONEPASS_LANE_NUMBERS_H_
#else
#define ONEPASS_LANE_NUMBERS_H_
#endif

#include "onepass/lane/target.h"

ONEPASS_BEGIN

template <class N>
inline constexpr bool is_number = false;
template <>
inline constexpr bool is_number<int> = true;
template <>
inline constexpr bool is_number<float> = true;
template <>
inline constexpr bool is_number<double> = true;

template <class N>
concept number = is_number<N>;
template <class L>
concept lane = requires {
  typename L::scalar;
};

// The number in every place of a lane.
template <class L, class N>
ONEPASS_FUNCTION L everywhere(N n) {
  return L(static_cast<typename L::scalar>(n));
}

#define ONEPASS_WITH_NUMBERS(symbol)                \
  template <lane L, number N>                       \
  ONEPASS_FUNCTION auto operator symbol(L a, N b) { \
    return a symbol everywhere<L>(b);               \
  }                                                 \
  template <number N, lane L>                       \
  ONEPASS_FUNCTION auto operator symbol(N a, L b) { \
    return everywhere<L>(a) symbol b;               \
  }
ONEPASS_WITH_NUMBERS(+)
ONEPASS_WITH_NUMBERS(-)
ONEPASS_WITH_NUMBERS(*)
ONEPASS_WITH_NUMBERS(/)
ONEPASS_WITH_NUMBERS(<)
ONEPASS_WITH_NUMBERS(<=)
ONEPASS_WITH_NUMBERS(>)
ONEPASS_WITH_NUMBERS(>=)
ONEPASS_WITH_NUMBERS(==)
ONEPASS_WITH_NUMBERS(!=)
#undef ONEPASS_WITH_NUMBERS

#define ONEPASS_WITH_NUMBERS(name)       \
  template <lane L, number N>            \
  ONEPASS_FUNCTION auto name(L a, N b) { \
    return name(a, everywhere<L>(b));    \
  }                                      \
  template <number N, lane L>            \
  ONEPASS_FUNCTION auto name(N a, L b) { \
    return name(everywhere<L>(a), b);    \
  }
ONEPASS_WITH_NUMBERS(min)
ONEPASS_WITH_NUMBERS(max)
ONEPASS_WITH_NUMBERS(pow)
#undef ONEPASS_WITH_NUMBERS

template <class Mask, lane L, number N>
ONEPASS_FUNCTION auto where(Mask m, L yes, N no) {
  return where(m, yes, everywhere<L>(no));
}
template <class Mask, number N, lane L>
ONEPASS_FUNCTION auto where(Mask m, N yes, L no) {
  return where(m, everywhere<L>(yes), no);
}

ONEPASS_END
#endif
