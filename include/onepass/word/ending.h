// Endings: row words that give one number a row, in the arithmetic's type. The row goes on unchanged, so that several may
// follow each other.
//
// number(statistics) is called with what statistics(row) has just returned, of which about.statistics numbers are saved.
// backward adds to dz, the gradient of what stands behind, the number's gradient `saved.gradient` times its slope: it
// needs no sum over the row.
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
    const pair<T> of = row.exponentials();
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

using endings = list<logsumexp>;

}  // namespace word
ONEPASS_END
#endif
