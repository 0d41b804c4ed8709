// Functions of PyTorch as words: activations in all but that no line of theirs is compiled ahead of time. A new one is
// a struct here, a name in `functions` at the bottom, and one line in python/onepass/reference.py. A struct has another
// name than its word, which is that of a lane's function: `defined` tells it.
#if defined(ONEPASS_WORD_FUNCTIONS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_FUNCTIONS_H_
#undef ONEPASS_WORD_FUNCTIONS_H_
#else
#define ONEPASS_WORD_FUNCTIONS_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/activation.h"

ONEPASS_BEGIN
namespace word {

struct exponential {
  static constexpr descriptor about{.name = "exp",
                                    .kind = word_kind::activation,
                                    .flops_forward = 8,
                                    .flops_backward = 9,
                                    .defined = "word::exponential",
                                    .formula = "eˣ",
                                    .meaning = "exponential"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return full_exp(x);
  }
  template <class L>
  static ONEPASS_FUNCTION value_and_slope<L> both(L x) {
    const L e = full_exp(x);
    return {e, e};
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * full_exp(x);
  }
};

struct logarithm {
  static constexpr descriptor about{.name = "log",
                                    .kind = word_kind::activation,
                                    .flops_forward = 12,
                                    .flops_backward = 1,
                                    .defined = "word::logarithm",
                                    .formula = "ln x",
                                    .meaning = "natural logarithm: -∞ at 0, NaN below"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return log(x);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy / x;
  }
};

struct square_root {
  static constexpr descriptor about{.name = "sqrt",
                                    .kind = word_kind::activation,
                                    .flops_forward = 1,
                                    .flops_backward = 3,
                                    .defined = "word::square_root",
                                    .formula = "√x",
                                    .meaning = "square root: NaN below 0; the derivative is ∞ at 0"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return sqrt(x);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    const L root = sqrt(x);
    return dy / (root + root);
  }
};

struct magnitude {
  static constexpr descriptor about{.name = "abs",
                                    .kind = word_kind::activation,
                                    .flops_forward = 1,
                                    .flops_backward = 3,
                                    .maps_zero_to_zero = true,
                                    .defined = "word::magnitude",
                                    .formula = "|x|",
                                    .meaning = "magnitude; the derivative is 0 at 0"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return abs(x);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * where(x > L(0), L(1), where(x < L(0), L(-1), L(0)));
  }
};

struct negative {
  static constexpr descriptor about{.name = "neg",
                                    .kind = word_kind::activation,
                                    .backward_needs_input = false,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .defined = "word::negative",
                                    .formula = "-x",
                                    .meaning = "negative"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return -x;
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L, L dy) {
    return -dy;
  }
};

struct square {
  static constexpr descriptor about{.name = "square",
                                    .kind = word_kind::activation,
                                    .flops_forward = 1,
                                    .flops_backward = 2,
                                    .maps_zero_to_zero = true,
                                    .defined = "word::square",
                                    .formula = "x²",
                                    .meaning = "square"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x * x;
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy) {
    return dy * (x + x);
  }
};

struct soft_cap {
  static constexpr descriptor about{.name = "softcap",
                                    .kind = word_kind::activation,
                                    .parameter = "c",
                                    .parameter_required = true,
                                    .flops_forward = 12,
                                    .flops_backward = 14,
                                    .defined = "word::soft_cap",
                                    .formula = "c · tanh(x / c)",
                                    .meaning = "keeps within -c and c, as Gemma does its logits"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L c) {
    return c * ONEPASS_TARGET::tanh(L(x * reciprocal(c)));
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy, L c) {
    const auto tanh = tanh_and_rest(L(x * reciprocal(c)));
    return dy * fma(tanh.rest, L(1) - tanh.rest, tanh.rest);  // (1 - tanh) (1 + tanh) of |x|: nothing cancels
  }
};

struct clamp {  // torch.clamp: a NaN stays one, and the upper bound holds where it is below the lower one
  static constexpr descriptor about{
      .name = "clamp",
      .kind = word_kind::activation,
      .parameter = "lo, hi",
      .parameters = 2,
      .parameter_required = true,
      .flops_forward = 2,
      .flops_backward = 3,
      .defined = "word::clamp",
      .formula = "min(max(x, lo), hi)",
      .meaning = "keeps within bounds, of which an infinite one is none; the derivative is 0 at both"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L lo, L hi) {
    const L above = where(x < lo, lo, x);
    return where(above > hi, hi, above);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy, L lo, L hi) {
    const L inside = where(x < hi, dy, where(hi == L(kInfinity), dy, L(0)));
    return where(x > lo, inside, where(lo == L(-kInfinity), inside, L(0)));
  }
};

struct power {
  static constexpr descriptor about{.name = "pow",
                                    .kind = word_kind::activation,
                                    .parameter = "p",
                                    .parameter_required = true,
                                    .flops_forward = 20,
                                    .flops_backward = 22,
                                    .defined = "word::power",
                                    .formula = "xᵖ",
                                    .meaning = "power, as torch.pow with a number"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L p) {
    return pow(x, p);
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L x, L dy, L p) {
    return where(p == L(0), L(0), dy * (p * pow(x, L(p - L(1)))));
  }
};

using functions = list<exponential, logarithm, square_root, magnitude, negative, square, soft_cap, clamp, power>;

}  // namespace word
ONEPASS_END
#endif
