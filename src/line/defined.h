// Words that users define while the process runs (Python: onepass.define_word), each a struct in C++.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "onepass/word/descriptor.h"

namespace onepass::spec {

// What it looks at: an element, or a row, of which it makes other values or one number.
enum class defined_kind : int { elementwise, row, ending };

struct defined_word {
  std::string name;
  defined_kind kind = defined_kind::elementwise;
  operand_kind operand = operand_kind::none;  // or column, or tensor, of an elementwise word
  std::string operand_name{};
  std::vector<std::string> parameters{};  // all of which a line must give
  int flops_forward = 1, flops_backward = 1;
  bool maps_zero_to_zero = false;
  int sums = 0;                 // over the row, one or two, of a word that looks at one
  double of_nothing = 0;        // an ending's number of a row without elements
  bool needs_elements = false;  // there is none
  std::string formula{}, meaning{};
  std::string source;  // `forward` and perhaps `backward`, as members of a struct (onepass/word/user.h)
};

// From here on a word of the vocabulary. Throws std::invalid_argument where there is one of that name. What it points
// to stays, also when the word is no longer one.
const descriptor* define(defined_word);
const descriptor* undefine(std::string_view name);  // null: no such word of a user

std::vector<const descriptor*> defined_words();

// The source of kernels, whose lines may have such words, with the structs of these behind what it includes.
std::string with_definitions(std::string source);

}  // namespace onepass::spec
