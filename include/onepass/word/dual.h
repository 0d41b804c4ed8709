// Dual numbers: a lane and its derivative, through everything that a lane can do. They derive a user's word.
#if defined(ONEPASS_WORD_DUAL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_DUAL_H_
#undef ONEPASS_WORD_DUAL_H_
#else
#define ONEPASS_WORD_DUAL_H_
#endif

#include "onepass/lane/functions.h"
#include "onepass/word/activation.h"

ONEPASS_BEGIN

// A slope times a factor. What does not depend on x adds nothing, however large or undefined the factor is: so
// `where` and `max` select in backward as they do in forward.
template <class L>
ONEPASS_FUNCTION L along(L slope, L factor) {
  return where(slope == L(0), L(0), L(slope * factor));
}

template <class L>
struct dual {
  using scalar = typename L::scalar;
  L value, slope;

  dual() = default;
  explicit ONEPASS_FUNCTION dual(scalar number) : value(number), slope(scalar(0)) {}
  ONEPASS_FUNCTION dual(L v, L s) : value(v), slope(s) {}

  friend ONEPASS_FUNCTION dual operator+(dual a, dual b) { return {L(a.value + b.value), L(a.slope + b.slope)}; }
  friend ONEPASS_FUNCTION dual operator-(dual a, dual b) { return {L(a.value - b.value), L(a.slope - b.slope)}; }
  friend ONEPASS_FUNCTION dual operator-(dual a) { return {L(-a.value), L(-a.slope)}; }
  friend ONEPASS_FUNCTION dual operator*(dual a, dual b) {
    return {L(a.value * b.value), L(along(a.slope, b.value) + along(b.slope, a.value))};
  }
  friend ONEPASS_FUNCTION dual operator/(dual a, dual b) {
    const L quotient = a.value / b.value;
    return {quotient, L((a.slope - along(b.slope, quotient)) / b.value)};
  }

  friend ONEPASS_FUNCTION auto operator<(dual a, dual b) { return a.value < b.value; }
  friend ONEPASS_FUNCTION auto operator<=(dual a, dual b) { return a.value <= b.value; }
  friend ONEPASS_FUNCTION auto operator>(dual a, dual b) { return a.value > b.value; }
  friend ONEPASS_FUNCTION auto operator>=(dual a, dual b) { return a.value >= b.value; }
  friend ONEPASS_FUNCTION auto operator==(dual a, dual b) { return a.value == b.value; }
  friend ONEPASS_FUNCTION auto operator!=(dual a, dual b) { return a.value != b.value; }
};

template <class Mask, class L>
ONEPASS_FUNCTION dual<L> where(Mask m, dual<L> yes, dual<L> no) {
  return {L(where(m, yes.value, no.value)), L(where(m, yes.slope, no.slope))};
}
template <class L>
ONEPASS_FUNCTION dual<L> fma(dual<L> a, dual<L> b, dual<L> c) {
  return a * b + c;
}
// Where both are the same, the slope is the first one's.
template <class L>
ONEPASS_FUNCTION dual<L> min(dual<L> a, dual<L> b) {
  return {L(min(a.value, b.value)), L(where(b.value < a.value, b.slope, a.slope))};
}
template <class L>
ONEPASS_FUNCTION dual<L> max(dual<L> a, dual<L> b) {
  return {L(max(a.value, b.value)), L(where(a.value < b.value, b.slope, a.slope))};
}
template <class L>
ONEPASS_FUNCTION dual<L> abs(dual<L> a) {
  return {L(abs(a.value)), L(where(a.value < L(0), L(-a.slope), a.slope))};
}
template <class L>
ONEPASS_FUNCTION dual<L> copy_sign(dual<L> magnitude, dual<L> sign) {
  const dual<L> positive = abs(magnitude);
  return where(sign.value < L(0), -positive, positive);
}
template <class L>
ONEPASS_FUNCTION dual<L> floor(dual<L> a) {
  return {L(floor(a.value)), L(0)};
}

// f(a), with the derivative at a.
#define ONEPASS_DERIVATIVE(name, derivative)   \
  template <class L>                           \
  ONEPASS_FUNCTION dual<L> name(dual<L> a) {   \
    const L x = a.value, y = name(x);          \
    return {y, along(a.slope, L(derivative))}; \
  }
ONEPASS_DERIVATIVE(exp, y)
ONEPASS_DERIVATIVE(expm1, exp(x))
ONEPASS_DERIVATIVE(log, L(1) / x)
ONEPASS_DERIVATIVE(log1p, L(1) / (L(1) + x))
ONEPASS_DERIVATIVE(sin, cos(x))
ONEPASS_DERIVATIVE(cos, -L(sin(x)))
ONEPASS_DERIVATIVE(sqrt, L(0.5) / y)
ONEPASS_DERIVATIVE(rsqrt, L(-0.5) * y * y * y)
ONEPASS_DERIVATIVE(reciprocal, -L(y* y))
ONEPASS_DERIVATIVE(erf, L(1.1283791670955126) * exp(L(-(x * x))))
ONEPASS_DERIVATIVE(normal_cdf, normal(x).density)
ONEPASS_DERIVATIVE(normal_part, normal_slope(x))
ONEPASS_DERIVATIVE(tanh, word::tanh::backward(x, L(1)))
ONEPASS_DERIVATIVE(sigmoid, word::sigmoid::backward(x, L(1)))
#undef ONEPASS_DERIVATIVE

template <class L>
ONEPASS_FUNCTION dual<L> pow(dual<L> a, dual<L> b) {
  const L y = pow(a.value, b.value);
  const L by_base = b.value * L(pow(a.value, L(b.value - L(1))));
  return {y, L(along(a.slope, by_base) + along(b.slope, L(y * log(a.value))))};
}

ONEPASS_END
#endif
