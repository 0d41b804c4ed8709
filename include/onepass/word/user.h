// What a user's word stands in: its body is a template of `scalar`, the lane that holds one of the line's numbers, with
//   template <class L> static L forward(L x, scalar... numbers)                       and perhaps
//   template <class L> static L backward(L x, L dy, scalar... numbers)
// or, of a word with an operand, forward(x, operand, ...) and backward(x, operand, dy, ...), which gives gradients<L>,
// {dx, doperand}. Without `backward` the derivative is that of `forward`, by dual numbers.
//
// The body of a row word has what is summed over the row, and what is made of the sums, n being the row's length:
//   template <class L> static L sum(L x, scalar... numbers)                           and perhaps second_sum
//   template <class L> static L forward(L x, scalar sums..., scalar n, scalar... numbers)
// or, of an ending, static scalar number(scalar sums..., scalar n, scalar... numbers) in forward's place.
#if defined(ONEPASS_WORD_USER_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_USER_H_
#undef ONEPASS_WORD_USER_H_
#else
#define ONEPASS_WORD_USER_H_
#endif

#include "onepass/lane/functions.h"
#include "onepass/lane/numbers.h"
#include "onepass/word/chain.h"
#include "onepass/word/dual.h"
#include "onepass/word/words.h"

ONEPASS_BEGIN
namespace user {

using word::gradients;
// Of plain numbers; those of lanes are found by their arguments.
using ::cos, ::erf, ::exp, ::expm1, ::log, ::log1p, ::pow, ::sin, ::sqrt, ::tanh;

template <template <class> class Body>
struct plain_word {
  template <class L, class... Numbers>
  static ONEPASS_FUNCTION L forward(L x, Numbers... a) {
    return Body<L>::forward(x, a...);
  }
  template <class L, class... Numbers>
  static ONEPASS_FUNCTION L backward(L x, L dy, Numbers... a) {
    if constexpr (requires { &Body<L>::template backward<L>; }) {
      return Body<L>::backward(x, dy, a...);
    } else {
      using D = dual<L>;
      return along(D(Body<D>::forward(D(x, L(1)), D(a, L(0))...)).slope, dy);
    }
  }
};

template <template <class> class Body>
struct operand_word {
  template <class L, class... Numbers>
  static ONEPASS_FUNCTION L forward(L x, L operand, Numbers... a) {
    return Body<L>::forward(x, operand, a...);
  }
  template <class L, class... Numbers>
  static ONEPASS_FUNCTION gradients<L> backward(L x, L operand, L dy, Numbers... a) {
    if constexpr (requires { &Body<L>::template backward<L>; }) {
      return Body<L>::backward(x, operand, dy, a...);
    } else {
      using D = dual<L>;
      const D by_x(Body<D>::forward(D(x, L(1)), D(operand, L(0)), D(a, L(0))...)),
          by_operand(Body<D>::forward(D(x, L(0)), D(operand, L(1)), D(a, L(0))...));
      return {along(by_x.slope, dy), along(by_operand.slope, dy)};
    }
  }
};

// A row word of Sums sums. z = f(x, S), S = Σ h(x), so that of a result's gradient dz x gets
// dz ∂f/∂x + h'(x) Σ dz ∂f/∂S.
template <template <class> class Body, int Sums>
struct summed_word {
  template <class Row, class T, int N>
  static ONEPASS_FUNCTION word::row_numbers<T> statistics(Row& row, word::own_numbers<T, N> own) {
    using L = typename Row::lane;
    if constexpr (Sums == 1) {
      return {row.sum([own](L x) ONEPASS_LAMBDA { return first_sum(x, own); }), T(0)};
    } else {
      const word::pair<T> sums = row.sum_pair([own](L x) ONEPASS_LAMBDA {
        return word::terms<L>{first_sum(x, own), second_sum(x, own)};
      });
      return {sums.first, sums.second};
    }
  }

 protected:
  // f(first..., the line's numbers as S)
  template <class S, class F, class T, int N, int... I, class... Others>
  static ONEPASS_FUNCTION auto with_numbers(const F& f, word::own_numbers<T, N> own, indices<I...>, Others... first) {
    return f(first..., everywhere<S>(own.number[I])...);
  }
  template <class S, class F, class T, int N, class... Others>
  static ONEPASS_FUNCTION auto with_numbers(const F& f, word::own_numbers<T, N> own, Others... first) {
    return with_numbers<S>(f, own, typename indices_to<N>::type{}, first...);
  }
  // f(first..., the sums, the row's length, the line's numbers), all as S.
  template <class S, class F, class T, int N, class... Others>
  static ONEPASS_FUNCTION auto with_sums(const F& f, word::pair<S> sums, word::own_numbers<T, N> own, Others... first) {
    if constexpr (Sums == 1) return with_numbers<S>(f, own, first..., sums.first, everywhere<S>(own.columns));
    else return with_numbers<S>(f, own, first..., sums.first, sums.second, everywhere<S>(own.columns));
  }
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L first_sum(L x, word::own_numbers<T, N> own) {
    return with_numbers<L>([](auto... of) ONEPASS_LAMBDA { return Body<L>::sum(of...); }, own, x);
  }
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L second_sum(L x, word::own_numbers<T, N> own) {
    return with_numbers<L>([](auto... of) ONEPASS_LAMBDA { return Body<L>::second_sum(of...); }, own, x);
  }
  // Dual sums, of these slopes.
  template <class L, class T>
  static ONEPASS_FUNCTION word::pair<dual<L>> sums_of(word::row_numbers<T> saved, T by_first, T by_second) {
    return {dual<L>(L(saved.first), L(by_first)), dual<L>(L(saved.second), L(by_second))};
  }
  // to, with h'(x) times the sums' gradients.
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L plus_slopes(L to, L x, L first, L second, word::own_numbers<T, N> own) {
    const dual<L> at(x, L(T(1)));
    to = fma(first, L(first_sum(at, own).slope), to);
    if constexpr (Sums > 1) to = fma(second, L(second_sum(at, own).slope), to);
    return to;
  }
};

template <template <class> class Body, int Sums>
struct row_word : summed_word<Body, Sums> {
  using base = summed_word<Body, Sums>;
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L forward(L x, word::row_numbers<T> saved, word::own_numbers<T, N> own) {
    return base::template with_sums<L>([](auto... of) ONEPASS_LAMBDA { return Body<L>::forward(of...); },
                                       word::pair<L>{L(saved.first), L(saved.second)}, own, x);
  }
  // Where dz is 0 nothing is added, whatever the slope: what lies past the row's end is there, too.
  template <class L, class T, int N>
  static ONEPASS_FUNCTION void add_terms(L x, L dz, word::row_numbers<T> saved, word::own_numbers<T, N> own,
                                         word::terms<L>& to) {
    const L none(T(0));
    const auto term = [&](T by_first, T by_second) ONEPASS_LAMBDA {
      return where(dz == none, none, L(dz * slope(x, T(0), by_first, by_second, saved, own)));
    };
    to.first = to.first + term(T(1), T(0));
    if constexpr (Sums > 1) to.second = to.second + term(T(0), T(1));
  }
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L backward(L x, L dz, word::row_numbers<T> saved, word::pair<T> sums,
                                     word::own_numbers<T, N> own) {
    return base::plus_slopes(along(slope(x, T(1), T(0), T(0), saved, own), dz), x, L(sums.first), L(sums.second), own);
  }

 private:
  // Of forward, where x and the sums have these.
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L slope(L x, T by_x, T by_first, T by_second, word::row_numbers<T> saved,
                                  word::own_numbers<T, N> own) {
    using D = dual<L>;
    const auto f = [](auto... of) ONEPASS_LAMBDA { return Body<D>::forward(of...); };
    return base::template with_sums<D>(f, base::template sums_of<L>(saved, by_first, by_second), own, D(x, L(by_x)))
        .slope;
  }
};

template <template <class> class Body, int Sums>
struct ending_word : summed_word<Body, Sums> {
  using base = summed_word<Body, Sums>;
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L forward(L x, word::row_numbers<T>, word::own_numbers<T, N>) {
    return x;
  }
  template <class L, class T, int N>
  static ONEPASS_FUNCTION void add_terms(L, L, word::row_numbers<T>, word::own_numbers<T, N>, word::terms<L>&) {}
  // The third: the number itself.
  template <class Row, class T, int N>
  static ONEPASS_FUNCTION word::row_numbers<T> statistics(Row& row, word::own_numbers<T, N> own) {
    using L = typename Row::lane;
    word::row_numbers<T> saved = base::statistics(row, own);
    const auto f = [](auto... of) ONEPASS_LAMBDA { return Body<L>::number(of...); };
    saved.third = max_lanes(L(base::template with_sums<L>(f, word::pair<L>{L(saved.first), L(saved.second)}, own)));
    return saved;
  }
  template <class T>
  static ONEPASS_FUNCTION T number(word::row_numbers<T> of) {
    return of.third;
  }
  template <class L, class T, int N>
  static ONEPASS_FUNCTION L backward(L x, L dz, word::row_numbers<T> saved, word::pair<T>,
                                     word::own_numbers<T, N> own) {
    const L g(saved.gradient), first = dual_number<L>(saved, T(1), T(0), own).slope,
                               second = dual_number<L>(saved, T(0), T(1), own).slope;
    return base::plus_slopes(dz, x, L(g * first), L(g * second), own);
  }

 private:
  template <class L, class T, int N>
  static ONEPASS_FUNCTION dual<L> dual_number(word::row_numbers<T> saved, T by_first, T by_second,
                                              word::own_numbers<T, N> own) {
    const auto f = [](auto... of) ONEPASS_LAMBDA { return Body<dual<L>>::number(of...); };
    return base::template with_sums<dual<L>>(f, base::template sums_of<L>(saved, by_first, by_second), own);
  }
};

}  // namespace user
ONEPASS_END
#endif
