// Where a thread is in a call's tensors on CUDA: a row, and a lane of its columns (Config: place.cuda.h).
#pragma once

#include "onepass/lane/memory.cuda.h"
#include "onepass/skeleton/arguments.h"

ONEPASS_BEGIN

// How many of the V numbers from `column` on the row has.
template <int V, class Index>
ONEPASS_FUNCTION int count_at(Index column, int64 columns) {
  const Index left = static_cast<Index>(columns) - column;
  return left >= V ? V : left > 0 ? static_cast<int>(left) : 0;
}

template <class Config>
class position {
 public:
  using index = typename Config::index;

  explicit ONEPASS_FUNCTION position(const arguments& a) : a_(a) {}

  ONEPASS_FUNCTION void set_row(index row) {
    row_ = row, matrix_row_ = row % static_cast<index>(a_.matrix_rows);
#pragma unroll
    for (int d = kMaxDims - 1; d > kMaxDims - Config::kDims; --d) {
      const auto size = static_cast<index>(a_.size[d]), rest = row / size;
      digit_[d] = row - rest * size;
      row = rest;
    }
    digit_[kMaxDims - Config::kDims] = row;
  }
  // Rows further within a matrix.
  ONEPASS_FUNCTION void skip_rows(index rows) {
    row_ += rows, matrix_row_ += rows;
    digit_[kMaxDims - 1] += rows;
  }
  // Whether the row exists: of another nothing is read, but for what all rows share, written or summed.
  ONEPASS_FUNCTION void set_row(index row, bool exists) {
    set_row(row);
    set_exists(exists, exists);
  }
  // Likewise, and whether any row of its matrix does that this thread has: what all of them share is read for all.
  ONEPASS_FUNCTION void set_exists(bool row, bool any) { exists_ = row, any_exists_ = any; }
  // count: how many of the lane's numbers the row has, from none to all.
  ONEPASS_FUNCTION void set_column(index column, int count) {
    column_ = column;
    count_ = exists_ ? count : 0, shared_count_ = any_exists_ ? count : 0, repeated_count_ = count;
  }

 protected:
  // kLeftOut: dimensions at the end along which it does not change.
  template <int kLeftOut = 0>
  ONEPASS_FUNCTION int64 offset(const view& v) const {
    int64 sum = 0;
#pragma unroll
    for (int d = kMaxDims - Config::kDims; d < kMaxDims - kLeftOut; ++d) sum += widened(digit_[d]) * v.stride[d];
    return sum;
  }
  // Of what is not negative: without a sign, fewer instructions multiply.
  static ONEPASS_FUNCTION int64 widened(index i) {
    if constexpr (sizeof(index) == 4) return static_cast<int64>(static_cast<uint32>(i));
    else return i;
  }
  // Of this lane in a tensor whose rows are not single numbers.
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION auto address(const view& v) const {
    auto* data = static_cast<typename stored<D>::type*>(v.data);
    if constexpr (Repeated) return data + column_;
    else if constexpr (Dense) return data + (row_ * static_cast<index>(a_.columns) + column_);
    else return data + (offset(v) + widened(column_));
  }
  // The lower half of the row's, where all lanes begin as far behind 16 bytes.
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION uint32 row_address(const view& v) const {
    uint32 numbers = 0;
    if constexpr (!Repeated) numbers = static_cast<uint32>(Dense ? row_ * static_cast<index>(a_.columns) : offset(v));
    return static_cast<uint32>(reinterpret_cast<uint64>(v.data)) + numbers * size_of(D);
  }

  const arguments& a_;
  index row_ = 0, column_ = 0, matrix_row_ = 0;
  index digit_[kMaxDims];
  int count_ = 0, shared_count_ = 0, repeated_count_ = 0;
  bool exists_ = true, any_exists_ = true;
};

ONEPASS_END
