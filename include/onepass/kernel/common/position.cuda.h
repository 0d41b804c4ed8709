// Where a CUDA thread is: addresses of the current row and vector in a call's tensors, and the row's numbers that are
// no part of a vector.
#pragma once

#include "onepass/kernel/configuration.h"
#include "onepass/lane/device/memory.cuda.h"
#include "onepass/word/chain.h"
#include "onepass/word/row.h"

ONEPASS_BEGIN

// How many of the V elements from `column` on are within the row.
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
      const index rest = quotient(row, d);
      digit_[d] = row - rest * static_cast<index>(a_.size[d]);
      row = rest;
    }
    digit_[kMaxDims - Config::kDims] = row;
  }
  // Rows further within a matrix.
  ONEPASS_FUNCTION void skip_rows(index rows) {
    row_ += rows, matrix_row_ += rows;
    digit_[kMaxDims - 1] += rows;
  }
  // exists: nothing of a row that does not is read (but what all rows share), written or summed.
  ONEPASS_FUNCTION void set_row(index row, bool exists) {
    set_row(row);
    set_exists(exists, exists);
  }
  // Likewise, and whether any row of its matrix does that this thread has: what all of them share is read for all.
  ONEPASS_FUNCTION void set_exists(bool row, bool any) { exists_ = row, any_exists_ = any; }
  // count: elements of the vector that are within the row.
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
  // For values that are not negative: unsigned multiplication takes fewer instructions.
  static ONEPASS_FUNCTION int64 widened(index i) {
    if constexpr (sizeof(index) == 4) return static_cast<int64>(static_cast<uint32>(i));
    else return i;
  }
  // Of this vector in a tensor whose rows are not single numbers.
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION auto address(const view& v) const {
    return address<D, Dense, Repeated>(v, column_);
  }
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION auto address(const view& v, index column) const {
    auto* data = static_cast<typename stored<D>::type*>(v.data);
    if constexpr (Repeated) return data + column;
    else if constexpr (Dense) return data + (row_ * static_cast<index>(a_.columns) + column);
    else return data + (offset(v) + widened(column));
  }
  // The lower half of the row's, where all vectors begin as far behind 16 bytes.
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION uint32 row_address(const view& v) const {
    uint32 numbers = 0;
    if constexpr (!Repeated) numbers = static_cast<uint32>(Dense ? row_ * static_cast<index>(a_.columns) : offset(v));
    return static_cast<uint32>(reinterpret_cast<uint64>(v.data)) + numbers * size_of(D);
  }

  ONEPASS_FUNCTION index quotient(index row, int d) const {
    if constexpr (sizeof(index) == 4) return static_cast<index>(a_.by_size[d].quotient_of(static_cast<uint32>(row)));
    else return row / static_cast<index>(a_.size[d]);
  }

  const arguments& a_;
  index row_ = 0, column_ = 0, matrix_row_ = 0;
  index digit_[kMaxDims];
  int count_ = 0, shared_count_ = 0, repeated_count_ = 0;
  bool exists_ = true, any_exists_ = true;
};

// The number of a row that an ending gives, or its gradient; K: of a kept value, -1: the result.
template <class Config, int K, bool Gradient>
class row_number : position<Config> {
 public:
  using T = typename Config::arithmetic;
  ONEPASS_FUNCTION row_number(const arguments& a, typename Config::index row) : position<Config>(a) {
    this->set_row(row);
  }
  ONEPASS_FUNCTION T& operator*() const {
    const view& v = K < 0      ? this->a_.y
                    : Gradient ? this->a_.kept_gradient[K < 0 ? 0 : K]
                               : this->a_.kept[K < 0 ? 0 : K];
    return static_cast<T*>(v.data)[this->offset(v)];
  }
};

// The row's target, a column of it; of a row past the last one, as of an ignored one, none. A column that is not there
// ends forward's kernel as PyTorch's does: "device-side assert triggered"; for backward it is none of the row's.
template <class Config, class Row, bool Backward>
class row_target : position<Config> {
 public:
  ONEPASS_FUNCTION row_target(const arguments& a, int64 row) : position<Config>(a), row_(row) {
    if (row < a.rows) this->set_row(static_cast<typename Config::index>(row));
  }
  // parameter: the word's first number.
  ONEPASS_FUNCTION word::target of(int parameter) const {
    constexpr int I = target_operand<Row>;
    const arguments& a = this->a_;
    const auto ignored = static_cast<int64>(a.parameter[parameter + ignore_number<Row>]);
    int64 column = ignored;
    using integer = typename stored<Config::kOperand[I]>::type;
    if (row_ < a.rows) column = static_cast<const integer*>(a.operand[I].data)[this->offset(a.operand[I])];
    if constexpr (!Backward) {
      if (column != ignored && (column < 0 || column >= a.columns))  // what assert() calls, which NVRTC knows
        __assertfail("0 <= target < columns", Row::about.name, 0, "onepass", sizeof(char));
    }
    return {column == ignored ? -1 : column};
  }

 private:
  const int64 row_;
};

ONEPASS_END
