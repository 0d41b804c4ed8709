// A line, parsed: its words, and what each takes from the call.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/word/descriptor.h"
#include "src/line/strategy.h"

namespace onepass::spec {

// A compiler takes 2 s for eight words, up to 8 s for 32, up to 15 s for 48 and minutes for a hundred.
inline constexpr int kMaxWords = 32;
inline constexpr int kMaxRowWords = 8;  // each is a reduction forward and one backward

struct word {
  const descriptor* about;
  const descriptor* activation = nullptr;  // inside gate(...)
  std::vector<double> parameters;          // its numbers; NaN: the machine epsilon of x's dtype
  int begin = 0, end = 0;                  // its characters in the line's text
  int operand = -1;                        // which operand of the call it takes
  int parameter_slot = -1;                 // which of the line's numbers is its first
  int ordinal = -1;                        // its count among the dropouts, or among the keeps; of the first ending -1
  dtype stored = dtype::none;              // what the line says that it keeps its value as; none: x's dtype
  int group = 0;                           // of codes: how many columns share a scale; 0: the row, or it is given
};

inline bool is_rotary(const word& w) { return w.about->kind == word_kind::rotary; }

// What a result is: a row of x's length (behind a contraction as long as that makes it), in x's dtype or one of its
// own; or one number a row, of shape [...], or codes' scale, [..., 1], or their scales, one for each group of columns,
// in the arithmetic's dtype.
enum class result_shape { row, number, scale };
struct result_type {
  result_shape shape = result_shape::row;
  dtype own = dtype::none;  // of a row; none: x's
  int group = 0;            // of scales: columns that share one; 0: the row
  bool is_number() const { return shape != result_shape::row; }
  bool is_differentiable() const { return shape != result_shape::scale && !is_code(own); }
  dtype type(dtype x) const { return result_dtype(x, is_number() ? dtype::f32 : own); }
};

struct line {
  std::string text;  // its strategy by its present name
  std::vector<word> words;
  int linear = -1;  // index of `linear` or `scores`; -1: none
  int values = -1;  // index of `values`, the last word; -1: none
  strategy how = strategy::automatic;
  std::string_view old_strategy;  // the alias by which the text named its strategy
  int operands = 0, dropouts = 0;
  int keeps = 0;          // results behind the first: kept values, and numbers of endings behind the first ending
  int features = 0;       // numbers that `linear` makes of a row, the line's last words (see with_features)
  int first_operand = 0;  // of a slice: how many operands of the whole line come before its own
  std::vector<double> parameters;
  std::vector<int> row_words;                    // indices of all
  std::vector<result_type> result_types = {{}};  // of the first, then of what stands at keep k

  bool rowwise() const { return !row_words.empty(); }
  bool by_rows() const { return rowwise() || features > 0; }  // its kernels have whole rows
  bool scores() const;                                        // whether it begins with `scores`
  int results() const { return 1 + keeps; }
  result_type result(int i) const { return result_types[static_cast<std::size_t>(i)]; }
  template <class Is>
  std::uint64_t results_that(const Is& is) const {  // bits
    std::uint64_t bits = 0;
    for (int i = 0; i < results(); ++i) bits |= std::uint64_t{std::invoke(is, result(i))} << i;
    return bits;
  }
  std::uint64_t numbers() const { return results_that(&result_type::is_number); }
  bool gives_codes() const { return is_code(result(0).own); }
  int group() const { return words.empty() ? 0 : words.back().group; }  // columns that share a scale of its codes
  const word& operand_word(int operand) const;
  // Where only x's dtype is known: x's, but what is added to a value that is kept in another has that one.
  dtype likely_type(int operand, dtype x) const;
  int first_row() const { return rowwise() ? row_words.front() : -1; }
  int last_row() const { return rowwise() ? row_words.back() : -1; }
  bool keeps_own_dtype() const;    // whether some value is kept in another dtype than x's
  int statistics(dtype x) const;   // elements saved of a row, of all row words
  int least_dim() const;           // `causal` looks at the last two dimensions
  bool depends_on_column() const;  // some word looks at its row or column (column operands, dropout, causal, rope)
  const word* rotary() const;      // its `rope`; null: it has none
  bool by_channels() const;        // whether some operand has a number for each channel
  // Of a row of so many, how many `rope` turns; 0 in other lines.
  std::int64_t turned(std::int64_t columns) const;
  // In a CPU task the rows are whole.
  bool takes_whole_rows() const { return by_rows() || rotary() != nullptr || by_channels(); }
};

// The line quoted, with carets under the characters at fault.
class line_error : public std::invalid_argument {
 public:
  line_error(std::string_view text, int begin, int end, const std::string& what);
};

line parse(std::string_view text);  // throws line_error

// Of a word that becomes the line's last: its numbers' and results' places.
void place(line& to, word&);

// The numbers that a word has unless its line says others.
std::vector<double> defaults_of(const descriptor&);

// Words [begin, end) as a line of their own: operands, numbers and keeps are counted from 0 again; dropouts keep their
// count, since their masks depend on it.
line slice(const line&, int begin, int end);

// The words of a line that gives codes on which its gradients depend: those up to the last kept value. Its result is
// that value once more, whose gradient there is none.
line differentiable_part(const line&);

// Without dropout, as in evaluation: the words as text again.
std::string without_dropout(const line&);

// A dtype as lines name it.
std::string_view name_in_lines(dtype);

// In messages: "operand 1 (residual of 'add')".
std::string operand_name(const line&, const word&);
std::string operand_name(const line&, const word&, int operand);  // of a word that takes several

// The words, and behind them so many features: `linear`, whose matrix has so many rows, each a column operand.
line with_features(line, int features);

}  // namespace onepass::spec
