// What a word says of itself: the one source for the parser, the planner, the fake kernels, the docs and the adviser.
#pragma once

#include "onepass/lane/types.h"

namespace onepass {

// What a word takes from the call, in the order in which the words stand.
enum class operand_kind : int {
  none,
  column,  // [N]
  tensor,  // broadcastable to the shape of what the line is at
  target,  // [...], an integer for each row: a column of it (row words)
  matrix,  // [N', N]: N' numbers of each row behind the word
  keys,    // [..., N', N], a matrix for each batch of rows
  values,  // [..., N, N'], likewise
};

// What else the chain must hand to a word.
enum class word_kind : int {
  activation,   // x -> f(x), no operand
  affine,       // with a column, a tensor or a number
  gate,         // an activation of x, times a tensor
  dropout,      // with random bits of its place
  mask,         // with a mask operand, or the place itself
  keep,         // returns the value at this point
  rounding,     // rounds the value at this point
  row,          // needs the whole row
  contraction,  // `linear`, `scores`, `values`
  rotary,       // turns pairs of the row's numbers
  feature,      // contracts the row with a column to one number; no word of the vocabulary
};

// A NaN (NVRTC knows no __builtin_nan): the number is the machine epsilon of the arithmetic.
inline constexpr double kMachineEpsilon = __builtin_bit_cast(double, 0x7ff8000000000000ull);

struct descriptor {
  const char* name;  // the word, and the struct's name in onepass::word
  word_kind kind;
  operand_kind operand = operand_kind::none;
  const char* operand_name = "";  // in messages and docs; of several, with commas
  int operands = 1;               // how many of that kind, where there is one
  const char* parameter = "";     // the number's name, "" where the word takes none; of several, with commas
  int parameters = 1;             // how many, where there is one
  bool parameter_required = false;
  double parameter_default = 0;      // or kMachineEpsilon
  double other_defaults[2] = {};     // of the second and the third, where there are any
  const char* with_number = "";      // the struct in onepass::word that takes the number; without one the word has none
  const char* dtypes = "";           // what its result may be stored as where that is not x's dtype, with commas
  const char* option = "";           // a name that stands in the parentheses behind the numbers; "": none
  bool backward_needs_input = true;  // the value that stood before the word
  bool backward_needs_operand = false;
  bool passes_gradient = false;           // dx is dy itself
  bool operand_gradient_is_dy = false;    // d operand is dy itself
  bool operand_gradient_is_dy_x = false;  // d operand is dy times what stood before the word
  int statistics = 0;                     // numbers saved per row (row words); see statistics_of
  int fine = 0;                           // how many of them, the last, are nothing beside the roundings of 16 bits
  int sums = 2;                           // over the row, that backward needs (row words)
  int flops_recompute = 0;                // of the result from x and statistics (row words)
  bool backward_from_result = false;      // neither x nor statistics are needed where the result is at hand (row words)
  bool finds_input = false;               // backward finds what forward saved among the values: their bits must agree
  bool gives_number = false;              // an ending: one number a row, and the row goes on unchanged (row words)
  bool gives_codes = false;               // and codes of the row, the line's result, of which the number is the scale
  bool by_groups = false;                 // codes have a scale for each group of the row's columns (no row words)
  bool by_channels = false;               // each number of its column serves as many neighbouring columns of the row
  double of_nothing = 0;                  // that number of a row without elements
  bool needs_elements = false;            // there is none
  int flops_forward = 1;                  // per element
  int flops_backward = 1;
  // What the word is in mathematics, for who has to know: planners of attention, the rewriter, prices.
  bool maps_zero_to_zero = false;  // f(0) is 0, with a finite derivative, whatever a finite operand or number is
  bool is_linear = false;          // f(c x) is c f(x): a factor common to a row may be taken out
  bool scales = false;             // x times the operand, or times the number
  bool adds = false;               // x plus the operand
  bool is_causal = false;          // -inf where the column is past the row, in the last two dimensions
  bool normalises = false;         // divides the row by its deviation or its root mean square
  bool centres = false;            // takes the row's mean from it
  bool is_softmax = false;         // the row's probabilities
  // Of words whose lines are compiled at first use, a user's (src/line/defined.h), those of functions.h and those with
  // an option: the struct. Others are the word::NAME of their name.
  const char* defined = "";
  const char* formula = "";
  const char* meaning = "";
};

// How many numbers are saved of a row of this dtype.
constexpr int statistics_of(const descriptor& about, dtype x) {
  return about.statistics - (size_of(x) == 2 ? about.fine : 0);
}

// Beside its row stands another, which has a gradient too.
constexpr bool is_paired(const descriptor& about) {
  return about.kind == word_kind::row && about.operand == operand_kind::tensor;
}

// The operand says which places are left out: -inf where it is false, or added.
constexpr bool is_mask(const descriptor& about) {
  return about.kind == word_kind::mask && about.operand != operand_kind::none;
}
constexpr bool is_bias(const descriptor& about) { return about.adds && about.operand == operand_kind::column; }

}  // namespace onepass
