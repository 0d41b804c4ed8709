// The words that are no activation: each with what it takes from the call, its forward and its backward.
// dropout, masks and keep also live here; normalisations are in row.h.
#if defined(ONEPASS_WORD_WORDS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_WORDS_H_
#undef ONEPASS_WORD_WORDS_H_
#else
#define ONEPASS_WORD_WORDS_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/activation.h"

ONEPASS_BEGIN
namespace word {

template <class L>
struct gradients {
  L dx, doperand;
};

struct bias {
  static constexpr descriptor about{.name = "bias",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::column,
                                    .operand_name = "b",
                                    .backward_needs_input = false,
                                    .passes_gradient = true,
                                    .operand_gradient_is_dy = true,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .adds = true,
                                    .formula = "x + b",
                                    .meaning = "adds a column vector; bias(channels) a number for each channel"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L b) {
    return x + b;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L, L, L dy) {
    return {dy, dy};
  }
};

struct scale {
  static constexpr descriptor about{.name = "scale",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::column,
                                    .operand_name = "g",
                                    .parameter = "c",
                                    .with_number = "scale_plus",
                                    .backward_needs_operand = true,
                                    .operand_gradient_is_dy_x = true,
                                    .flops_forward = 1,
                                    .flops_backward = 3,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .scales = true,
                                    .formula = "x · g; scale(c): x · (c + g)",
                                    .meaning =
                                        "multiplies by a column vector; scale(1) modulates, scale(channels) and "
                                        "scale(1, channels) have a number for each channel"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L g) {
    return x * g;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L g, L dy) {
    return {dy * g, dy * x};
  }
};

// `scale` with a number.
struct scale_plus {
  static constexpr descriptor about = scale::about;
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L g, L c) {
    return x * (g + c);
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L g, L dy, L c) {
    return {dy * (g + c), dy * x};
  }
};

// The same words with a number for each channel, where a row is some channels of as many columns each.
constexpr descriptor of_channels(descriptor about, const char* defined) {
  about.option = "channels", about.by_channels = true, about.defined = defined;
  return about;
}
struct channel_bias : bias {
  static constexpr descriptor about = of_channels(bias::about, "word::channel_bias");
};
struct channel_scale : scale {
  static constexpr descriptor about = [] {
    descriptor with = of_channels(scale::about, "word::channel_scale");
    with.with_number = "channel_scale_plus";
    return with;
  }();
};
struct channel_scale_plus : scale_plus {
  static constexpr descriptor about = channel_scale::about;
};

struct mul {
  static constexpr descriptor about{.name = "mul",
                                    .kind = word_kind::affine,
                                    .parameter = "c",
                                    .parameter_required = true,
                                    .backward_needs_input = false,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .scales = true,
                                    .formula = "x · c",
                                    .meaning = "multiplies by a number"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L c) {
    return x * c;
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L, L dy, L c) {
    return dy * c;
  }
};

struct add {
  static constexpr descriptor about{.name = "add",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "r",
                                    .backward_needs_input = false,
                                    .passes_gradient = true,
                                    .operand_gradient_is_dy = true,
                                    .flops_forward = 1,
                                    .flops_backward = 0,
                                    .adds = true,
                                    .formula = "x + r",
                                    .meaning = "adds a tensor, a residual say"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L r) {
    return x + r;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L, L, L dy) {
    return {dy, dy};
  }
};

struct sub {
  static constexpr descriptor about{.name = "sub",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "t",
                                    .backward_needs_input = false,
                                    .passes_gradient = true,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .formula = "x - t",
                                    .meaning = "subtracts a tensor"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L t) {
    return x - t;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L, L, L dy) {
    return {dy, -dy};
  }
};

struct times {
  static constexpr descriptor about{.name = "times",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "t",
                                    .backward_needs_operand = true,
                                    .operand_gradient_is_dy_x = true,
                                    .flops_forward = 1,
                                    .flops_backward = 2,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .scales = true,
                                    .formula = "x · t",
                                    .meaning = "multiplies by a tensor"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L t) {
    return x * t;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L t, L dy) {
    return {dy * t, dy * x};
  }
};

struct div {  // maps no zero to zero: 0 / 0
  static constexpr descriptor about{.name = "div",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "t",
                                    .backward_needs_operand = true,
                                    .flops_forward = 1,
                                    .flops_backward = 4,
                                    .is_linear = true,
                                    .formula = "x / t",
                                    .meaning = "divides by a tensor"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L t) {
    return x / t;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L t, L dy) {
    return {dy / t, -dy * L(L(x / t) / t)};
  }
};

template <class Activation>
struct gate {
  static constexpr descriptor about{
      .name = "gate",
      .kind = word_kind::gate,
      .operand = operand_kind::tensor,
      .operand_name = "u",
      .parameters = Activation::about.parameters,
      .backward_needs_operand = true,
      .flops_forward = Activation::about.flops_forward + 1,
      .flops_backward = Activation::about.flops_forward + Activation::about.flops_backward + 2,
      .maps_zero_to_zero = Activation::about.maps_zero_to_zero,
      .formula = "activation(x) · u",
      .meaning = "gates a tensor with an activation of x; gate(silu) is SwiGLU"};
  template <class L, class... Parameter>
  static ONEPASS_FUNCTION L forward(L x, L u, Parameter... a) {
    return Activation::forward(x, a...) * u;
  }
  template <class L, class... Parameter>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L u, L dy, Parameter... a) {
    if constexpr (has_both<Activation, L>) {
      const value_and_slope<L> f = Activation::both(x);
      return {dy * u * f.slope, dy * f.value};
    } else {
      return {Activation::backward(x, L(dy * u), a...), dy * Activation::forward(x, a...)};
    }
  }
};

// Its mirror. Linear in x, but what it maps zero to is what the activation makes of the operand: NaN where that is
// infinite.
template <class Activation>
struct gated {
  static constexpr descriptor about{
      .name = "gated",
      .kind = word_kind::gate,
      .operand = operand_kind::tensor,
      .operand_name = "u",
      .parameters = Activation::about.parameters,
      .backward_needs_operand = true,
      .flops_forward = Activation::about.flops_forward + 1,
      .flops_backward = Activation::about.flops_forward + Activation::about.flops_backward + 2,
      .is_linear = true,
      .formula = "x · activation(u)",
      .meaning = "multiplies by an activation of a tensor; the gated norms of state-space models are gated(silu)"};
  template <class L, class... Parameter>
  static ONEPASS_FUNCTION L forward(L x, L u, Parameter... a) {
    return x * Activation::forward(u, a...);
  }
  template <class L, class... Parameter>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L u, L dy, Parameter... a) {
    const gradients<L> of = gate<Activation>::backward(u, x, dy, a...);
    return {of.doperand, of.dx};
  }
};

struct dropout {  // keeps: which numbers stay, those whose 16 random bits, a pure function of state and place, reach
                  // the threshold
  static constexpr descriptor about{.name = "dropout",
                                    .kind = word_kind::dropout,
                                    .parameter = "p",
                                    .parameter_default = 0.5,
                                    .backward_needs_input = false,
                                    .flops_forward = 12,
                                    .flops_backward = 12,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .formula = "x / (1 - p) with probability 1 - p, else 0",
                                    .meaning = "zeroes elements at random while training; no mask is stored"};
  // p is rounded to a multiple of 2^-16 and the kept values are scaled by that rounded probability's inverse,
  // so the mean is kept exactly.
  template <class T>
  static ONEPASS_FUNCTION int threshold(T p) {
    return static_cast<int>(p * T(65536) + T(0.5));
  }
  template <class L, class Mask>
  static ONEPASS_FUNCTION L forward(L x, Mask keeps, typename L::scalar p) {
    using T = typename L::scalar;
    const T kept = T(65536) - static_cast<T>(threshold(p));
    return where(keeps, x * L(kept > T(0) ? T(65536) * reciprocal_number(kept) : T(0)), L(0));
  }
  template <class L, class Mask>
  static ONEPASS_FUNCTION L backward(L dy, Mask keeps, typename L::scalar p) {
    return forward(dy, keeps, p);
  }
};

// `mask` becomes one of the next two when its operand's dtype is known.
struct mask_boolean {
  static constexpr descriptor about{
      .name = "mask",
      .kind = word_kind::mask,
      .operand = operand_kind::tensor,
      .operand_name = "mask",
      .backward_needs_input = false,
      .backward_needs_operand = true,
      .flops_forward = 1,
      .flops_backward = 1,
      .formula = "x where mask is True, else -inf; x + mask where it is float",
      .meaning = "masks: bool (True keeps, as in scaled_dot_product_attention) or additive"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L keep) {
    return where(is_set(keep), x, L(-kInfinity));
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L, L keep, L dy) {
    const L dx = where(is_set(keep), dy, L(0));
    return {dx, dx};
  }
};

struct mask_additive {
  static constexpr descriptor about{.name = "mask",
                                    .kind = word_kind::mask,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "mask",
                                    .backward_needs_input = false,
                                    .passes_gradient = true,
                                    .operand_gradient_is_dy = true,
                                    .flops_forward = 1,
                                    .flops_backward = 0,
                                    .adds = true,
                                    .formula = mask_boolean::about.formula,
                                    .meaning = mask_boolean::about.meaning};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L m) {
    return x + m;
  }
  template <class L>
  static ONEPASS_FUNCTION gradients<L> backward(L, L, L dy) {
    return {dy, dy};
  }
};

struct causal {
  static constexpr descriptor about{.name = "causal",
                                    .kind = word_kind::mask,
                                    .backward_needs_input = false,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .is_causal = true,
                                    .formula = "x where column <= row of the last two dims, else -inf",
                                    .meaning = "masks what stands above the diagonal of the last two dimensions"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L column, L row) {
    return where(column <= row, x, L(-kInfinity));
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L dy, L column, L row) {
    return where(column <= row, dy, L(0));
  }
};

// Pairs of numbers are coordinates of points, which are turned. A lane has both numbers of a pair beside each other,
// wherever they are in the row (kernel/common/column_order.h). The tables have an element for each number that is
// turned, or one for each pair. Neighbours: pairs are neighbours in the row, else numbers half of what is turned apart.
// First: only the row's first numbers are turned.
template <bool Neighbours, bool First>
struct rotation {
  static constexpr descriptor about{
      .name = "rope",
      .kind = word_kind::rotary,
      .operand = operand_kind::tensor,
      .operand_name = "cos, sin",
      .operands = 2,
      .parameter = "r",
      .with_number = Neighbours ? "rope_interleaved_first" : "rope_first",
      .option = Neighbours ? "interleaved" : "",
      .backward_needs_input = false,
      .backward_needs_operand = true,
      .flops_forward = 3,
      .flops_backward = 3,
      .is_linear = true,
      .defined = Neighbours && !First ? "word::rope_interleaved" : "",
      .formula = "x · cos + (-x₂, x₁) · sin",
      .meaning =
          "rotary position embedding: turns the row's halves x₁, x₂, or those of its first r numbers; with "
          "interleaved, as in rope(64, interleaved), its even and its odd numbers"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L cos, L sin) {
    return fma(x, cos, L(quarter_turn(x) * sin));
  }
  template <class L>
  static ONEPASS_FUNCTION L backward(L dy, L cos, L sin) {
    return fma(dy, cos, L(-quarter_turn(L(dy * sin))));
  }
};
using rope = rotation<false, false>;
using rope_first = rotation<false, true>;
using rope_interleaved = rotation<true, false>;
using rope_interleaved_first = rotation<true, true>;

// The value, rounded to x's dtype or to the one that the line names: what the caller gets is what the rest of the line
// sees.
struct keep {
  static constexpr descriptor about{.name = "keep",
                                    .kind = word_kind::keep,
                                    .dtypes = "float32",
                                    .backward_needs_input = false,
                                    .flops_forward = 0,
                                    .flops_backward = 1,
                                    .maps_zero_to_zero = true,
                                    .is_linear = true,
                                    .formula = "x",
                                    .meaning =
                                        "also returns the value at this point, in x's dtype or, as "
                                        "keep(float32), in float32"};
};
// The same without a result: another implementation rounds here. Its gradient is not rounded.
struct round {
  static constexpr descriptor about{.name = "round",
                                    .kind = word_kind::rounding,
                                    .backward_needs_input = false,
                                    .passes_gradient = true,
                                    .flops_forward = 0,
                                    .flops_backward = 0,
                                    .maps_zero_to_zero = true,
                                    .formula = "x",
                                    .meaning = "rounds to x's dtype at this point, as `keep` does, without a result"};
  template <class L>
  static ONEPASS_FUNCTION L backward(L, L dy) {
    return dy;
  }
};
// In backward, a keep whose tensor the line resumes from: what stands before it is not computed again.
struct resume {
  static constexpr descriptor about = keep::about;
};

// One of the few numbers that `linear` makes of a row: Σ x w. The row goes on to the next of them.
struct feature {
  static constexpr descriptor about{.name = "feature",
                                    .kind = word_kind::feature,
                                    .operand = operand_kind::column,
                                    .operand_name = "a row of W",
                                    .backward_needs_operand = true,
                                    .operand_gradient_is_dy_x = true,
                                    .flops_forward = 2,
                                    .flops_backward = 4,
                                    .formula = "Σ x w",
                                    .meaning = "contracts the row with a column"};
};

}  // namespace word
ONEPASS_END
#endif
