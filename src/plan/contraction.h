// A line with `linear` or `scores`: its prologue and its epilogue are lines of their own, whose gradients make its own.
// Lines with `values`: attention.h.
#pragma once

#include <optional>

#include "src/plan/plan.h"

namespace onepass::spec {

struct contraction {
  explicit contraction(const line&);
  line before, behind;
  line behind_keeping;  // `behind`, with a keep of what `linear` gives in front
  line recompute;  // recomputes the GEMM's input in backward: `before`, or its words behind the keep that it resumes
                   // from
  bool scores;
  int weight;  // which operand the contraction takes

  // `before` as a norm with or without scale and bias: the operands that those take, or -1.
  struct affine_norm {
    bool is_one, centres;
    int scale, bias;
  };
  affine_norm norm;
};

reads backward_reads(const contraction&);

// Empty where the strategy small_n can compute the line: each of the out_features is an operand of the kernel.
inline constexpr int64 kMostSmallN = 8;
std::string why_not_small_n(const contraction&, int64 features);

// Behind `linear` stand endings: backward computes the GEMM's result again, which is far larger than its input.
bool gives_numbers(const contraction&);
// Empty where what `linear` gives may exist a chunk of rows at a time: all that follows gives numbers of a row.
std::string why_not_chunked(const contraction&);

bool is_one_bias(const line&);  // which a library's GEMM can add itself

bool has_softmax(const line&);
bool is_causal(const line&);          // softmax of row i gives columns > i zero
bool maps_zero_to_zero(const line&);  // every word behind the row word does
bool is_linear(const line&);          // every word behind the row word is: softmax's sum may be divided by behind them
// The gradient of a line that is softmax behind masks, tensors to add and factors is softmax's, times this.
std::optional<double> softmax_scale(const line&);
// The operands of masks that stand at the line's begin, or behind factors above zero: a boolean one may set a score to
// -inf before those factors, too. A key-padding mask is such a mask that is the same for all rows.
std::vector<int> leading_masks(const line&);

struct contraction_gradients {
  gradients before, behind;                          // plans of the two lines, each for what is wanted of it
  gradients all;                                     // of the whole line: inputs and outputs
  std::uint64_t wants_before = 0, wants_behind = 0;  // what is wanted of the two lines: bit 0 for what enters them
  bool wants_input = false;                          // the gradient of what enters `linear`
  bool wants_weight = false;
  bool gives_input = false;       // the whole line's first output is that gradient
  std::vector<int> kept_outputs;  // those of `behind`'s outputs that the whole line gives
};
// From `linear` on, dtypes are those of its operand.
contraction_gradients plan_gradients(const contraction&, dtype x, const std::vector<operand_facts>&,
                                     std::uint64_t wanted);

}  // namespace onepass::spec
