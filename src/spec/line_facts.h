// What the autograd function asks the library about a line. It is compiled apart from the library, for the torch that
// is installed: this is all that the two share.
#pragma once

#include <cstdint>

namespace onepass {

struct line_facts {
  const void* line;  // the library's own
  int operands;
  int resumes_from;  // the result that backward reads in x's place: 0, or 1 + the keep's number; -1: none
  bool rowwise, reads_x, reads_statistics;
  std::uint64_t reads_operands;  // bits
  int weight;                    // the operand of `linear`; -1: the line has none, and what follows does not apply
  int keeps_before;              // keeps that stand before it
  int resumes_behind;            // the result that backward reads in the place of what `linear` gives
  bool reads_product;            // what `linear` gives
  bool x_for_weight;             // x is read only for the gradient of the matrix, and so are these operands
  std::uint64_t operands_for_weight;
};

struct line_library {
  const line_facts* (*find)(const char* text);  // null for what is no line; valid as long as the process
  // For x and each operand where its gradient comes from: kUnwanted, kUpstream, or its index among what backward
  // writes. operand_types: dtypes, plus kBroadcast where the shape is not x's. wanted: bit 0 for x, bit i + 1 for
  // operand i. True where backward writes anything.
  bool (*plan)(const line_facts&, int dtype, const std::int64_t* operand_types, std::uint64_t wanted, int* sources);
};

inline constexpr int kUnwanted = -2, kUpstream = -1;
inline constexpr std::int64_t kBroadcast = 16;

}  // namespace onepass
