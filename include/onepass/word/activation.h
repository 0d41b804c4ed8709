// Activations: x -> f(x), each with its derivative. A new one is a struct here, a name in `activations` at the
// bottom, and one line in python/onepass/reference.py.
#if defined(ONEPASS_WORD_ACTIVATION_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_ACTIVATION_H_
#undef ONEPASS_WORD_ACTIVATION_H_
#else
#define ONEPASS_WORD_ACTIVATION_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/descriptor.h"

ONEPASS_BEGIN
namespace word {

// f(x) and f'(x), which a word's `both` gives where they share their work: for backward that needs both.
template <class L>
struct value_and_slope {
  L value, slope;
};
template <class Word, class L>
inline constexpr bool has_both = requires(L x) {
  Word::both(x);
};

struct relu {
  static constexpr descriptor about{.name = "relu",
                                    .kind = word_kind::activation,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .maps_zero_to_zero = true,
                                    .formula = "max(x, 0)",
                                    .meaning = "rectified linear unit"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return where(x < L(0), L(0), x);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return where(x <= L(0), L(0), dy);
  }
};

struct gelu {
  static constexpr descriptor about{.name = "gelu",
                                    .kind = word_kind::activation,
                                    .flops_forward = 16,
                                    .flops_backward = 30,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · Φ(x), Φ the normal distribution function",
                                    .meaning = "Gaussian error linear unit, exact"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return normal_part(x);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const auto n = normal(x);
    return {x * n.cdf, fma(x, n.density, n.cdf)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * normal_slope(x);
  }
};

struct gelu_tanh {  // 0.5x(1 + tanh u) = x · sigmoid(2u): exact algebra, and no cancellation for x << 0
  static constexpr descriptor about{.name = "gelu_tanh",
                                    .kind = word_kind::activation,
                                    .flops_forward = 14,
                                    .flops_backward = 22,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · sigmoid(2u), u = √(2/π)(x + 0.044715x³)",
                                    .meaning = "Gaussian error linear unit, tanh approximation"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    const L twice_u = x * fma(x * x, L(0.07135481627260025), L(1.5957691216057308));
    return x * ONEPASS_TARGET::sigmoid(twice_u);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L square = min(x * x, L(1e6));  // where it is saturated
    const auto s = logistic(L(x * fma(square, L(0.07135481627260025), L(1.5957691216057308))));
    const L value = x * s.value;
    const L slope = fma(square, L(0.21406444881780074), L(1.5957691216057308));  // d(2u)/dx
    return {value, fma(value * s.rest, slope, s.value)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }
};

struct quick_gelu {
  static constexpr descriptor about{.name = "quick_gelu",
                                    .kind = word_kind::activation,
                                    .flops_forward = 11,
                                    .flops_backward = 16,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · sigmoid(1.702x)",
                                    .meaning = "Gaussian error linear unit, sigmoid approximation"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x * ONEPASS_TARGET::sigmoid(L(L(1.702) * x));
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const auto s = logistic(L(L(1.702) * x));
    const L value = x * s.value;
    return {value, fma(value * s.rest, L(1.702), s.value)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }
};

struct silu {
  static constexpr descriptor about{.name = "silu",
                                    .kind = word_kind::activation,
                                    .flops_forward = 10,
                                    .flops_backward = 15,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · sigmoid(x)",
                                    .meaning = "sigmoid linear unit, swish"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x * ONEPASS_TARGET::sigmoid(x);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const auto s = logistic(x);
    const L value = x * s.value;
    return {value, fma(value, s.rest, s.value)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }
};

struct tanh {
  static constexpr descriptor about{.name = "tanh",
                                    .kind = word_kind::activation,
                                    .flops_forward = 10,
                                    .flops_backward = 13,
                                    .maps_zero_to_zero = true,
                                    .formula = "tanh(x)",
                                    .meaning = "hyperbolic tangent"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return ONEPASS_TARGET::tanh(x);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const auto tanh = tanh_and_rest(x);
    return {tanh.value, fma(tanh.rest, L(1) - tanh.rest, tanh.rest)};  // (1 - tanh) (1 + tanh) of |x|: nothing cancels
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }
};

struct sigmoid {
  static constexpr descriptor about{.name = "sigmoid",
                                    .kind = word_kind::activation,
                                    .flops_forward = 9,
                                    .flops_backward = 12,
                                    .formula = "1 / (1 + exp(-x))",
                                    .meaning = "logistic function"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return ONEPASS_TARGET::sigmoid(x);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L e = exp(L(-abs(x))), r = reciprocal(L(1) + e), far = e * r;
    return {where(x < L(0), far, r), far * r};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }
};

struct relu_squared {
  static constexpr descriptor about{.name = "relu_squared",
                                    .kind = word_kind::activation,
                                    .flops_forward = 2,
                                    .flops_backward = 3,
                                    .maps_zero_to_zero = true,
                                    .formula = "max(x, 0)²",
                                    .meaning = "squared rectified linear unit"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    const L r = relu::forward(x);
    return r * r;
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return relu::backward(x, L(L(2) * x * dy));  // 0 where x <= 0, whatever dy is
  }
};

struct softplus {  // PyTorch's threshold of 20: above it x itself
  static constexpr descriptor about{.name = "softplus",
                                    .kind = word_kind::activation,
                                    .flops_forward = 18,
                                    .flops_backward = 10,
                                    .formula = "log(1 + exp(x))",
                                    .meaning = "smooth rectified linear unit"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return where(x > L(20), x, log1p(exp(L(min(x, L(20))))));
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L e = exp(L(min(x, L(20))));
    return {where(x > L(20), x, log1p(e)), where(x > L(20), L(1), e * reciprocal(L(1) + e))};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return where(x > L(20), dy, dy * ONEPASS_TARGET::sigmoid(x));
  }
};

struct mish {  // tanh(log1p(e)) = n / (n + 2) with n = e(e + 2), e = exp(x)
  static constexpr descriptor about{.name = "mish",
                                    .kind = word_kind::activation,
                                    .flops_forward = 13,
                                    .flops_backward = 22,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · tanh(softplus(x))",
                                    .meaning = "mish"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    const L n = n_of(exp(L(min(x, L(20)))));  // from 20 on the quotient is 1
    return x * (n * reciprocal(n + L(2)));
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L near = min(x, L(20)), e = exp(near), n = n_of(e);
    const L d = n + L(2), about = reciprocal(d), r = fma(about, fma(-d, about, L(1)), about), t = n * r;
    const L slope = L(4) * e * (e + L(1)) * r * r;  // d tanh(softplus(x)) / dx
    return {x * t, fma(near, slope, t)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }

 private:
  template <class L>
  static ONEPASS_FUNCTION L n_of(L e) {
    return e * (e + L(2));
  }
};

struct hardswish {
  static constexpr descriptor about{.name = "hardswish",
                                    .kind = word_kind::activation,
                                    .flops_forward = 5,
                                    .flops_backward = 5,
                                    .maps_zero_to_zero = true,
                                    .formula = "x · min(max(x + 3, 0), 6) / 6",
                                    .meaning = "piecewise quadratic swish"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x * min(max(x + L(3), L(0)), L(6)) * L(1.0 / 6.0);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    const L inside = dy * fma(x, L(1.0 / 3.0), L(0.5));
    return where(x <= L(-3), L(0), where(x >= L(3), dy, inside));
  }
};

struct elu {
  static constexpr descriptor about{.name = "elu",
                                    .kind = word_kind::activation,
                                    .parameter = "alpha",
                                    .parameter_default = 1.0,
                                    .flops_forward = 12,
                                    .flops_backward = 11,
                                    .maps_zero_to_zero = true,
                                    .formula = "x if x > 0 else alpha · (exp(x) - 1)",
                                    .meaning = "exponential linear unit"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L alpha) {
    return where(x > L(0), x, alpha * expm1(x));
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy, L alpha) {
    return where(x > L(0), dy, dy * alpha * exp(x));
  }
};

struct leaky_relu {
  static constexpr descriptor about{.name = "leaky_relu",
                                    .kind = word_kind::activation,
                                    .parameter = "negative_slope",
                                    .parameter_default = 0.01,
                                    .flops_forward = 2,
                                    .flops_backward = 2,
                                    .maps_zero_to_zero = true,
                                    .formula = "x if x > 0 else negative_slope · x",
                                    .meaning = "leaky rectified linear unit"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L negative_slope) {
    return where(x > L(0), x, negative_slope * x);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy, L negative_slope) {
    return where(x > L(0), dy, negative_slope * dy);
  }
};

struct softsign {
  static constexpr descriptor about{.name = "softsign",
                                    .kind = word_kind::activation,
                                    .flops_forward = 3,
                                    .flops_backward = 5,
                                    .maps_zero_to_zero = true,
                                    .formula = "x / (1 + |x|)",
                                    .meaning = "softsign"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x * four_over(x) * L(0.25);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L r = four_over(x);
    return {x * r * L(0.25), r * r * L(0.0625)};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * both(x).slope;
  }

 private:
  // 4 / (1 + |x|), a normal number for every x.
  template <class L>
  static ONEPASS_FUNCTION L four_over(L x) {
    return reciprocal(fma(abs(x), L(0.25), L(0.25)));
  }
};

template <class... Words>
struct list {};

using activations = list<relu, gelu, gelu_tanh, silu, tanh, sigmoid, relu_squared, quick_gelu, softplus, mish,
                         hardswish, elu, leaky_relu, softsign>;

}  // namespace word
ONEPASS_END
#endif
