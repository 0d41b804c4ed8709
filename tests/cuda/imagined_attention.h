// Calls of lines with `scores`, and with `values` or without, and of their backward, without memory.
#pragma once

#include <string_view>
#include <vector>

#include "src/cuda/attention/backward.h"
#include "src/plan/contraction.h"
#include "tests/cuda/imagined_linear.h"

namespace onepass::cuda {

struct attention_sizes {
  int64 rows, keys, head_dim, value_head_dim;
};

// A call of two times three batches, without memory.
class imagined_attention {
 public:
  imagined_attention(const char* line, attention_sizes of, dtype type)
      : linear_(line, 6 * of.rows, of.head_dim, of.keys, type, false), of_(of), scores_(linear_.scores()) {
    const spec::contraction parts(spec::parse(line));
    causal_ = std::string_view(line).find("causal") != std::string_view::npos;
    for (int i = 0; i < parts.behind.operands; ++i) prefetched_.push_back(i);
    leading_masks_ = spec::leading_masks(parts.behind);
  }
  void pad() { linear_.pad(); }
  const probabilities_sm80_call& scores() const { return scores_; }
  attention_call call() const {
    return {.behind = scores_.behind,
            .a_behind = scores_.a_behind,
            .causal = causal_,
            .prefetched = prefetched_,
            .leading_masks = leading_masks_,
            .queries = rows_of(of_.rows, of_.head_dim),
            .keys = rows_of(of_.keys, of_.head_dim),
            .values = of_.value_head_dim > 0 ? rows_of(of_.keys, of_.value_head_dim) : batched_rows{},
            .y = matrices_of(rows_of(of_.rows, of_.value_head_dim))};
  }

  backward_sm90_call gradients(const attention_call& call) const {
    const batched_rows output = rows_of(of_.rows, of_.value_head_dim);
    return {.forward = call,
            .grad_output = output,
            .output = matrices_of(output),
            .statistics = static_cast<softmax_statistics*>(scores_.a_behind.y.data),
            .grad_queries = matrices_of(call.queries),
            .grad_keys = matrices_of(call.keys),
            .grad_values = matrices_of(call.values)};
  }

 private:
  batched_rows rows_of(int64 rows, int64 head_dim) const {
    return {scores_.a_behind.y.data, 2, 3, 1, rows, head_dim, 3 * rows * head_dim, rows * head_dim, 0, head_dim};
  }
  imagined_linear linear_;
  attention_sizes of_;
  probabilities_sm80_call scores_;
  bool causal_ = false;
  std::vector<int> prefetched_, leading_masks_;
};

}  // namespace onepass::cuda
