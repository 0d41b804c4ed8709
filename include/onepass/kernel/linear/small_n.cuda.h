// `linear` with few out_features in one kernel on CUDA, forward and backward: the rowwise kernel, whose rows end in dot
// products (word::feature), or in backward begin at their gradients. The row's threads run the epilogue, one feature
// each.
//
// Config:
//   before   what kernel/row/rowwise.cuda.h asks for: a block has whole rows (kCluster is 1), one at a time (not
//   kAhead) behind   what kernel/common/cursor.cuda.h asks for, with vectors of one element and the threads of `before`
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"

ONEPASS_BEGIN

struct small_n_arguments {
  arguments before, behind;
};

// The epilogue: `Line` is the words behind `linear`, for rows of kFeatures elements.
template <class Config, class Line, int kFeatures, bool kBackward>
class small_n_epilogue {
 public:
  using T = typename Config::arithmetic;
  using vector = pack<T, 1>;
  static_assert(Config::kAcross >= kFeatures && Config::kVectorSize == 1 && Config::kCluster == 1);

  explicit ONEPASS_FUNCTION small_n_epilogue(const arguments& a) : a_(a), thread_(a) {
#pragma unroll
    for (int slot = 0; slot < kSums; ++slot) sums_[slot] = vector(T(0));
    if constexpr (kBackward) prefetch(thread_.first);
  }

  // Forward: every thread of the row has all its features.
  ONEPASS_FUNCTION void finish(int64 row, bool exists, numbers<T, kFeatures> features) const {
    if (!has_one()) return;
    cursor<Config, Line> at(a_);
    at.set_row(static_cast<index>(row), exists);
    at.set_column(thread_.across, 1);
    at.store_y(Line::pre::forward(at.rounded(own_of(features)), at));
  }

  // Backward: returns the gradients of the row's features to every thread of it. The thread that has a feature stores
  // the gradients of operands and adds up those of columns.
  ONEPASS_FUNCTION numbers<T, kFeatures> gradients(int64 row) {
    const numbers<T, kFeatures> x = next_x_, dy = next_dy_;
    prefetch(row + thread_.step);
    const bool exists = row < a_.rows;
    cursor<Config, Line, true> quiet(a_);
    quiet.set_row(static_cast<index>(row), exists);
    numbers<T, kFeatures> result;
#pragma unroll
    for (int j = 0; j < kFeatures; ++j) {
      quiet.set_column(j, 1);
      result.v[j] = Line::pre::backward(vector(x.v[j]), vector(dy.v[j]), quiet).v[0];
    }
    if constexpr (Config::kWantsDx || Config::kWantsColumn != 0 || Config::kWantsTensor != 0) {
      if (has_one()) {
        cursor<Config, Line> at(a_);
        at.set_row(static_cast<index>(row), exists);
        at.set_column(thread_.across, 1);
        at.set_sums(sums_);
        at.store_dx(Line::pre::backward(own_of(x), own_of(dy), at));
      }
    }
    return result;
  }
  ONEPASS_FUNCTION void write_parts() const {
#pragma unroll
    for (int slot = 0; slot < kSlots<Config>; ++slot)
      write_part<Config, Line>(a_, sums_[slot], slot, thread_.share.block, 0, thread_.across, thread_.down);
  }

 private:
  using index = typename Config::index;
  static constexpr int kSums = larger(1, kSlots<Config>);

  ONEPASS_FUNCTION bool has_one() const { return thread_.across < kFeatures; }
  ONEPASS_FUNCTION vector own_of(numbers<T, kFeatures> of) const {
    T own = of.v[0];
#pragma unroll
    for (int j = 1; j < kFeatures; ++j) own = thread_.across == j ? of.v[j] : own;
    return vector(own);
  }
  // Loads what gradients(row) reads, a row ahead.
  ONEPASS_FUNCTION void prefetch(int64 row) {
    cursor<Config, Line, true> at(a_);
    at.set_row(static_cast<index>(row), row < a_.rows);
#pragma unroll
    for (int j = 0; j < kFeatures; ++j) {
      at.set_column(j, 1);
      next_x_.v[j] = T(0);
      if constexpr (Line::pre::needs_input) next_x_.v[j] = at.x().v[0];
      next_dy_.v[j] = at.dy().v[0];
    }
  }

  const arguments& a_;
  rows_of_thread<Config> thread_;
  numbers<T, kFeatures> next_x_, next_dy_;
  vector sums_[kSums];
};

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void small_n_forward(const small_n_arguments& a) {
  rowwise_forward<typename Config::before, Before>(
      a.before, small_n_epilogue<typename Config::behind, Behind, Before::features, false>(a.behind));
}

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void small_n_backward(const small_n_arguments& a) {
  rowwise_backward<typename Config::before, Before>(
      a.before, small_n_epilogue<typename Config::behind, Behind, Before::features, true>(a.behind));
}

ONEPASS_END
