// Attention on the CPU: scores, the words behind them and the GEMM with the values, for a panel of one batch's rows at
// a time, so that intermediate results stay in a core's cache.
#pragma once

#include <optional>
#include <vector>

#include "src/cpu/panel.h"
#include "src/plan/contraction.h"
#include "src/plan/layout.h"

namespace onepass::cpu {

inline constexpr const char* kWhyNoScorePanels =
    "panels are for words behind 'scores' on the CPU, several batches or many rows, and float32, float64, or bfloat16 "
    "where the processor has products of it (AVX512_BF16)";

// A tensor's matrices, one for each batch of keys, their rows contiguous. Rows that share keys are of one batch.
class batched_matrices {
 public:
  // own: batch sizes that the keys have (spec::own_batch_sizes). None where strides do not suit products.
  static std::optional<batched_matrices> of(const spec::strided&, int own);
  int64 count() const { return outer_.size * inner_.size; }
  int64 rows() const { return rows_.size; }
  int64 columns() const { return columns_; }
  matrix part(int64 batch, int64 first, int64 count) const {
    const int64 at = batch / inner_.size * outer_.stride + batch % inner_.size * inner_.stride + first * rows_.stride;
    return {static_cast<char*>(data_) + at * size_of(type_), type_, count, columns_, rows_.stride, 1};
  }
  matrix whole(int64 batch) const { return part(batch, 0, rows_.size); }

 private:
  void* data_ = nullptr;
  dtype type_ = dtype::none;
  int64 columns_ = 0;
  spec::dimension outer_{}, inner_{}, rows_{};
};

// How a call is cut into panels. A function of shapes and dtypes only.
struct score_panels {
  int64 batches, rows, columns;  // scores: rows of one batch, which share keys
  int64 panel;                   // rows of a panel
  dtype type;
  int64 period = 0;  // causal: rows of a matrix, whose row i attends to the first i + 1 keys; 0: not causal

  // Keys that `count` rows from `first` on attend to, rounded up to whole tiles.
  int64 seen(int64 first, int64 count) const;
  int64 panels() const { return (rows + panel - 1) / panel; }  // of a batch
  // Of scores in a panel, and of gradients of what is made of them: softmax would multiply their rounding.
  dtype inner_type() const { return type == dtype::bf16 ? dtype::f32 : type; }
  bool is_wider_within() const { return inner_type() != type; }
};
// None where there is no GEMM of the dtype, or nothing to compute. period: rows of a matrix of x.
std::optional<score_panels> cut_scores(const spec::line& behind, dtype, int64 batches, int64 rows, int64 columns,
                                       int64 period);
// Whether there are enough tasks to be faster than threads that share one product. In backward a batch is one task,
// since panels add to the gradients of its keys.
bool has_many_tasks(const score_panels&, bool backward);

struct scores_forward {
  score_panels by;
  row_call behind;
  batched_matrices queries, keys;
  void* probabilities = nullptr;  // dense, the result of the words behind `scores`; null: not wanted
  std::optional<batched_matrices> values{}, result{};
};
void forward_in_panels(const scores_forward&);

// Whether backward has panels. It has none with column sums, or where the scores' gradient is an operand's too.
bool panels_go_back(const spec::contraction&, const spec::contraction_gradients&, bool with_values);

struct scores_backward {
  score_panels by;
  row_call behind;                      // backward of the words behind `scores`
  bool reads_scores;                    // whether it reads the scores
  const row_call* recompute = nullptr;  // its forward, where probabilities are recomputed
  batched_matrices queries, keys;
  std::optional<batched_matrices> grad_queries{}, grad_keys{};  // null: not wanted
  // With values. probabilities and their gradient: where they were kept.
  std::optional<batched_matrices> values{}, grad_output{}, grad_values{};
  void* probabilities = nullptr;
  std::optional<batched_matrices> grad_probabilities{};
};
void backward_in_panels(const scores_backward&);

}  // namespace onepass::cpu
