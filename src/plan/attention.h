// A line with `scores` and `values`: what `values` takes is a line of its own, and its gradients make the whole's.
#pragma once

#include "src/plan/contraction.h"

namespace onepass::spec {

struct attention {
  explicit attention(const line&);
  bool keeps_weights;  // what `values` takes is kept
  line scores;         // what makes it, without that keep
  int values;          // which operand `values` takes, the last
};

reads backward_reads(const attention&);

struct attention_gradients {
  gradients all;                   // of the whole line: inputs and outputs
  std::uint64_t wants_scores = 0;  // what is wanted of `scores`
  bool wants_values = false;
  bool gives_weights = false;  // behind the outputs of `scores` comes the gradient of what `values` takes
};
// From `scores` on, dtypes are those of its operand.
attention_gradients plan_gradients(const attention&, dtype x, const std::vector<operand_facts>&, std::uint64_t wanted);

}  // namespace onepass::spec
