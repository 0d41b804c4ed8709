// Row words: a row's statistics, what they make of a value, and the derivative.
//
// A skeleton hands them a Row with
//   columns()               the row's length, as a scalar
//   sum(f), max(f)          over the row of f(value), f from lane to lane; the result is the same in every lane
//   sum_pair(f)             two sums at once, f from lane to terms
//   replace_sum(f)          puts f(value) in the place of each value and sums it (where the row is held on chip;
//                           elsewhere it only sums, and Row::kHeld is false)
// Statistics are two passes over values on chip, never E[x²] - mean².
#if defined(ONEPASS_STAGE_ROW_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_STAGE_ROW_H_
#undef ONEPASS_STAGE_ROW_H_
#else
#define ONEPASS_STAGE_ROW_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/stage/activation.h"

ONEPASS_BEGIN
namespace stage {

template <class T>
struct pair {  // saved per row
  T first, second;
};
template <class L>
struct terms {  // summed over the row
  L first, second;
};
template <class L>
ONEPASS_FUNCTION terms<L> operator+(terms<L> a, terms<L> b) {
  return {a.first + b.first, a.second + b.second};
}
template <class T>
ONEPASS_FUNCTION pair<T> operator+(pair<T> a, pair<T> b) {
  return {a.first + b.first, a.second + b.second};
}

struct layer_norm {
  static constexpr descriptor about{.name = "layer_norm",
                                    .kind = word_kind::row,
                                    .parameter = "eps",
                                    .parameter_default = 1e-5,
                                    .statistics = 2,
                                    .flops_recompute = 2,
                                    .flops_forward = 7,
                                    .flops_backward = 11,
                                    .formula = "(x - mean) / √(var + eps)",
                                    .meaning = "normalises the row to mean 0 and variance 1; affine is `scale | bias`"};
  template <class Row, class T>
  static ONEPASS_FUNCTION pair<T> statistics(Row& row, T eps) {
    using L = typename Row::lane;
    const T mean = row.sum([](L u) ONEPASS_LAMBDA { return u; }) / row.columns();
    const pair<T> sums = row.sum_pair([mean](L u) ONEPASS_LAMBDA {
      const L centred = u - L(mean);
      return terms<L>{centred, centred * centred};
    });
    const T rest = sums.first / row.columns();  // what rounding the first sum took from the mean
    const T variance = sums.second / row.columns() - rest * rest;
    return {mean + rest, T(1) / square_root((variance < T(0) ? T(0) : variance) + eps)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, pair<T> saved) {
    return (u - L(saved.first)) * L(saved.second);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, pair<T> saved) {
    return (u - L(saved.first)) * L(saved.second);
  }
  template <class L>
  static ONEPASS_FUNCTION terms<L> backward_terms(L z, L dz) {
    return {dz, dz * z};
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, pair<T> saved, pair<T> sums, T columns) {
    return L(saved.second) * (dz - L(sums.first / columns) - z * L(sums.second / columns));
  }
};

struct rms_norm {
  static constexpr descriptor about{.name = "rms_norm",
                                    .kind = word_kind::row,
                                    .parameter = "eps",
                                    .parameter_default = kMachineEpsilon,
                                    .statistics = 1,
                                    .flops_recompute = 1,
                                    .flops_forward = 4,
                                    .flops_backward = 8,
                                    .formula = "x / √(mean(x²) + eps)",
                                    .meaning = "divides the row by its root mean square; the weight is `scale`"};
  template <class Row, class T>
  static ONEPASS_FUNCTION pair<T> statistics(Row& row, T eps) {
    using L = typename Row::lane;
    const T mean_square = row.sum([](L u) ONEPASS_LAMBDA { return u * u; }) / row.columns();
    return {T(1) / square_root(mean_square + eps), T(0)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, pair<T> saved) {
    return u * L(saved.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, pair<T> saved) {
    return u * L(saved.first);
  }
  template <class L>
  static ONEPASS_FUNCTION terms<L> backward_terms(L z, L dz) {
    return {dz * z, L(0)};
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, pair<T> saved, pair<T> sums, T columns) {
    return L(saved.first) * (dz - z * L(sums.first / columns));
  }
};

struct softmax {  // saved: the shift and 1 / sum. A fully masked row (all -inf) gives zeros.
  static constexpr descriptor about{.name = "softmax",
                                    .kind = word_kind::row,
                                    .statistics = 2,
                                    .flops_recompute = 10,
                                    .backward_from_result = true,
                                    .flops_forward = 12,
                                    .flops_backward = 14,
                                    .formula = "exp(x - max) / Σ exp(x - max)",
                                    .meaning = "probabilities over the row; a fully masked row gives zeros"};
  template <class Row, class T>
  static ONEPASS_FUNCTION pair<T> statistics(Row& row, T) {
    using L = typename Row::lane;
    const T largest = row.max([](L u) ONEPASS_LAMBDA { return u; });
    const T shift = largest == T(-kInfinity) ? T(0) : largest;
    const T sum = row.replace_sum([shift](L u) ONEPASS_LAMBDA { return exp(u - L(shift)); });
    return {shift, sum == T(0) ? T(0) : T(1) / sum};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, pair<T> saved) {
    if constexpr (Row::kHeld) return u * L(saved.second);
    else return recompute(u, saved);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, pair<T> saved) {
    return exp(u - L(saved.first)) * L(saved.second);
  }
  template <class L>
  static ONEPASS_FUNCTION terms<L> backward_terms(L z, L dz) {
    return {dz * z, L(0)};
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, pair<T>, pair<T> sums, T) {
    return z * (dz - L(sums.first));
  }
};

// In backward, a row word whose result is at hand: the row is not made again.
template <class Row>
struct resumed : Row {};

using row_words = list<layer_norm, rms_norm, softmax>;

}  // namespace stage
ONEPASS_END
#endif
