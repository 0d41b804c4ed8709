// Words in sequence. Forward folds left to right; backward recomputes the forward values in registers and walks
// back, giving each operand its gradient on the way.
//
// Words reach the call through the kernel's cursor: its row, and the columns of one lane.
#if defined(ONEPASS_WORD_CHAIN_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_WORD_CHAIN_H_
#undef ONEPASS_WORD_CHAIN_H_
#else
#define ONEPASS_WORD_CHAIN_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/word/ending.h"
#include "onepass/word/functions.h"
#include "onepass/word/row.h"
#include "onepass/word/words.h"

ONEPASS_BEGIN

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

template <class A, class B>
concept same = same_type<A, B>;

// What a kernel's cursor offers to words whose lanes are L. I, J, K: numbers of an operand, of a parameter or feature,
// and of a dropout or keep.
template <class Cursor, class L>
concept cursor_of = requires(Cursor& at, L v, int threshold) {
  { at.x() } -> same<L>;   // what enters the line
  { at.dy() } -> same<L>;  // its result's gradient; zeros where that is no row
  { at.template operand<L, 0>() } -> same<L>;
  { at.template channel<L, 0>() } -> same<L>;  // of a word by channels
  { at.template wants<0>() } -> same<bool>;    // whether operand I's gradient is wanted
  at.template column_gradient<0>(v);
  at.template column_gradient<0>(v, v);  // of the product of both
  at.template tensor_gradient<0>(v);
  at.template parameter<0>();               // a number of the line, in the arithmetic's type
  at.row_length();                          // in that type
  { at.numbers() } -> same<const double*>;  // all of the line's numbers, of double precision
  at.template keeps<L, 0>(threshold);       // mask of where dropout K's 16 random bits are at least the threshold
  { at.template column<L>() } -> same<L>;
  { at.template matrix_row<L>() } -> same<L>;
  { at.template table<L, 0>() } -> same<L>;  // of `rope`
  { at.turned() } -> same<int>;              // how many of the lane's numbers `rope` turns, its first ones
  { at.template keep<0>(v) } -> same<L>;     // stores keep K; the value as stored
  { at.rounded(v) } -> same<L>;              // the value as x's dtype would store it
  { at.template as_kept<0>(v) } -> same<L>;  // as keep K would
  { at.template kept<L, 0>() } -> same<L>;
  { at.template kept_gradient<L, 0>() } -> same<L>;
  at.template contract<0>(v, v);                                      // adds Σ x w to the row's feature J
  { at.plus_at(v, int64{}, at.template parameter<0>()) } -> same<L>;  // v, with a number added at this column
  at.template feature_gradient<0>();
};

constexpr int larger(int a, int b) { return a > b ? a : b; }
template <int First, int... More>
inline constexpr int largest_of = First;
template <int First, int Second, int... More>
inline constexpr int largest_of<First, Second, More...> = largest_of<larger(First, Second), More...>;

template <int... I>
struct indices {};
template <int Count, int... I>
struct indices_to : indices_to<Count - 1, Count - 1, I...> {};
template <int... I>
struct indices_to<0, I...> {
  using type = indices<I...>;
};

template <bool First, class A, class B>
struct either {
  using type = A;
};
template <class A, class B>
struct either<false, A, B> {
  using type = B;
};

// Which numbers of a row a line turns with each other.
enum class turning : int { none, neighbours, halves };
template <class Word>
inline constexpr turning turning_of = turning::none;
template <bool Neighbours, bool First>
inline constexpr turning turning_of<word::rotation<Neighbours, First>> =
    Neighbours ? turning::neighbours : turning::halves;

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
  static constexpr uint64 channels = about.by_channels ? uint64{1} << Operand : 0;
  static constexpr int dropouts = about.kind == word_kind::dropout ? Ordinal + 1 : 0;
  static constexpr int ordinal = Ordinal;
  static constexpr int keeps = about.kind == word_kind::keep || about.by_groups ? Ordinal + 1 : 0;
  static constexpr int features = about.kind == word_kind::feature ? Ordinal + 1 : 0;
  static constexpr int turned_operand = about.kind == word_kind::rotary ? Operand : -1;
  static constexpr int turned_parameter = about.kind == word_kind::rotary ? Parameter : -1;
  static constexpr turning turns = turning_of<Word>;
  using numbers = typename indices_to < Parameter<0 ? 0 : about.parameters>::type;

  template <class L, class Cursor>
  static ONEPASS_FUNCTION L forward(L x, Cursor& at) {
    if constexpr (about.kind == word_kind::keep) {
      return at.template keep<Ordinal>(x);
    } else if constexpr (about.kind == word_kind::feature) {
      at.template contract<Ordinal>(x, operand<L>(at));
      return x;
    } else {
      return compute(x, at);
    }
  }

  template <class L, class Cursor>
  static ONEPASS_FUNCTION L operand(Cursor& at) {
    if constexpr (about.by_channels) return at.template channel<L, Operand>();
    else return at.template operand<L, Operand>();
  }
  // Of a word that scales.
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L factor(Cursor& at) {
    if constexpr (about.operand == operand_kind::none) return L(at.template parameter<Parameter>());
    else if constexpr (Parameter >= 0) return operand<L>(at) + L(at.template parameter<Parameter>());
    else return operand<L>(at);
  }

  // Forward in backward: nothing is stored.
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L recompute(L x, Cursor& at) {
    if constexpr (resumes) return at.template kept<L, Ordinal>();
    else if constexpr (about.kind == word_kind::keep) return at.template as_kept<Ordinal>(x);
    else if constexpr (about.kind == word_kind::feature) return x;
    else return compute(x, at);
  }

  template <class L, class Cursor>
  static ONEPASS_FUNCTION L backward(L x, L dy, Cursor& at) {
    if constexpr (about.kind == word_kind::keep) {
      return dy + at.template kept_gradient<L, Ordinal>();
    } else if constexpr (about.kind == word_kind::feature) {
      const L g(at.template feature_gradient<Ordinal>());
      if (at.template wants<Operand>()) at.template column_gradient<Operand>(g, x);
      return fma(g, operand<L>(at), dy);
    } else if constexpr (about.kind == word_kind::rotary) {
      return turned(dy, at, [&](L cos, L sin) ONEPASS_LAMBDA { return Word::backward(dy, cos, sin); });
    } else if constexpr (about.kind == word_kind::dropout) {
      const auto p = at.template parameter<Parameter>();
      return Word::backward(dy, at.template keeps<L, Ordinal>(Word::threshold(p)), p);
    } else if constexpr (about.is_causal) {
      return Word::backward(dy, at.template column<L>(), at.template matrix_row<L>());
    } else if constexpr (about.operand != operand_kind::none) {
      L o{};
      if constexpr (about.backward_needs_operand) o = operand<L>(at);
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
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L compute(L x, Cursor& at) {
    if constexpr (about.kind == word_kind::dropout) {
      const auto p = at.template parameter<Parameter>();
      return Word::forward(x, at.template keeps<L, Ordinal>(Word::threshold(p)), p);
    } else if constexpr (about.kind == word_kind::rotary) {
      return turned(x, at, [&](L cos, L sin) ONEPASS_LAMBDA { return Word::forward(x, cos, sin); });
    } else if constexpr (about.kind == word_kind::rounding) {
      return at.rounded(x);
    } else if constexpr (about.is_causal) {
      return Word::forward(x, at.template column<L>(), at.template matrix_row<L>());
    } else if constexpr (about.operand != operand_kind::none) {
      return forward_of<L>(numbers{}, at, x, operand<L>(at));
    } else {
      return forward_of<L>(numbers{}, at, x);
    }
  }

  // Those of a lane's numbers that `rope` turns; others stay.
  template <class L, class Cursor, class Turn>
  static ONEPASS_FUNCTION L turned(L x, Cursor& at, const Turn& turn) {
    if constexpr (Parameter < 0) {
      return turn(at.template table<L, Operand>(), at.template table<L, Operand + 1>());
    } else {
      const int count = at.turned();
      if (count == 0) return x;
      const L y = turn(at.template table<L, Operand>(), at.template table<L, Operand + 1>());
      return count == lanes<L>() ? y : L(where(first_n<L>(count), y, x));
    }
  }

  // With the word's numbers behind.
  template <class L, int... I, class Cursor, class... Lanes>
  static ONEPASS_FUNCTION L forward_of(indices<I...>, Cursor& at, Lanes... lanes) {
    return Word::forward(lanes..., L(at.template parameter<Parameter + I>())...);
  }
  template <class Result, int... I, class Cursor, class L, class... Lanes>
  static ONEPASS_FUNCTION Result backward_of(indices<I...>, Cursor& at, L x, Lanes... lanes) {
    return Word::backward(x, lanes..., L(at.template parameter<Parameter + I>())...);
  }
};

template <class... Words>
struct chain;

template <>
struct chain<> {
  static constexpr bool resumes = false, adds = false;
  static constexpr turning turns = turning::none;
  static constexpr int turned_operand = -1, turned_parameter = -1;  // of `rope`: its first table, and its number
  static constexpr bool needs_input = false;  // whether backward reads the value that enters the chain
  static constexpr bool gives_codes = false;
  static constexpr uint64 channels = 0;                                      // bits: operands of words by channels
  using grouped = void;                                                      // its word that gives codes by groups
  static constexpr int flops = 0;                                            // forward and backward, per element
  static constexpr int operands = 0, dropouts = 0, keeps = 0, features = 0;  // as the words so far have counted
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L forward(L x, Cursor&) {
    return x;
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L recompute(L x, Cursor&) {
    return x;
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L backward(L, L dy, Cursor&) {
    return dy;
  }
};

template <class Head, class... Tail>
struct chain<Head, Tail...> {
  using tail = chain<Tail...>;
  static constexpr bool resumes = Head::resumes || tail::resumes;
  static constexpr bool adds = Head::adds;
  static constexpr turning turns = Head::turns != turning::none ? Head::turns : tail::turns;
  static constexpr int turned_operand = larger(Head::turned_operand, tail::turned_operand);
  static constexpr int turned_parameter = larger(Head::turned_parameter, tail::turned_parameter);
  static constexpr bool needs_input = Head::needs_input || (!Head::resumes && tail::needs_input);
  static constexpr bool gives_codes = Head::about.gives_codes || tail::gives_codes;
  static constexpr uint64 channels = Head::channels | tail::channels;
  using grouped = typename either<Head::about.by_groups, Head, typename tail::grouped>::type;
  static constexpr int flops = Head::flops + tail::flops;
  static constexpr int operands = larger(Head::operands, tail::operands);
  static constexpr int dropouts = larger(Head::dropouts, tail::dropouts);
  static constexpr int keeps = larger(Head::keeps, tail::keeps);
  static constexpr int features = larger(Head::features, tail::features);

  template <class L, class Cursor>
  static ONEPASS_FUNCTION L forward(L x, Cursor& at) {
    if constexpr (Head::scales && tail::adds) return tail::forward(x, Head::template factor<L>(at), at);
    else return tail::forward(Head::forward(x, at), at);
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L recompute(L x, Cursor& at) {
    if constexpr (tail::resumes) return tail::recompute(x, at);
    else if constexpr (Head::scales && tail::adds) return tail::recompute(x, Head::template factor<L>(at), at);
    else return tail::recompute(Head::recompute(x, at), at);
  }
  // Behind `scale` or `mul`, a chain that begins with `bias`, `add` or an additive mask: both in one operation, which
  // rounds once. Its result is a plain lane where L is a short one, which what follows must not lose.
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L forward(L x, L factor, Cursor& at) {
    return tail::forward(L(fma(x, factor, Head::template operand<L>(at))), at);
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L recompute(L x, L factor, Cursor& at) {
    return tail::recompute(L(fma(x, factor, Head::template operand<L>(at))), at);
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L backward(L x, L factor, L dy, Cursor& at) {
    L value{};
    if constexpr (tail::needs_input) value = fma(x, factor, Head::template operand<L>(at));
    return Head::backward(L{}, tail::backward(value, dy, at), at);  // what adds needs no input
  }
  template <class L, class Cursor>
  static ONEPASS_FUNCTION L backward(L x, L dy, Cursor& at) {
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

template <class Row>
inline constexpr bool gives_number = Row::about.gives_number;
template <>
inline constexpr bool gives_number<void> = false;

template <class Row>
inline constexpr bool gives_codes = Row::about.gives_codes;
template <>
inline constexpr bool gives_codes<void> = false;

// Where the scale of its codes stands among the kept values; -1: it gives none.
template <class Row>
inline constexpr int scale_number = -1;
template <dtype D, int K>
inline constexpr int scale_number<word::quantize<D, K>> = K;

// The operand that a row word takes, its target; -1: none. The last one says which numbers are ignored.
template <class Row>
inline constexpr int target_operand = -1;
template <class Row, int I>
inline constexpr int target_operand<word::with_target<Row, I>> = I;
template <class Row>
inline constexpr int ignore_number = Row::about.parameters - 1;

// The operand that is a row beside a row word's own; -1: none.
template <class Row>
inline constexpr int paired_operand = -1;
template <class Row, int I, int J>
inline constexpr int paired_operand<word::with_row<Row, I, J>> = I;

// A row word (void in an elementwise line), and the words from it to the next or to the line's end. Number: of an
// ending, which result it gives: -1 the line's, else that which stands among the kept values.
template <class Row, int RowParameter = -1, class Post = chain<>, int Number = -1>
struct segment {
  using row = Row;
  using post = Post;
  static constexpr int row_parameter = RowParameter, number = Number < 0 ? scale_number<Row> : Number;
  static constexpr int keeps = larger(Post::keeps, number + 1);
};

template <int I, class First, class... More>
struct nth {
  using type = typename nth<I - 1, More...>::type;
};
template <class First, class... More>
struct nth<0, First, More...> {
  using type = First;
};

template <class Row>
inline constexpr bool is_resumed = false;
template <class Row>
inline constexpr bool is_resumed<word::resumed<Row>> = true;

// What a kernel runs: pre, then the first segment, then others. With features, which are the last words, a row's
// result is those few numbers, and its gradient theirs.
template <class Pre, class Row = void, int RowParameter = -1, class Post = chain<>, class... More>
struct line {
  using pre = Pre;
  static constexpr int segments = 1 + sizeof...(More);
  template <int I>
  using segment_at = typename nth<I, segment<Row, RowParameter, Post>, More...>::type;
  using last = segment_at<segments - 1>;
  using row = typename last::row;  // the last row word; others are segment_at<I>::row
  // Its result is codes, or one number a row; else a row.
  static constexpr bool gives_codes =
      onepass::ONEPASS_TARGET::gives_codes<row> || Pre::gives_codes || last::post::gives_codes;
  static constexpr bool gives_number = onepass::ONEPASS_TARGET::gives_number<row> && !gives_codes;  // this; else a row
  using post = typename last::post;
  // The word, placed, that gives codes by groups; void: none does.
  using grouped = typename either<same_type<typename post::grouped, void>, Pre, post>::type::grouped;
  static constexpr bool by_groups = !same_type<grouped, void>;
  static constexpr int row_parameter = last::row_parameter, number = last::number;

  static constexpr int operands =
      largest_of<paired_operand<Row> + 1, Pre::operands, Post::operands, More::post::operands...>;
  static constexpr uint64 channels = ((Pre::channels | Post::channels) | ... | More::post::channels);
  static constexpr int dropouts = largest_of<Pre::dropouts, Post::dropouts, More::post::dropouts...>;
  static constexpr int keeps = largest_of<Pre::keeps, segment_at<0>::keeps, More::keeps...>;
  static constexpr int features = post::features;
  static constexpr int turned_operand =
      largest_of<Pre::turned_operand, Post::turned_operand, More::post::turned_operand...>;
  static constexpr int turned_parameter =
      largest_of<Pre::turned_parameter, Post::turned_parameter, More::post::turned_parameter...>;
  static constexpr turning turns = static_cast<turning>(
      largest_of<static_cast<int>(Pre::turns), static_cast<int>(Post::turns), static_cast<int>(More::post::turns)...>);

  // Where a row word's numbers begin among those that are saved of a row; the number of all for I = segments.
  template <int I, dtype X>
  static constexpr int statistics_before() {
    if constexpr (I == 0) return 0;
    else return statistics_before<I - 1, X>() + statistics_of(segment_at<I - 1>::row::about, X);
  }
};

// What forward saves of a row, of each row word.
template <class T, int Segments>
struct saved_numbers {
  word::row_numbers<T> of[Segments];
};

// Whether row words I and J, I <= J, take the same value: endings alone stand from the one to the other.
template <class Line, int I, int J>
constexpr bool take_same_value() {
  if constexpr (I == J) {
    return true;
  } else {
    using segment = typename Line::template segment_at<I>;
    return gives_number<typename segment::row> && !gives_codes<typename segment::row> &&
           same_type<typename segment::post, chain<>> && take_same_value<Line, I + 1, J>();
  }
}
// The first entropy from row word J on of the value that row word I takes; -1: there is none.
template <class Line, int I, int J = 0>
constexpr int entropy_beside() {
  constexpr int kFirst = I < J ? I : J, kLast = I < J ? J : I;
  if constexpr (J == Line::segments) return -1;
  else if constexpr (!same_type<typename Line::template segment_at<J>::row, word::entropy>)
    return entropy_beside<Line, I, J + 1>();
  else return take_same_value<Line, kFirst, kLast>() ? J : entropy_beside<Line, I, J + 1>();
}
template <class Row>
concept has_probabilities = requires(word::row_numbers<float> saved) {
  Row::of_probabilities(saved);
};

// In backward an entropy has the exponentials of all endings of its value, and takes their parts of these with its own.
template <class Line, int I = 0, class T>
ONEPASS_FUNCTION void share_probabilities(saved_numbers<T, Line::segments>& saved) {
  using row = typename Line::template segment_at<I>::row;
  if constexpr (has_probabilities<row>) {
    constexpr int kEntropy = entropy_beside<Line, I>();
    if constexpr (kEntropy >= 0) {
      saved.of[kEntropy].second += row::of_probabilities(saved.of[I]);
      saved.of[I].shared = true;
    }
  }
  if constexpr (I + 1 < Line::segments) share_probabilities<Line, I + 1>(saved);
}

template <class Line, int I, class L, class T, class Cursor>
ONEPASS_FUNCTION L row_result(L x, const saved_numbers<T, Line::segments>& saved, Cursor& at);

// What a row word of sums gets besides the sums.
template <class Row, class Cursor>
ONEPASS_FUNCTION auto own_numbers_of(const Cursor& at) {
  const auto numbers = [&]<int... I>(indices<I...>) ONEPASS_LAMBDA {
    using T = decltype(at.row_length());
    return word::own_numbers<T, Row::kNumbers>{at.row_length(), {at.template parameter<Row::kFirstNumber + I>()...}};
  };
  return numbers(typename indices_to<Row::kNumbers>::type{});
}

// Of a call's arguments, where no cursor is at hand.
template <class T, class Arguments>
struct numbers_of_call {
  const Arguments& a;
  template <int J>
  ONEPASS_FUNCTION T parameter() const {
    return static_cast<T>(a.parameter[J]);
  }
  ONEPASS_FUNCTION T row_length() const { return static_cast<T>(a.columns); }
};

// Forward of a row word; How: the row as the kernel has it, see word/row.h.
template <class Row, class How, class L, class T, class Cursor>
ONEPASS_FUNCTION L row_forward(L u, word::row_numbers<T> saved, Cursor& at) {
  if constexpr (word::is_of_sums<Row>) return Row::forward(u, saved, own_numbers_of<Row>(at));
  else return Row::template forward<How>(u, saved);
}
// A row word's result, from its value in backward: the result itself, or what entered it.
template <class Row, class L, class T, class Cursor>
ONEPASS_FUNCTION L result_of(L value, const word::row_numbers<T>& saved, Cursor& at) {
  if constexpr (word::is_of_sums<Row>) return Row::forward(value, saved, own_numbers_of<Row>(at));
  else return value;
}
// Adds the terms of a value and its result's gradient to the sums over a row that backward needs.
template <class Row, class L, class T, class Cursor>
ONEPASS_FUNCTION void add_row_terms(L value, L dz, const word::row_numbers<T>& saved, Cursor& at, word::terms<L>& to) {
  if constexpr (word::is_of_sums<Row>) Row::add_terms(value, dz, saved, own_numbers_of<Row>(at), to);
  else Row::add_terms(value, dz, to);
}

// The value that enters row word I, recomputed from x.
template <class Line, int I, class L, class T, class Cursor>
ONEPASS_FUNCTION L value_before(L x, const saved_numbers<T, Line::segments>& saved, Cursor& at) {
  if constexpr (I == 0) return Line::pre::recompute(x, at);
  else return Line::template segment_at<I - 1>::post::recompute(row_result<Line, I - 1>(x, saved, at), at);
}
// Row word I's value in backward, recomputed from x: its result, or what entered it; or the result itself is x.
template <class Line, int I, class L, class T, class Cursor>
ONEPASS_FUNCTION L row_value(L x, const saved_numbers<T, Line::segments>& saved, Cursor& at) {
  using row = typename Line::template segment_at<I>::row;
  if constexpr (is_resumed<row>) return x;
  else if constexpr (word::is_of_sums<row>) return value_before<Line, I>(x, saved, at);
  else return row::recompute(value_before<Line, I>(x, saved, at), saved.of[I]);
}
template <class Line, int I, class L, class T, class Cursor>
ONEPASS_FUNCTION L row_result(L x, const saved_numbers<T, Line::segments>& saved, Cursor& at) {
  return result_of<typename Line::template segment_at<I>::row>(row_value<Line, I>(x, saved, at), saved.of[I], at);
}

// The gradient of what entered a row word.
template <class Row, class L, class T, class Cursor>
ONEPASS_FUNCTION L gradient_before(L z, L dz, word::row_numbers<T> saved, word::pair<T> sums, T inverse_columns,
                                   Cursor& at) {
  if constexpr (word::is_of_sums<Row>) {
    return Row::backward(z, dz, saved, sums, own_numbers_of<Row>(at));
  } else if constexpr (paired_operand<Row> >= 0) {
    const word::gradients<L> g = Row::backward(z, at.template operand<L, Row::operand>(), dz, saved,
                                               Row::template weights_of<T>(at.numbers() + Row::parameter));
    if (at.template wants<Row::operand>()) at.template tensor_gradient<Row::operand>(g.doperand);
    return g.dx;
  } else {
    const L du = Row::backward(z, dz, saved, sums, inverse_columns);
    if constexpr (target_operand<Row> >= 0) return at.plus_at(du, saved.at.column, saved.gradient);
    else return du;
  }
}

// z, row word I's value, and its result's gradient, of one lane in backward. dy: the gradient at its segment's end.
template <class Line, int I, class L, class Cursor, class T>
ONEPASS_FUNCTION word::terms<L> value_and_gradient(Cursor& at, const saved_numbers<T, Line::segments>& saved, L dy) {
  L x{};
  if constexpr (!Line::pre::resumes) x = at.x();
  using segment = typename Line::template segment_at<I>;
  const L z = row_value<Line, I>(x, saved, at);
  return {z, segment::post::backward(result_of<typename segment::row>(z, saved.of[I], at), dy, at)};
}
// Of the last.
template <class Line, class L, class Cursor, class T>
ONEPASS_FUNCTION word::terms<L> value_and_gradient(Cursor& at, const saved_numbers<T, Line::segments>& saved) {
  return value_and_gradient<Line, Line::segments - 1, L>(at, saved, at.dy());
}
// Of row word I, where the sums over the row are known of those behind it.
template <class Line, int I, class L, class Cursor, class T>
ONEPASS_FUNCTION word::terms<L> value_and_gradient(Cursor& at, const saved_numbers<T, Line::segments>& saved,
                                                   const word::pair<T> (&sums)[Line::segments], T inverse_columns) {
  if constexpr (I + 1 == Line::segments) {
    return value_and_gradient<Line, L>(at, saved);
  } else {
    using behind = typename Line::template segment_at<I + 1>::row;
    const word::terms<L> next = value_and_gradient<Line, I + 1, L>(at, saved, sums, inverse_columns);
    const L du = gradient_before<behind>(next.first, next.second, saved.of[I + 1], sums[I + 1], inverse_columns, at);
    // Their value is at hand.
    if constexpr (take_same_value<Line, I, I + 1>()) return {next.first, du};
    else return value_and_gradient<Line, I, L>(at, saved, du);
  }
}

ONEPASS_END
#endif
