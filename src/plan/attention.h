// A line with `scores` and `values`: the words before `values` are a line of their own, whose gradients make the
// whole's.
#pragma once

#include "src/plan/contraction.h"

namespace onepass::spec {

struct attention {
  explicit attention(const line&);
  bool keeps_weights;  // a keep stands right before `values`
  line scores;         // the words before `values`, without that keep
  int values;          // which operand `values` takes, the last
};

reads backward_reads(const attention&);

struct attention_gradients {
  gradients all;                   // of the whole line: inputs and outputs
  std::uint64_t wants_scores = 0;  // what is wanted of `scores`
  bool wants_values = false;
  bool gives_weights = false;  // the gradient of the weights comes behind the outputs of `scores`
};
// From `scores` on, dtypes are those of its operand.
attention_gradients plan_gradients(const attention&, dtype x, const std::vector<operand_facts>&, std::uint64_t wanted);

}  // namespace onepass::spec
