// Row words: a row's statistics, what they make of a value, and the derivative.
//
// A kernel hands them a Row with
//   inverse_columns()       1 / the row's length
//   sum(f), sum_pair(f)     sums over the row of f(value), f from lane to lane or to terms
//   squares()               Σ value²
//   moments()               mean, what rounding took from it, and variance. Where Row::kCentred, each value has a shift
//                           near the mean subtracted already, and `saved.first` is the mean minus that shift
//   exponentials()          the largest value (0 where that is -infinity) and Σ exp(value - largest). Where Row::kHeld,
//                           exp(value - largest) takes the place of each value, but for a factor that the kernel
//                           gives to what forward multiplies by, the second of `saved`
//   sum_of_exponentials()   the same two numbers, and values stay
//   picked_exponentials(c)  the same without taking a value's place; the value at column c (0 where that is -1) and
//                           Σ value
//   weighted_exponentials() the same without taking a value's place; and Σ exp(value - largest) (value - largest)
//   total()                 Σ value
//   largest_magnitude()     the largest |value|, 0 of none; a NaN where there is one
//   largest()               the largest value, a NaN before all others, and how many elements have it
// and, where another row stands beside it (is_paired), instead of these
//   paired_exponentials(of_row)  the sums of exponentials of both, and Σ exp(a) (a - b), where a is the row's value and
//                           b the other's, each less its shift, or, where of_row is not true, the other way round
//   paired_sum(f)           two sums over both rows of f(value, other)
// Statistics are two passes over values on chip, never E[x²] - mean². add_terms adds a lane to the sums over the row
// that backward needs, about.sums of them. backward's last argument is 1 / the row's length.
#if defined(ONEPASS_WORD_ROW_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_ROW_H_
#undef ONEPASS_WORD_ROW_H_
#else
#define ONEPASS_WORD_ROW_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/activation.h"

ONEPASS_BEGIN
namespace word {

// What a row's target says: the column, -1 where the row is ignored.
struct target {
  int64 column = -1;
};
template <class T>
struct row_numbers {  // saved per row, about.statistics of them
  T first, second, third = T(0);
  T gradient = T(0);    // in backward, of the number that an ending gives; of one with a target, the target's own
  target at = {};       // in backward
  bool shared = false;  // in backward: an entropy has its part of the probabilities (share_probabilities)
  T fourth = T(0), fifth = T(0), sixth = T(0);  // saved
};
// The i-th of those that are saved.
template <class T>
ONEPASS_FUNCTION T& saved_number(row_numbers<T>& of, int i) {
  switch (i) {
    case 0: return of.first;
    case 1: return of.second;
    case 2: return of.third;
    case 3: return of.fourth;
    case 4: return of.fifth;
    default: return of.sixth;
  }
}

// A user's row word (word/user.h), Count of whose numbers begin at First among the line's: what is saved are sums over
// the row, and where others hold their result in backward, it holds the value before. Its functions get own_numbers.
template <class Row, int First, int Count>
struct of_sums : Row {
  static constexpr int kFirstNumber = First, kNumbers = Count;
};
template <class Row>
inline constexpr bool is_of_sums = false;
template <class Row, int First, int Count>
inline constexpr bool is_of_sums<of_sums<Row, First, Count>> = true;
template <class T, int Count>
struct own_numbers {
  T columns;  // the row's length
  T number[Count > 0 ? Count : 1];
};
template <class T>
struct row_moments {
  T mean, rest, variance;  // the mean is mean + rest
};
template <class T>
struct pair {  // sums over the row
  T first, second;
};
template <class T>
struct weighted {
  T shift, sum, product;
};
template <class T>
struct picked {
  T shift, sum, value, total;
};
template <class T>
struct paired {  // the shift and Σ exp(value - shift) of a row and of another; product: see paired_exponentials
  T shift, sum, other_shift, other_sum, product;
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

// exp(u - shift), and that times u - shift; nothing of -infinity.
template <class L>
ONEPASS_FUNCTION terms<L> weighted_exponential(L u, typename L::scalar shift) {
  const L e = exp_minus(u, shift);
  return {e, where(e == L(0), L(0), e * (u - L(shift)))};
}

// What a is more than b, where exp(a - shift) counts it; nothing of -infinity.
template <class L>
ONEPASS_FUNCTION L counted_difference(L exponential, L a, L b) {
  return where(exponential == L(0), L(0), a - b);
}

// What rounding takes from a sum (Knuth): the same for both orders.
template <class T>
ONEPASS_FUNCTION T rest_of_sum(T a, T b, T sum) {
  const T of_b = sum - a;
  return (a - (sum - of_b)) + (b - of_b);
}

// Mean and variance, each by a pass over the row.
template <class Row>
ONEPASS_FUNCTION auto moments_in_two_passes(Row& row) {
  using L = typename Row::lane;
  using T = typename L::scalar;
  const T mean = row.sum([](L u) ONEPASS_LAMBDA { return u; }) * row.inverse_columns();
  const pair<T> sums = row.sum_pair([mean](L u) ONEPASS_LAMBDA {
    const L centred = u - L(mean);
    return terms<L>{centred, centred * centred};
  });
  const T rest = sums.first * row.inverse_columns();  // what rounding the first sum took from the mean
  return row_moments<T>{mean, rest, sums.second * row.inverse_columns() - rest * rest};
}

struct layer_norm {
  static constexpr descriptor about{.name = "layer_norm",
                                    .kind = word_kind::row,
                                    .parameter = "eps",
                                    .parameter_default = 1e-5,
                                    .statistics = 3,
                                    .fine = 1,
                                    .flops_recompute = 2,
                                    .flops_forward = 7,
                                    .flops_backward = 11,
                                    .normalises = true,
                                    .centres = true,
                                    .formula = "(x - mean) / √(var + eps)",
                                    .meaning = "normalises the row to mean 0 and variance 1; affine is `scale | bias`"};
  template <class Row, class T>
  // Saved: mean, rstd, and -rest rstd. Of a row whose deviation is a few units in the last place of its mean, the
  // rounded mean alone would be off by a good part of the deviation.
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T eps) {
    const row_moments<T> of = row.moments();
    const T rstd = reciprocal_root((of.variance < T(0) ? T(0) : of.variance) + eps);
    return {of.mean, rstd, -of.rest * rstd};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    if constexpr (Row::kCentred) return fma(u, L(saved.second), L(-saved.first * saved.second));
    else return recompute(u, saved);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T> saved) {
    return centred_product(u, L(saved.first), L(saved.second), L(saved.third));
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L z, L dz, terms<L>& to) {
    to = {to.first + dz, fma(dz, z, to.second)};
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T> sums, T inverse_columns) {
    const T factor = -saved.second * inverse_columns;
    return fma(dz, L(saved.second), fma(z, L(factor * sums.second), L(factor * sums.first)));
  }
};

struct rms_norm {
  static constexpr descriptor about{.name = "rms_norm",
                                    .kind = word_kind::row,
                                    .parameter = "eps",
                                    .parameter_default = kMachineEpsilon,
                                    .statistics = 1,
                                    .sums = 1,
                                    .flops_recompute = 1,
                                    .flops_forward = 4,
                                    .flops_backward = 8,
                                    .normalises = true,
                                    .formula = "x / √(mean(x²) + eps)",
                                    .meaning = "divides the row by its root mean square; the weight is `scale`"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T eps) {
    const T mean_square = row.squares() * row.inverse_columns();
    return {reciprocal_root(mean_square + eps), T(0)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    return u * L(saved.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T> saved) {
    return u * L(saved.first);
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L z, L dz, terms<L>& to) {
    to.first = fma(dz, z, to.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T> sums, T inverse_columns) {
    return L(saved.first) * fma(z, L(-sums.first * inverse_columns), dz);
  }
};

struct softmax {  // saved: the shift and 1 / sum. A fully masked row (all -inf) gives zeros.
  static constexpr descriptor about{.name = "softmax",
                                    .kind = word_kind::row,
                                    .statistics = 2,
                                    .sums = 1,
                                    .flops_recompute = 10,
                                    .backward_from_result = true,
                                    .flops_forward = 12,
                                    .flops_backward = 14,
                                    .is_softmax = true,
                                    .formula = "exp(x - max) / Σ exp(x - max)",
                                    .meaning = "probabilities over the row; a fully masked row gives zeros"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const pair<T> of = row.exponentials();
    return {of.first, of.second == T(0) ? T(0) : reciprocal_number(of.second)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    if constexpr (Row::kHeld) return u * L(saved.second);
    else return recompute(u, saved);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T> saved) {
    return exp_minus(u, saved.first) * L(saved.second);
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L z, L dz, terms<L>& to) {
    to.first = fma(dz, z, to.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T>, pair<T> sums, T) {
    return z * (dz - L(sums.first));
  }
};

struct log_softmax {  // saved: the shift and log(sum). A fully masked row (all -inf) gives NaN, as PyTorch's does.
  static constexpr descriptor about{.name = "log_softmax",
                                    .kind = word_kind::row,
                                    .statistics = 2,
                                    .sums = 1,
                                    .flops_recompute = 2,
                                    .backward_from_result = true,
                                    .flops_forward = 12,
                                    .flops_backward = 12,
                                    .formula = "x - max - log(Σ exp(x - max))",
                                    .meaning = "logarithms of the row's probabilities; a fully masked row gives NaN"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const pair<T> of = row.sum_of_exponentials();
    return {of.first, log_number(of.second)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    return recompute(u, saved);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T> saved) {
    return (u - L(saved.first)) - L(saved.second);
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L, L dz, terms<L>& to) {
    to.first = to.first + dz;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T>, pair<T> sums, T) {
    return fma(L(exp(z)), L(-sums.first), dz);
  }
};

// Saved: 1 / max(‖x‖, eps), and whether that is the row's own length, which alone has a gradient.
struct l2_norm {
  static constexpr descriptor about{.name = "l2_norm",
                                    .kind = word_kind::row,
                                    .parameter = "eps",
                                    .parameter_default = 1e-12,
                                    .statistics = 2,
                                    .sums = 1,
                                    .flops_recompute = 1,
                                    .flops_forward = 4,
                                    .flops_backward = 6,
                                    .formula = "x / max(√(Σ x²), eps)",
                                    .meaning = "divides the row by its length, as torch.nn.functional.normalize"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T eps) {
    const T inverse = reciprocal_root(row.squares());
    const T most = eps > T(0) ? reciprocal_number(eps) : static_cast<T>(kInfinity);
    return {inverse >= most ? most : inverse, inverse >= most ? T(0) : T(1)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    return u * L(saved.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T> saved) {
    return u * L(saved.first);
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L z, L dz, terms<L>& to) {
    to.first = fma(dz, z, to.first);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T> sums, T) {
    return L(saved.first) * fma(z, L(saved.second == T(0) ? T(0) : -sums.first), dz);
  }
};

// The identity as a row word, for a line that ends in features but has no norm and no softmax.
struct whole {
  static constexpr descriptor about{
      .name = "", .kind = word_kind::row, .sums = 0, .flops_forward = 0, .flops_backward = 0};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row&, T) {
    return {T(0), T(0)};
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T>) {
    return u;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L u, row_numbers<T>) {
    return u;
  }
  template <class L>
  static ONEPASS_FUNCTION void add_terms(L, L, terms<L>&) {}
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L, L dz, row_numbers<T>, pair<T>, T) {
    return dz;
  }
};

// In backward, a row word whose result is at hand: the row is not made again.
template <class Row>
struct resumed : Row {};

using row_words = list<layer_norm, rms_norm, l2_norm, softmax, log_softmax>;

}  // namespace word
ONEPASS_END
#endif
