// Rows of what `linear` takes, made by the blocks in turn, some tiles ahead of the product that needs them
// (kernel/linear/gemm_sm90.cuda.h).
#pragma once

#include "onepass/kernel/linear/prologue.cuda.h"
#include "onepass/kernel/linear/gemm_tiles.cuda.h"

ONEPASS_BEGIN

// All blocks hear of rows that this one has made.
ONEPASS_FUNCTION void tell_of_rows(const linear_arguments& a, int64 first, int rows) {
  const int64 left = a.before.rows - first;
  add_for_all(a.ready + first / kTileM, static_cast<uint32>(left < rows ? static_cast<int>(left) : rows));
}

// All threads make the rows before row `end`, the blocks in turn.
template <class Config, class Line>
ONEPASS_FUNCTION void make_first_rows(const linear_arguments& a, int64 end,
                                      typename row_threads<Config>::slots& shared) {
  using rows = input_rows<Config, Line>;
  rows input(a.before, shared);
  const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
  for (int64 row = static_cast<int64>(blockIdx.x) * rows::kRows; row < end && row < a.before.rows; row += step) {
    input.make(row, row + step);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) tell_of_rows(a, row, rows::kRows);
  }
}

// The rows behind those, a block's in turn with those of all others: made by a warpgroup...
template <class Config, class Line>
class later_rows {
 public:
  using rows = input_rows<Config, Line>;

  ONEPASS_FUNCTION later_rows(const arguments& a, int64 first, uint64 (&made)[2], uint64 (&told)[2],
                              typename row_threads<Config>::slots& shared)
      : input_(a, shared),
        made_(made),
        told_(told),
        rows_(a.rows),
        next_(first + static_cast<int64>(blockIdx.x) * rows::kRows) {}

  // All of this block's before row `end`.
  ONEPASS_FUNCTION void make_until(int64 end) {
    const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
    for (; next_ < end && next_ < rows_; next_ += step, ++turn_) {
      wait_for_mbarrier(&told_[turn_ % 2], (turn_ / 2 + 1) & 1);
      input_.make(next_, next_ + step);
      fence_proxy_async();
      arrive(&made_[turn_ % 2]);
    }
  }

 private:
  rows input_;
  uint64 (&made_)[2];
  uint64 (&told_)[2];
  int64 rows_, next_;
  int turn_ = 0;
};
// ... and told of by another thread, which does not keep it waiting.
template <class Config, class Line, class Shared>
ONEPASS_FUNCTION void tell_of_later_rows(const linear_arguments& a, int64 first, Shared& shared) {
  constexpr int kRows = input_rows<Config, Line>::kRows;
  int64 row = first + static_cast<int64>(blockIdx.x) * kRows;
  for (int turn = 0; row < a.before.rows; row += static_cast<int64>(gridDim.x) * kRows, ++turn) {
    wait_for_mbarrier(&shared.made[turn % 2], turn / 2 & 1);
    tell_of_rows(a, row, kRows);
    arrive(&shared.told[turn % 2]);
  }
}

ONEPASS_END
