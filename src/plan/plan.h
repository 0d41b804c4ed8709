// A line's plan: the tensors that backward reads, the sources of gradients, the C++ type that a kernel is instantiated
// with, and bytes and flops.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "onepass/kernel/arguments.h"
#include "src/line/line.h"
#include "src/line/signature.h"

namespace onepass::spec {

// The facts of an operand on which a plan depends.
struct operand_facts {
  dtype type = dtype::none;
  bool broadcast = false;  // its shape is not x's (of a column: is not [N])
  bool summed = false;     // its gradient is a sum over rows, of the operand's own leading dimensions:
  std::uint64_t has = 0;   // those that it has, by bits, the last one's first
  int unit = 1;            // columns whose gradients may be added up at once (of words by channels)
};
// types: as the operators take them (signature.h).
std::vector<operand_facts> operand_facts_of(const std::int64_t* types, std::size_t count);

// The tensors that backward reads, whichever gradients are wanted.
struct reads {
  bool x = false;
  int kept = -1;               // instead of x, the value of this keep (its number)
  bool result = false;         // instead of x, the result
  bool statistics = false;     // of the row word
  bool product = false;        // the GEMM's result
  int kept_behind = -1;        // instead of that, the value of this keep
  bool result_behind = false;  // or the result
  std::vector<bool> operands;  // the value of each operand
  // True where x or an operand is read only for the gradient of the matrix.
  bool x_for_weight = false;
  std::vector<bool> operands_for_weight;
};
// recomputes: backward gives the line's result, too, from x or the kept value.
reads backward_reads(const line&, bool recomputes = false);

// One tensor that backward writes: dx (input 0) or the gradient of operand input - 1.
struct gradient_output {
  int input;
  dtype type;
  bool column;            // a sum over rows:
  std::int64_t has = -1;  // x's leading dimensions that it has, by bits, 1 in the place of others; -1: it is [N]
  int unit = 1;           // of words by channels: it has a number for each so many columns
};

struct gradients {
  // The sources of the gradients of x, then of the operands: kUnwanted, kUpstream, or an index into outputs, which
  // several inputs may share.
  std::vector<int> inputs;
  std::vector<gradient_output> outputs;              // tensors in input order, then columns
  std::uint64_t wants_column = 0, wants_tensor = 0;  // bits by operand: what the kernel computes
  std::uint64_t grouped = 0;                         // of wants_column, those with a row for each group of rows,
  std::uint64_t has = 0;                             // which are these leading dimensions'
  bool wants_dx = false;
  int unit = 1;  // of those by channels among wants_column
};
// wanted: bit 0 for x, bit i + 1 for operand i. (Lines with `linear`: see contraction.h.)
gradients plan_gradients(const line&, dtype x, const std::vector<operand_facts>&, std::uint64_t wanted);

// Fills in the line's parameters. An epsilon that the line leaves out is that of x's arithmetic.
void fill_parameters(const line&, dtype x, arguments&);

// The C++ type of the line: "line<chain<placed<word::bias,0,-1,-1>,...>, word::layer_norm, 0, chain<...>>".
// boolean_masks: bits by operand. In backward the keep that the line resumes from becomes word::resume, the row word
// word::resumed<...>.
std::string type_text(const line&, std::uint64_t boolean_masks, bool backward);

// The key of the ahead-of-time table: the line without its parameters, with boolean masks marked.
std::string structure(const line&, std::uint64_t boolean_masks);

struct traffic {
  std::int64_t bytes = 0, flops = 0;
};
struct cost {
  traffic forward, backward;
  std::int64_t saved_bytes = 0;  // kept between forward and backward
};
// Every tensor once; operands count in line::likely_type (a boolean mask would be one byte; its dtype is not known
// here). columns_behind: out_features, or keys, of lines with a contraction; matrices: batches of keys. Tensors between
// the kernels of such a line do not count.
cost estimate(const line&, std::int64_t rows, std::int64_t columns, std::int64_t columns_behind, dtype x,
              std::int64_t matrices = 1);

}  // namespace onepass::spec
