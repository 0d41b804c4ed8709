// What a user's word stands in: its body is a template of `scalar`, the lane that holds one of the line's numbers, with
//   template <class L> static L forward(L x, scalar... numbers)                       and perhaps
//   template <class L> static L backward(L x, L dy, scalar... numbers)
// or, of a word with an operand, forward(x, operand, ...) and backward(x, operand, dy, ...), which gives gradients<L>,
// {dx, doperand}. Without `backward` the derivative is that of `forward`, by dual numbers.
#if defined(ONEPASS_WORD_USER_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_USER_H_
#undef ONEPASS_WORD_USER_H_
#else
#define ONEPASS_WORD_USER_H_
#endif

#include "onepass/lane/functions.h"
#include "onepass/lane/numbers.h"
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

}  // namespace user
ONEPASS_END
#endif
