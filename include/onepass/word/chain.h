// Words in sequence. Forward folds left to right; backward computes the forward values again in registers and walks
// back, giving each operand its gradient on the way.
//
// A word reaches the call through the kernel's Place, which knows the row and the columns of a lane:
//   operand<L, I>()            operand I here
//   wants<I>()                 whether operand I's gradient is wanted
//   column_gradient<I>(g), tensor_gradient<I>(g)
//   column_gradient<I>(dy, x)  the same of the product
//   parameter<J>()             a number of the line, in the arithmetic's type
//   keeps<L, K>(threshold)     mask of where dropout number K's 16 random bits are at least the threshold
//   column<L>(), matrix_row<L>()
//   opposite<L>(f)             f(a place half a row away), its negative in the row's first half
//   keep<K>(value)             stores keep number K; returns the value as stored
//   rounded(value)             the value as it would be stored
//   kept<L, K>(), kept_gradient<L, K>()
//   contract<J>(x, w)          adds Σ x w to the row's feature J
//   feature_gradient<J>()      the gradient of the row's feature J
//   x(), dy()                  what enters the line and its result's gradient (value_and_gradient)
#if defined(ONEPASS_WORD_CHAIN_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_CHAIN_H_
#undef ONEPASS_WORD_CHAIN_H_
#else
#define ONEPASS_WORD_CHAIN_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/row.h"
#include "onepass/word/words.h"

ONEPASS_BEGIN

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

constexpr int larger(int a, int b) { return a > b ? a : b; }

template <int... I>
struct indices {};
template <int Count, int... I>
struct indices_to : indices_to<Count - 1, Count - 1, I...> {};
template <int... I>
struct indices_to<0, I...> {
  using type = indices<I...>;
};

// A word bound to its place in the line: its operand, its first number, and its count among the dropouts or keeps.
// Words without one have -1.
template <class Word, int Operand, int Parameter, int Ordinal>
struct placed {
  using what = Word;
  static constexpr descriptor about = Word::about;
  static constexpr bool resumes = same_type<Word, word::resume>;
  static constexpr bool needs_input = about.backward_needs_input;
  static constexpr int flops = about.flops_forward + about.flops_backward;
  static constexpr int operands = Operand < 0 ? 0 : Operand + about.operands;
  static constexpr bool scales = about.scales, adds = about.adds;
  static constexpr int dropouts = about.kind == word_kind::dropout ? Ordinal + 1 : 0;
  static constexpr int keeps = about.kind == word_kind::keep ? Ordinal + 1 : 0;
  static constexpr int features = about.kind == word_kind::feature ? Ordinal + 1 : 0;
  using numbers = typename indices_to < Parameter<0 ? 0 : about.parameters>::type;

  template <class L, class Place>
  static ONEPASS_FUNCTION L forward(L x, Place& at) {
    if constexpr (about.kind == word_kind::keep) {
      return at.template keep<Ordinal>(x);
    } else if constexpr (about.kind == word_kind::feature) {
      at.template contract<Ordinal>(x, operand<L>(at));
      return x;
    } else {
      return compute(x, at);
    }
  }

  template <class L, class Place>
  static ONEPASS_FUNCTION L operand(Place& at) {
    return at.template operand<L, Operand>();
  }
  // Of a word that scales.
  template <class L, class Place>
  static ONEPASS_FUNCTION L factor(Place& at) {
    if constexpr (Parameter >= 0) return L(at.template parameter<Parameter>());
    else return operand<L>(at);
  }

  // Forward again, in backward: nothing is stored.
  template <class L, class Place>
  static ONEPASS_FUNCTION L recompute(L x, Place& at) {
    if constexpr (resumes) return at.template kept<L, Ordinal>();
    else if constexpr (about.kind == word_kind::keep) return at.rounded(x);
    else if constexpr (about.kind == word_kind::feature) return x;
    else return compute(x, at);
  }

  template <class L, class Place>
  static ONEPASS_FUNCTION L backward(L x, L dy, Place& at) {
    if constexpr (about.kind == word_kind::keep) {
      return dy + at.template kept_gradient<L, Ordinal>();
    } else if constexpr (about.kind == word_kind::feature) {
      const L g(at.template feature_gradient<Ordinal>());
      if (at.template wants<Operand>()) at.template column_gradient<Operand>(g, x);
      return fma(g, operand<L>(at), dy);
    } else if constexpr (about.kind == word_kind::rotary) {
      const L other = at.template opposite<L>(
          [](auto& there) ONEPASS_LAMBDA { return L(there.dy() * there.template operand<L, Operand + 1>()); });
      return Word::backward(dy, other, operand<L>(at));
    } else if constexpr (about.kind == word_kind::dropout) {
      const auto p = at.template parameter<Parameter>();
      return Word::backward(dy, at.template keeps<L, Ordinal>(Word::threshold(p)), p);
    } else if constexpr (about.is_causal) {
      return Word::backward(dy, at.template column<L>(), at.template matrix_row<L>());
    } else if constexpr (about.operand != operand_kind::none) {
      L o{};
      if constexpr (about.backward_needs_operand) o = at.template operand<L, Operand>();
      const word::gradients<L> g = backward_of<word::gradients<L>>(numbers{}, at, x, o, dy);
      if (at.template wants<Operand>()) {
        if constexpr (about.operand == operand_kind::column && about.operand_gradient_is_dy_x)
          at.template column_gradient<Operand>(dy, x);
        else if constexpr (about.operand == operand_kind::column) at.template column_gradient<Operand>(g.doperand);
        else at.template tensor_gradient<Operand>(g.doperand);
      }
      return g.dx;
    } else {
      return backward_of<L>(numbers{}, at, x, dy);
    }
  }

 private:
  template <class L, class Place>
  static ONEPASS_FUNCTION L compute(L x, Place& at) {
    if constexpr (about.kind == word_kind::dropout) {
      const auto p = at.template parameter<Parameter>();
      return Word::forward(x, at.template keeps<L, Ordinal>(Word::threshold(p)), p);
    } else if constexpr (about.kind == word_kind::rotary) {
      const L other = at.template opposite<L>([](auto& there) ONEPASS_LAMBDA { return there.x(); });
      return Word::forward(x, other, operand<L>(at), at.template operand<L, Operand + 1>());
    } else if constexpr (about.is_causal) {
      return Word::forward(x, at.template column<L>(), at.template matrix_row<L>());
    } else if constexpr (about.operand != operand_kind::none) {
      return forward_of<L>(numbers{}, at, x, operand<L>(at));
    } else {
      return forward_of<L>(numbers{}, at, x);
    }
  }

  // With the word's numbers behind.
  template <class L, int... I, class Place, class... Lanes>
  static ONEPASS_FUNCTION L forward_of(indices<I...>, Place& at, Lanes... lanes) {
    return Word::forward(lanes..., L(at.template parameter<Parameter + I>())...);
  }
  template <class Result, int... I, class Place, class L, class... Lanes>
  static ONEPASS_FUNCTION Result backward_of(indices<I...>, Place& at, L x, Lanes... lanes) {
    return Word::backward(x, lanes..., L(at.template parameter<Parameter + I>())...);
  }
};

template <class... Words>
struct chain;

template <>
struct chain<> {
  static constexpr bool resumes = false, adds = false;
  static constexpr bool turns = false;        // looks at both halves of a row
  static constexpr bool needs_input = false;  // whether backward reads the value that enters the chain
  static constexpr int flops = 0;             // forward and backward, per element
  static constexpr int operands = 0, dropouts = 0, keeps = 0, features = 0;  // as the words so far have counted
  template <class L, class Place>
  static ONEPASS_FUNCTION L forward(L x, Place&) {
    return x;
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L recompute(L x, Place&) {
    return x;
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L backward(L, L dy, Place&) {
    return dy;
  }
};

template <class Head, class... Tail>
struct chain<Head, Tail...> {
  using tail = chain<Tail...>;
  static constexpr bool resumes = Head::resumes || tail::resumes;
  static constexpr bool adds = Head::adds;
  static constexpr bool turns = Head::about.kind == word_kind::rotary || tail::turns;
  static constexpr bool needs_input = Head::needs_input || (!Head::resumes && tail::needs_input);
  static constexpr int flops = Head::flops + tail::flops;
  static constexpr int operands = larger(Head::operands, tail::operands);
  static constexpr int dropouts = larger(Head::dropouts, tail::dropouts);
  static constexpr int keeps = larger(Head::keeps, tail::keeps);
  static constexpr int features = larger(Head::features, tail::features);

  template <class L, class Place>
  static ONEPASS_FUNCTION L forward(L x, Place& at) {
    if constexpr (Head::scales && tail::adds) return tail::forward(x, Head::template factor<L>(at), at);
    else return tail::forward(Head::forward(x, at), at);
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L recompute(L x, Place& at) {
    if constexpr (tail::resumes) return tail::recompute(x, at);
    else if constexpr (Head::scales && tail::adds) return tail::recompute(x, Head::template factor<L>(at), at);
    else return tail::recompute(Head::recompute(x, at), at);
  }
  // Behind `scale` or `mul`, a chain that begins with `bias`, `add` or an additive mask: both in one operation, which
  // rounds once. Its result is a plain lane where L is a short one, which what follows must not lose.
  template <class L, class Place>
  static ONEPASS_FUNCTION L forward(L x, L factor, Place& at) {
    return tail::forward(L(fma(x, factor, Head::template operand<L>(at))), at);
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L recompute(L x, L factor, Place& at) {
    return tail::recompute(L(fma(x, factor, Head::template operand<L>(at))), at);
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L backward(L x, L factor, L dy, Place& at) {
    L value{};
    if constexpr (tail::needs_input) value = fma(x, factor, Head::template operand<L>(at));
    return Head::backward(L{}, tail::backward(value, dy, at), at);  // what adds needs no input
  }
  template <class L, class Place>
  static ONEPASS_FUNCTION L backward(L x, L dy, Place& at) {
    if constexpr (Head::scales && tail::adds && tail::needs_input)
      return Head::backward(x, tail::backward(x, Head::template factor<L>(at), dy, at), at);
    if constexpr (tail::needs_input && word::has_both<typename Head::what, L>) {
      const auto here = Head::what::both(x);
      return tail::backward(here.value, dy, at) * here.slope;
    } else {
      L value{};
      if constexpr (tail::needs_input) value = Head::recompute(x, at);
      return Head::backward(x, tail::backward(value, dy, at), at);
    }
  }
};

// What a kernel runs: pre, then the row word (void in an elementwise line), then post. With features, which are
// post's last words, a row's result is those few numbers, and its gradient theirs.
template <class Pre, class Row = void, int RowParameter = -1, class Post = chain<>>
struct line {
  using pre = Pre;
  using row = Row;
  using post = Post;
  static constexpr int row_parameter = RowParameter;
  static constexpr int operands = larger(Pre::operands, Post::operands);
  static constexpr int dropouts = larger(Pre::dropouts, Post::dropouts);
  static constexpr int keeps = larger(Pre::keeps, Post::keeps);
  static constexpr int features = Post::features;
};

// The row word's result in backward, from x, or from the result itself.
template <class Line>
struct row_result {
  static constexpr bool kIsGiven = false;
  template <class L, class Saved, class Place>
  static ONEPASS_FUNCTION L of(L x, Saved saved, Place& at) {
    return Line::row::recompute(Line::pre::recompute(x, at), saved);
  }
};
template <class Pre, class Row, int RowParameter, class Post>
struct row_result<line<Pre, word::resumed<Row>, RowParameter, Post>> {
  static constexpr bool kIsGiven = true;
  template <class L, class Saved, class Place>
  static ONEPASS_FUNCTION L of(L result, Saved, Place&) {
    return result;
  }
};

// z, the row word's result, and its gradient, of one lane in backward.
template <class Line, class L, class Place, class T>
ONEPASS_FUNCTION word::terms<L> value_and_gradient(Place& at, word::row_numbers<T> saved) {
  L x{};
  if constexpr (!Line::pre::resumes) x = at.x();
  const L z = row_result<Line>::of(x, saved, at);
  return {z, Line::post::backward(z, at.dy(), at)};
}

ONEPASS_END
#endif
