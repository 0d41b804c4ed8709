// Calls of lines with `scores`, and with `values` or without, and of their backward, without memory.
#pragma once

#include <string_view>
#include <vector>

#include "src/cuda/attention/backward_sm90.h"
#include "src/plan/contraction.h"
#include "tests/cuda/imagined_linear.h"

namespace onepass::cuda {

struct attention_sizes {
  int64 rows, keys, depth, value_depth;
};

// Of two times three batches, without memory.
class imagined_attention {
 public:
  imagined_attention(const char* line, attention_sizes of, dtype type)
      : linear_(line, 6 * of.rows, of.depth, of.keys, type, false), of_(of), scores_(linear_.scores()) {
    const spec::contraction parts(spec::parse(line));
    causal_ = std::string_view(line).find("causal") != std::string_view::npos;
    for (int i = 0; i < parts.behind.operands; ++i) brought_.push_back(i);
    leading_masks_ = spec::leading_masks(parts.behind);
  }
  void pad() { linear_.pad(); }
  const scores_call& scores() const { return scores_; }
  attention_call call() const {
    return {.behind = scores_.behind,
            .a_behind = scores_.a_behind,
            .causal = causal_,
            .brought = brought_,
            .leading_masks = leading_masks_,
            .queries = rows_of(of_.rows, of_.depth),
            .keys = rows_of(of_.keys, of_.depth),
            .values = of_.value_depth > 0 ? rows_of(of_.keys, of_.value_depth) : batched_rows{},
            .y = scores_.a_behind.y.data};
  }

  attention_gradients_call gradients(const attention_call& call) const {
    void* y = scores_.a_behind.y.data;
    return {.of = call,
            .gradients = rows_of(of_.rows, of_.value_depth),
            .result = y,
            .statistics = static_cast<softmax_statistics*>(y),
            .queries = y,
            .keys = y,
            .values = y};
  }

 private:
  batched_rows rows_of(int64 rows, int64 depth) const {
    return {scores_.a_behind.y.data, 2, 3, 1, rows, depth, 3 * rows * depth, rows * depth, 0, depth};
  }
  imagined_linear linear_;
  attention_sizes of_;
  scores_call scores_;
  bool causal_ = false;
  std::vector<int> brought_, leading_masks_;
};

}  // namespace onepass::cuda
