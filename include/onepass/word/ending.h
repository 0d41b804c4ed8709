// Endings: row words that give one number a row, in the arithmetic's type. The row goes on unchanged, so that several
// may follow each other.
//
// number(statistics) is called with what statistics(row) has just returned, of which about.statistics numbers are
// saved. backward adds to dz, the gradient of what stands behind, the number's gradient `saved.gradient` times its
// slope: it needs no sum over the row.
#if defined(ONEPASS_WORD_ENDING_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_ENDING_H_
#undef ONEPASS_WORD_ENDING_H_
#else
#define ONEPASS_WORD_ENDING_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/row.h"

ONEPASS_BEGIN
namespace word {

// What endings have in common: the value that entered is what goes on.
struct ending {
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
};

struct logsumexp : ending {  // saved: the shift and 1 / Σ exp(x - shift), as of softmax
  static constexpr descriptor about{.name = "logsumexp",
                                    .kind = word_kind::row,
                                    .backward_needs_input = true,
                                    .statistics = 2,
                                    .sums = 0,
                                    .gives_number = true,
                                    .of_nothing = -kInfinity,
                                    .flops_forward = 11,
                                    .flops_backward = 12,
                                    .formula = "log Σ exp(x)",
                                    .meaning = "one number a row: the logarithm of the sum of exponentials"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const pair<T> of = row.sum_of_exponentials();
    return {of.first, reciprocal_number(of.second), of.second};
  }
  // The sum has a 1 of the largest value's own; nothing but -infinity has none.
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first == static_cast<T>(kInfinity) ? of.first : of.first + log1p_number(of.third - T(1));
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    return fma(exp_minus(z, saved.first), L(saved.gradient * saved.second), dz);
  }
};

// p = exp(x - log Σ exp x). Σ p log p is of shifted exponents, which do not cancel.
struct entropy : ending {  // saved: log Σ exp(x), and the entropy
  static constexpr descriptor about{.name = "entropy",
                                    .kind = word_kind::row,
                                    .statistics = 2,
                                    .sums = 0,
                                    .gives_number = true,
                                    .flops_forward = 14,
                                    .flops_backward = 16,
                                    .formula = "-Σ p log p, p = softmax(x)",
                                    .meaning = "one number a row: the entropy of its softmax"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const weighted<T> of = row.weighted_exponentials();
    const T log_sum = log1p_number(of.sum - T(1));
    return {of.shift + log_sum, log_sum - of.product / of.sum};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.second;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    const L log_p = z - L(saved.first), p = exp(log_p);
    const L slope = where(p == L(0), L(0), -p * (log_p + L(saved.second)));
    return fma(slope, L(saved.gradient), dz);
  }
};

struct sum : ending {
  static constexpr descriptor about{.name = "sum",
                                    .kind = word_kind::row,
                                    .sums = 0,
                                    .gives_number = true,
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .formula = "Σ x",
                                    .meaning = "one number a row: its sum"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    return {row.total(), T(0)};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L, L dz, row_numbers<T> saved, pair<T>, T) {
    return dz + L(saved.gradient);
  }
};

struct mean : ending {
  static constexpr descriptor about{.name = "mean",
                                    .kind = word_kind::row,
                                    .sums = 0,
                                    .gives_number = true,
                                    .of_nothing = __builtin_bit_cast(double, 0x7ff8000000000000ull),
                                    .flops_forward = 1,
                                    .flops_backward = 1,
                                    .formula = "Σ x / N",
                                    .meaning = "one number a row: its mean"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    return {row.total() * row.inverse_columns(), T(0)};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L, L dz, row_numbers<T> saved, pair<T>, T inverse_columns) {
    return dz + L(saved.gradient * inverse_columns);
  }
};

struct amax : ending {  // saved: the largest, and how many elements have it
  static constexpr descriptor about{
      .name = "amax",
      .kind = word_kind::row,
      .statistics = 2,
      .sums = 0,
      .gives_number = true,
      .needs_elements = true,
      .flops_forward = 1,
      .flops_backward = 2,
      .formula = "max x",
      .meaning = "one number a row: its largest element; those that have it share the gradient"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const pair<T> of = row.largest();
    return {of.first, of.second};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    return where(z == L(saved.first), dz + L(saved.gradient / saved.second), dz);
  }
};

using endings = list<logsumexp, entropy, sum, mean, amax>;

}  // namespace word
ONEPASS_END
#endif
