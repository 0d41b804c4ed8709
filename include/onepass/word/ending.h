// Endings: row words that give one number a row, in the arithmetic's type. The row goes on unchanged, so that several
// may follow each other.
//
// number(statistics) is called with what statistics(row) has just returned, of which about.statistics numbers are
// saved. backward adds to dz, the gradient of what stands behind, the number's gradient `saved.gradient` times its
// slope: it needs no sum over the row.
//
// One that gives codes has a forward of its own, whose result is the line's, and its number stands behind it.
//
// Those with a target, a column of the row, get it and their numbers (arguments::parameter) in statistics, and third
// of what that returns is the number itself. In backward prepared() makes of what was saved what backward takes, and of
// gradient what is added at the target.
//
// One with another row beside its own (is_paired) makes weights_of its numbers. It gets them in statistics, with both
// rows, each value times weights.scale, and in backward, with both values, for each row's gradient. It is the only row
// word of its line.
#if defined(ONEPASS_WORD_ENDING_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_ENDING_H_
#undef ONEPASS_WORD_ENDING_H_
#else
#define ONEPASS_WORD_ENDING_H_
#endif

#include "onepass/lane/functions.h"
#include "onepass/lane/target.h"
#include "onepass/word/row.h"
#include "onepass/word/words.h"

ONEPASS_BEGIN
namespace word {

// What endings have in common: the value that entered is what goes on.
//
// The gradients of some have a part that is a number times the softmax p of the row: of_probabilities is that number,
// and where `shared`, an entropy of the same value has it (share_probabilities in chain.h).
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
    // Beside infinity others have no share: exp(x - infinity) · 1.
    return {of.first, of.first == static_cast<T>(kInfinity) ? T(1) : reciprocal_number(of.second), of.second};
  }
  // The sum has a 1 of the largest value's own; nothing but -infinity has none.
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first == static_cast<T>(kInfinity) ? of.first : of.first + log1p_number(of.third - T(1));
  }
  template <class T>
  static ONEPASS_FUNCTION T of_probabilities(row_numbers<T> saved) {
    return saved.gradient;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    if (saved.shared) return dz;
    return fma(exp_minus(z, saved.first), L(saved.gradient * saved.second), dz);
  }
};

// p = exp(x - log Σ exp x). Σ p log p is of shifted exponents, which do not cancel.
struct entropy : ending {  // saved: log Σ exp(x), the entropy, and what rounding took from the former
  static constexpr descriptor about{.name = "entropy",
                                    .kind = word_kind::row,
                                    .statistics = 3,
                                    .fine = 1,
                                    .sums = 0,
                                    .gives_number = true,
                                    .flops_forward = 14,
                                    .flops_backward = 16,
                                    .formula = "-Σ p log p, p = softmax(x)",
                                    .meaning = "one number a row: the entropy of its softmax"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    const weighted<T> of = row.weighted_exponentials();
    const T log_sum = log1p_number(of.sum - T(1)), lse = of.shift + log_sum;
    return {lse, log_sum - of.product / of.sum, rest_of_sum(of.shift, log_sum, lse)};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.second;
  }
  // The gradient is p (second + gradient log p), with first and third as saved.
  template <class T>
  static ONEPASS_FUNCTION row_numbers<T> prepared(row_numbers<T> saved) {
    return {saved.first, -saved.gradient * saved.second, saved.third, -saved.gradient};
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    const L log_p = (z - L(saved.first)) - L(saved.third), p = exp(log_p);
    const L least(T(-1000));  // whose p is 0, not -infinity
    return fma(p, fma(max(log_p, least), L(saved.gradient), L(saved.second)), dz);
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
      .finds_input = true,
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
    const T others = saved.first == saved.first ? T(0) : saved.first;  // of a row with a NaN all gradients are NaN
    return where(z == L(saved.first), dz + L(saved.gradient / saved.second), dz + L(others));
  }
};

// lse = log Σ exp(x), s = label_smoothing:  lse - (1 - s) x[target] - s mean(x) + z_loss lse², and 0 where ignored.
struct cross_entropy : ending {  // saved: the shift and 1 / Σ exp(x - shift), as of softmax
  static constexpr descriptor about{
      .name = "cross_entropy",
      .kind = word_kind::row,
      .operand = operand_kind::target,
      .operand_name = "target",
      .parameter = "label_smoothing, z_loss, ignore_index",
      .parameters = 3,
      .parameter_default = 0,
      .other_defaults = {0, -100},
      .backward_needs_operand = true,
      .statistics = 2,
      .sums = 0,
      .gives_number = true,
      .needs_elements = true,
      .flops_forward = 13,
      .flops_backward = 13,
      .formula = "lse - (1 - s) x[target] - s mean(x) + z lse²",
      .meaning =
          "one number a row: the cross entropy of its softmax and a target, as torch.nn.functional.cross_entropy; "
          "0 for an ignored one. lse is the logarithm of the sum of exponentials"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T, target at, const double* number) {
    const picked<T> of = row.picked_exponentials(at.column);
    const T smoothing = static_cast<T>(number[0]), z = static_cast<T>(number[1]), log_sum = log1p_number(of.sum - T(1));
    const T lse = of.shift + log_sum;
    T loss = log_sum + (of.shift - of.value);
    if (smoothing != T(0))
      loss = (T(1) - smoothing) * loss + smoothing * (log_sum + (of.shift - of.total * row.inverse_columns()));
    if (z != T(0)) loss = loss + z * lse * lse;
    return {of.shift, reciprocal_number(of.sum), at.column < 0 ? T(0) : loss};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.third;
  }
  // First and second as saved, the latter times the gradient; third of what all elements get; gradient of the target's.
  template <class T>
  static ONEPASS_FUNCTION row_numbers<T> prepared(row_numbers<T> saved, target at, const double* number,
                                                  T inverse_columns) {
    const T g = at.column < 0 ? T(0) : saved.gradient;
    const T smoothing = static_cast<T>(number[0]), z = static_cast<T>(number[1]);
    const T lse = saved.first - log_number(saved.second);
    const T all = z == T(0) ? g : g * (T(1) + T(2) * z * lse);
    return {saved.first, saved.second * all, -g * smoothing * inverse_columns, -g * (T(1) - smoothing), at, false, all};
  }
  template <class T>
  static ONEPASS_FUNCTION T of_probabilities(row_numbers<T> prepared) {
    return prepared.fourth;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    if (saved.shared) return dz + L(saved.third);
    return fma(exp_minus(z, saved.first), L(saved.second), dz + L(saved.third));
  }
};

struct logprob : ending {  // saved: as of cross_entropy
  static constexpr descriptor about{.name = "logprob",
                                    .kind = word_kind::row,
                                    .operand = operand_kind::target,
                                    .operand_name = "target",
                                    .parameter = "ignore_index",
                                    .parameter_default = -100,
                                    .backward_needs_operand = true,
                                    .statistics = 2,
                                    .sums = 0,
                                    .gives_number = true,
                                    .needs_elements = true,
                                    .flops_forward = 12,
                                    .flops_backward = 12,
                                    .formula = "x[target] - log Σ exp(x)",
                                    .meaning =
                                        "one number a row: the logarithm of its softmax at a target; 0 for an "
                                        "ignored one"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T, target at, const double*) {
    const picked<T> of = row.picked_exponentials(at.column);
    const T log_p = (of.value - of.shift) - log1p_number(of.sum - T(1));
    return {of.shift, reciprocal_number(of.sum), at.column < 0 ? T(0) : log_p};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.third;
  }
  template <class T>
  static ONEPASS_FUNCTION row_numbers<T> prepared(row_numbers<T> saved, target at, const double*, T) {
    const T g = at.column < 0 ? T(0) : saved.gradient;
    return {saved.first, -g * saved.second, T(0), g, at};
  }
  template <class T>
  static ONEPASS_FUNCTION T of_probabilities(row_numbers<T> prepared) {
    return -prepared.gradient;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L z, L dz, row_numbers<T> saved, pair<T>, T) {
    if (saved.shared) return dz;
    return fma(exp_minus(z, saved.first), L(saved.second), dz);
  }
};

// p = softmax(x / temperature), q = softmax(teacher / temperature), m = (1 - beta) p + beta q:
//   beta Σ q log(q / m) + (1 - beta) Σ p log(p / m), the generalised Jensen-Shannon divergence (Agarwal et al.,
// arXiv:2306.13649), and at its ends, where it is 0, what it is in proportion to beta and to 1 - beta.
struct kl_div : ending {  // saved: log Σ exp of both; what each has of the number; what rounding took from the former
  static constexpr descriptor about{
      .name = "kl_div",
      .kind = word_kind::row,
      .operand = operand_kind::tensor,
      .operand_name = "teacher",
      .parameter = "beta, temperature",
      .parameters = 2,
      .parameter_default = 0,
      .other_defaults = {1},
      .backward_needs_operand = true,
      .statistics = 6,
      .fine = 2,
      .sums = 0,
      .gives_number = true,
      .flops_forward = 26,
      .flops_backward = 30,
      .formula = "Σ q log(q / p)",
      .meaning =
          "one number a row: the divergence KL(q || p) of its softmax p and a teacher's q, both of logits divided by "
          "the temperature; with beta = 1 KL(p || q), between them the generalised Jensen-Shannon divergence"};
  // What the row's divergence from m, and the other's, count in the number: (1, 0) and (0, 1) where beta is 1 and 0.
  template <class T>
  struct weights {
    T row, other, scale;
  };
  template <class T>
  static ONEPASS_FUNCTION weights<T> weights_of(const double* number) {
    const double beta = number[0], rest = 1.0 - beta;  // of T, the difference would have lost what beta has not
    const bool is_end = beta == 0.0 || rest == 0.0;
    return {static_cast<T>(is_end ? beta : rest), static_cast<T>(is_end ? rest : beta),
            static_cast<T>(1.0 / number[1])};
  }
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, weights<T> by) {
    using L = typename Row::lane;
    const paired<T> of = row.paired_exponentials(by.other == T(0));
    const T own = log_number(of.sum), other = log_number(of.other_sum);
    row_numbers<T> saved{of.shift + own, of.other_shift + other};
    saved.fifth = rest_of_sum(of.shift, own, saved.first);
    saved.sixth = rest_of_sum(of.other_shift, other, saved.second);
    // Beside the shifts. Not the difference of two rounded logarithms.
    const T apart = log_number(of.other_sum / of.sum);
    if (by.row == T(0)) {
      saved.fourth = of.product / of.other_sum - apart;
    } else if (by.other == T(0)) {
      saved.third = of.product / of.sum + apart;
    } else {
      const pair<T> sums = row.paired_sum([=](L u, L o) ONEPASS_LAMBDA {
        const L log_p = (u - L(of.shift)) - L(own), log_q = (o - L(of.other_shift)) - L(other);
        const L p = exp_term(log_p, T(0)), q = exp_term(log_q, T(0));
        const terms<L> shares = log_shares(log_p, log_q, by);
        return terms<L>{part(p, shares.first), part(q, shares.second)};
      });
      saved.third = by.row * sums.first, saved.fourth = by.other * sums.second;
    }
    return saved;
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.third + of.fourth;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION gradients<L> backward(L z, L other, L dz, row_numbers<T> saved, weights<T> by) {
    const L log_p = fma(z, L(by.scale), L(-saved.first)) - L(saved.fifth),
            log_q = fma(other, L(by.scale), L(-saved.second)) - L(saved.sixth);
    const L p = exp(log_p), q = exp(log_q), g(saved.gradient * by.scale);
    const terms<L> shares = log_shares(log_p, log_q, by);
    const L of_row = by.row == T(0) ? L(p - q) : part(p, L(shares.first * L(by.row) - L(saved.third)));
    const L of_other = by.other == T(0) ? L(q - p) : part(q, L(shares.second * L(by.other) - L(saved.fourth)));
    return {fma(of_row, g, dz), of_other * g};
  }

 private:
  // log(p / m) and log(q / m), of the difference of log p and log q alone: m is weight + rest exp(-|d|) times the
  // larger.
  template <class L, class T>
  static ONEPASS_FUNCTION terms<L> log_shares(L log_p, L log_q, weights<T> by) {
    const L d = log_q - log_p, none(T(0));
    if (by.row == T(0) || by.other == T(0)) return by.row == T(0) ? terms<L>{none, d} : terms<L>{-d, none};
    const auto is_other = d > none;
    const L weight = where(is_other, L(by.other), L(by.row)), rest = where(is_other, L(by.row), L(by.other));
    const L share = exp_term(L(-abs(d)), T(0)), less = rest * (share - L(T(1)));
    const L far = fma(rest, share, weight);  // rounded, the weights are not 1
    const L larger = -L(where(less < L(T(-0.5)), log_term(far), log1p_term(less)));
    return {where(is_other, larger - d, larger), where(is_other, larger, larger + d)};
  }
  // Of next to no probability nothing: the other's logarithm may be infinitely far away.
  template <class L>
  static ONEPASS_FUNCTION L part(L probability, L of) {
    using T = typename L::scalar;
    const L least(sizeof(T) == 4 ? T(1e-30) : T(1e-290));
    return where(probability < least, L(T(0)), probability * of);
  }
};

// The least scale, of rows that are nothing: the smallest normal float. Its inverse is finite.
inline constexpr double kLeastScale = 0x1p-126;

// The scale of codes of which the largest magnitude is this.
template <dtype D, class T>
ONEPASS_FUNCTION T scale_of(T largest) {
  const T scale = largest / T(largest_code(D));
  return scale < T(kLeastScale) ? T(kLeastScale) : scale;
}
template <dtype D, class L>
ONEPASS_FUNCTION L saturated(L scaled) {
  if constexpr (saturates(D)) return scaled;
  const L most(static_cast<typename L::scalar>(largest_code(D)));
  return max(L(min(scaled, most)), L(-most));
}

// Codes of type D and their scale, which stands at kept value K. It gives the codes' values, which are stored as D.
template <dtype D, int K>
struct quantize : ending {  // saved: the scale
  static constexpr descriptor about{
      .name = "quantize",
      .kind = word_kind::row,
      .dtypes = "fp8, fp8e5m2, int8",
      .statistics = 1,
      .sums = 0,
      .gives_number = true,
      .gives_codes = true,
      .of_nothing = kLeastScale,
      .flops_forward = 4,
      .flops_backward = 0,
      .formula = "x / scale, scale = max |x| / largest",
      .meaning =
          "codes of the row, float8_e4m3fn (largest 448), float8_e5m2 (57344) or int8 (127), and their scale "
          "[..., 1] behind the kept values; ends a line"};
  template <class Row, class T>
  static ONEPASS_FUNCTION row_numbers<T> statistics(Row& row, T) {
    return {scale_of<D>(row.largest_magnitude()), T(0)};
  }
  template <class T>
  static ONEPASS_FUNCTION T number(row_numbers<T> of) {
    return of.first;
  }
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L u, row_numbers<T> saved) {
    return saturated<D>(L(u * L(T(1) / saved.first)));
  }
};

// Codes of type D with a scale that is given. No row word: it looks at no other element.
template <dtype D>
struct quantize_static {
  static constexpr descriptor about{.name = "quantize",
                                    .kind = word_kind::affine,
                                    .operand = operand_kind::tensor,
                                    .operand_name = "scale",
                                    .dtypes = quantize<D, 0>::about.dtypes,
                                    .gives_codes = true,
                                    .flops_forward = 4,
                                    .flops_backward = 0,
                                    .defined = "word::quantize_static",
                                    .formula = "x / scale",
                                    .meaning = "codes of the row, of a scale that is given; ends a line"};
  template <class L>
  static ONEPASS_FUNCTION L forward(L x, L scale) {
    return saturated<D>(L(x / scale));
  }
};

// Codes of type D with a scale for each group of G columns. No row word: lanes of a group are neighbours, and the
// cursor that stores them (store_y) knows the group's largest magnitude.
template <dtype D, int G>
struct quantize_groups {
  static constexpr descriptor about{.name = "quantize",
                                    .kind = word_kind::affine,
                                    .dtypes = quantize<D, 0>::about.dtypes,
                                    .gives_codes = true,
                                    .by_groups = true,
                                    .flops_forward = 4,
                                    .flops_backward = 0,
                                    .defined = "word::quantize_groups",
                                    .formula = quantize<D, 0>::about.formula,
                                    .meaning = "codes of groups of the row's columns, and their scales; ends a line"};
  static constexpr int kColumns = G;
  template <class L>
  static ONEPASS_FUNCTION L forward(L x) {
    return x;
  }
  template <class T>
  static ONEPASS_FUNCTION T scale(T largest) {
    return scale_of<D>(largest);
  }
  template <class L>
  static ONEPASS_FUNCTION L codes(L x, typename L::scalar scale) {
    return saturated<D>(L(x * L(typename L::scalar(1) / scale)));
  }
};

// A row word that takes operand I, a target.
template <class Row, int I>
struct with_target : Row {
  static constexpr int operand = I;
};
// One that takes operand I, a row beside its own; its numbers begin at J.
template <class Row, int I, int J>
struct with_row : Row {
  static constexpr int operand = I, parameter = J;
};

using endings = list<logsumexp, entropy, sum, mean, amax, cross_entropy, logprob, kl_div, quantize<dtype::f8e4m3, 0>>;

}  // namespace word
ONEPASS_END
#endif
