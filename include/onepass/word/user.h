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
      return dy * D(Body<D>::forward(D(x, L(1)), D(a, L(0))...)).slope;
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
      return {dy * by_x.slope, dy * by_operand.slope};
    }
  }
};

// A row word of Sums sums and Numbers of the line's numbers. z = f(x, S), S = Σ h(x), so that of a result's gradient dz
// x gets dz ∂f/∂x + h'(x) Σ dz ∂f/∂S.
template <template <class> class Body, int Sums, int Numbers>
struct of_sums {
  static constexpr bool kIsOfSums = true;
  using all = typename indices_to<Numbers>::type;

  template <class Row, class T>
  static ONEPASS_FUNCTION word::row_numbers<T> statistics(Row& row, const double* numbers, T columns) {
    word::row_numbers<T> of{T(0), T(0)};
    of.numbers = numbers, of.columns = columns;
    using L = typename Row::lane;
    if constexpr (Sums == 1) {
      of.first = row.sum([of](L x) ONEPASS_LAMBDA { return first_sum(x, of, all{}); });
    } else {
      const word::pair<T> sums = row.sum_pair([of](L x) ONEPASS_LAMBDA {
        return word::terms<L>{first_sum(x, of, all{}), second_sum(x, of, all{})};
      });
      of.first = sums.first, of.second = sums.second;
    }
    return of;
  }

 protected:
  template <class L, class T, int... I>
  static ONEPASS_FUNCTION L first_sum(L x, word::row_numbers<T> of, indices<I...>) {
    return Body<L>::sum(x, everywhere<L>(of.numbers[I])...);
  }
  template <class L, class T, int... I>
  static ONEPASS_FUNCTION L second_sum(L x, word::row_numbers<T> of, indices<I...>) {
    return Body<L>::second_sum(x, everywhere<L>(of.numbers[I])...);
  }
  // to, with h'(x) times these, which the sums' gradients are.
  template <class L, class T>
  static ONEPASS_FUNCTION L plus_slopes(L to, L x, L by_first, L by_second, word::row_numbers<T> of) {
    using D = dual<L>;
    const D at(x, L(T(1)));
    to = fma(by_first, L(first_sum(at, of, all{}).slope), to);
    if constexpr (Sums > 1) to = fma(by_second, L(second_sum(at, of, all{}).slope), to);
    return to;
  }
  // f(lanes..., S, n, numbers...), where S has these slopes.
  template <class L, class F, class T, int... I, class... Lanes>
  static ONEPASS_FUNCTION dual<L> with_sums(const F& f, L first, L second, word::row_numbers<T> of, indices<I...>,
                                            Lanes... lanes) {
    using D = dual<L>;
    const D n(of.columns);
    if constexpr (Sums == 1) return f(lanes..., D(L(of.first), first), n, everywhere<D>(of.numbers[I])...);
    else return f(lanes..., D(L(of.first), first), D(L(of.second), second), n, everywhere<D>(of.numbers[I])...);
  }
};

template <template <class> class Body, int Sums, int Numbers>
struct row_word : of_sums<Body, Sums, Numbers> {
  using base = of_sums<Body, Sums, Numbers>;
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L x, word::row_numbers<T> of) {
    return recompute(x, of);
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L x, word::row_numbers<T> of) {
    return value(x, of, typename base::all{});
  }
  // Where dz is 0 nothing is added, whatever the slope: nothing has entered there.
  template <class L, class T>
  static ONEPASS_FUNCTION void add_terms(L x, L dz, word::row_numbers<T> of, word::terms<L>& to) {
    const L none(T(0));
    to.first = to.first + where(dz == none, none, L(dz * slope(x, L(T(0)), L(T(1)), none, of)));
    if constexpr (Sums > 1) to.second = to.second + where(dz == none, none, L(dz * slope(x, none, none, L(T(1)), of)));
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L x, L dz, word::row_numbers<T> of, word::pair<T> sums, T) {
    const L none(T(0));
    return base::plus_slopes(L(dz * slope(x, L(T(1)), none, none, of)), x, L(sums.first), L(sums.second), of);
  }

 private:
  template <class L, class T, int... I>
  static ONEPASS_FUNCTION L value(L x, word::row_numbers<T> of, indices<I...>) {
    if constexpr (Sums == 1) return Body<L>::forward(x, L(of.first), L(of.columns), everywhere<L>(of.numbers[I])...);
    else return Body<L>::forward(x, L(of.first), L(of.second), L(of.columns), everywhere<L>(of.numbers[I])...);
  }
  // Of forward, where x and the sums have these.
  template <class L, class T>
  static ONEPASS_FUNCTION L slope(L x, L by_x, L by_first, L by_second, word::row_numbers<T> of) {
    const auto f = [](auto... of_forward) ONEPASS_LAMBDA { return Body<dual<L>>::forward(of_forward...); };
    return base::with_sums(f, by_first, by_second, of, typename base::all{}, dual<L>(x, by_x)).slope;
  }
};

template <template <class> class Body, int Sums, int Numbers>
struct ending_word : of_sums<Body, Sums, Numbers> {
  using base = of_sums<Body, Sums, Numbers>;
  template <class Row, class L, class T>
  static ONEPASS_FUNCTION L forward(L x, word::row_numbers<T>) {
    return x;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L recompute(L x, word::row_numbers<T>) {
    return x;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION void add_terms(L, L, word::row_numbers<T>, word::terms<L>&) {}
  // The third: the number itself.
  template <class Row, class T>
  static ONEPASS_FUNCTION word::row_numbers<T> statistics(Row& row, const double* numbers, T columns) {
    using L = typename Row::lane;
    word::row_numbers<T> of = base::statistics(row, numbers, columns);
    of.third = max_lanes(of_number(L(T(0)), L(T(0)), of).value);
    return of;
  }
  template <class T>
  static ONEPASS_FUNCTION T number(word::row_numbers<T> of) {
    return of.third;
  }
  template <class L, class T>
  static ONEPASS_FUNCTION L backward(L x, L dz, word::row_numbers<T> of, word::pair<T>, T) {
    const L none(T(0)), one(T(1)), g(of.gradient);
    return base::plus_slopes(dz, x, L(g * of_number(one, none, of).slope), L(g * of_number(none, one, of).slope), of);
  }

 private:
  template <class L, class T>
  static ONEPASS_FUNCTION dual<L> of_number(L by_first, L by_second, word::row_numbers<T> of) {
    const auto f = [](auto... of_number) ONEPASS_LAMBDA { return Body<dual<L>>::number(of_number...); };
    return base::with_sums(f, by_first, by_second, of, typename base::all{});
  }
};

}  // namespace user
ONEPASS_END
#endif
