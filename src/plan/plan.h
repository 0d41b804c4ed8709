// What a line needs and gives: which tensors backward reads, where gradients come from, the C++ type that a kernel
// runs, and the bytes and flops of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "onepass/kernel/arguments.h"
#include "src/line/line.h"
#include "src/line/signature.h"

namespace onepass::spec {

// What a plan must know of an operand.
struct operand_facts {
  dtype type = dtype::none;
  bool broadcast = false;  // its shape is not x's (tensor operands)
};
// From what the operators take: a dtype's number, plus kBroadcast.
std::vector<operand_facts> operand_facts_of(const std::int64_t* types, std::size_t count);

// What backward reads, whoever wants what.
struct reads {
  bool x = false;
  int kept = -1;               // instead of x, the value of this keep (its number)
  bool result = false;         // instead of x, the result
  bool statistics = false;     // of the row word
  bool product = false;        // what `linear` gives
  int kept_behind = -1;        // instead of that, the value of this keep
  bool result_behind = false;  // or the result
  std::vector<bool> operands;  // the value of each operand
  // Of these, what is read only for the gradient of `linear`'s matrix.
  bool x_for_weight = false;
  std::vector<bool> operands_for_weight;
};
// again: and makes the line's result again, from x or the kept value.
reads backward_reads(const line&, bool again = false);

// One tensor that backward writes: dx (input 0) or the gradient of operand input - 1.
struct gradient_output {
  int input;
  dtype type;
  bool column;
};

struct gradients {
  // Of x, then of the operands: kUnwanted, kUpstream, or an index into outputs (several inputs may share one).
  std::vector<int> inputs;
  std::vector<gradient_output> outputs;              // tensors in input order, then columns
  std::uint64_t wants_column = 0, wants_tensor = 0;  // bits by operand: what the kernel computes
  bool wants_dx = false;
};
// wanted: bit 0 for x, bit i + 1 for operand i. (Lines with `linear`: see contraction.h.)
gradients plan_gradients(const line&, dtype x, const std::vector<operand_facts>&, std::uint64_t wanted);

// The line's numbers, where it leaves an epsilon to the arithmetic that of x's.
void fill_parameters(const line&, dtype x, arguments&);

// The C++ type of the line: "line<chain<placed<word::bias,0,-1,-1>,...>, word::layer_norm, 0, chain<...>>".
// boolean_masks: bits by operand. In backward the keep that the line resumes from becomes word::resume, the row word
// word::resumed<...>.
std::string type_text(const line&, std::uint64_t boolean_masks, bool backward);

// The line without its numbers, masks told apart: what the ahead-of-time table is keyed by.
std::string structure(const line&, std::uint64_t boolean_masks);

struct traffic {
  std::int64_t bytes = 0, flops = 0;
};
struct cost {
  traffic forward, backward;
  std::int64_t saved_bytes = 0;  // held between forward and backward
};
// Every tensor once; operands count in x's dtype (a boolean mask would be one byte; its dtype is not known here).
// columns_behind: of what a contraction gives, for lines that have one; matrices: batches of keys. What their kernels
// hand each other does not count.
cost estimate(const line&, std::int64_t rows, std::int64_t columns, std::int64_t columns_behind, dtype x,
              std::int64_t matrices = 1);

}  // namespace onepass::spec
