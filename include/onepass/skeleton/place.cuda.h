// Where a chain stands on CUDA: a row, and one thread's columns. All that can be known when the kernel is compiled is
// in Config, which src/cuda/source.cc writes:
//   arithmetic        float or double
//   kLanes, kAccess   numbers of a lane; numbers that one access may move (see lane/cuda.h)
//   kX, kOperand[]    storage types
//   kCollapsed        rows have one stride
//   kSingleX, kSingleY, kSingleOperand, kSingleKeptGradient   tensors with one number for a whole row (bits)
//   kWantsColumn, kWantsTensor (bits by operand), kWantsDx
//   kRowInShared      x's row is in shared memory
#pragma once

#include "onepass/lane/cuda.h"
#include "onepass/skeleton/arguments.h"
#include "onepass/stage/chain.h"
#include "onepass/stage/row.h"

ONEPASS_BEGIN

constexpr __device__ int bits_below(uint64 bits, int i) {
  int count = 0;
  for (int k = 0; k < i; ++k) count += static_cast<int>(bits >> k & 1);
  return count;
}

template <class Config>
inline constexpr int kSlots = bits_below(Config::kWantsColumn, kMaxOperands);

// Quiet: gives no gradients to operands (a pass that only sums).
template <class Config, class Line, bool Quiet = false>
class place {
 public:
  using T = typename Config::arithmetic;
  static constexpr int V = Config::kLanes;
  using lane = pack<T, V>;
  using number_of_x = typename stored<Config::kX>::type;

  explicit ONEPASS_FUNCTION place(const arguments& a) : a_(a) {}

  ONEPASS_FUNCTION void set_row(int64 row) {
    row_ = row;
    if constexpr (!Config::kCollapsed) {
#pragma unroll
      for (int d = kMaxDims - 1; d > 0; --d) {
        digit_[d] = row % a_.size[d];
        row /= a_.size[d];
      }
      digit_[0] = row;
    }
  }
  // count: how many of the lane's numbers exist, from none to all.
  ONEPASS_FUNCTION void set_column(int64 column, int count) {
    column_ = column;
    count_ = count;
  }
  ONEPASS_FUNCTION int count() const { return count_; }
  // Where this lane's columns of wanted operand number `slot` are summed: registers, or shared memory that is its own.
  ONEPASS_FUNCTION void set_sums(lane* registers) { sums_ = registers; }
  ONEPASS_FUNCTION void set_sums(T* shared, int64 slot_stride) {
    shared_sums_ = shared;
    slot_stride_ = slot_stride;
  }

  // x's row in shared memory, to read it from there (kRowInShared): a thread brings and reads its own columns only.
  ONEPASS_FUNCTION void set_row_memory(void* shared) { x_row_ = static_cast<number_of_x*>(shared); }
  ONEPASS_FUNCTION void bring_x() const {
    memory<Config::kX, V, Config::kAccess>::copy(
        x_row_ + column_, static_cast<const number_of_x*>(a_.x.data) + offset(a_.x) + column_, count_);
  }
  ONEPASS_FUNCTION lane x() const {
    if constexpr (Config::kRowInShared)
      return memory<Config::kX, V, Config::kAccess>::template load<T>(x_row_ + column_, count_);
    else return read<Config::kX, Config::kSingleX>(a_.x);
  }
  ONEPASS_FUNCTION lane dy() const { return read<Config::kX, Config::kSingleY>(a_.y); }
  ONEPASS_FUNCTION void store_y(lane v) const { write<Config::kX>(a_.y, v); }
  ONEPASS_FUNCTION void store_dx(lane v) const {
    if constexpr (Config::kWantsDx) write<Config::kX>(a_.dx, v);
  }

  // For the chain (see stage/chain.h).
  template <class L, int I>
  ONEPASS_FUNCTION L operand() const {
    return read<Config::kOperand[I], (Config::kSingleOperand >> I & 1) != 0>(a_.operand[I]);
  }
  template <int I>
  ONEPASS_FUNCTION constexpr bool wants() const {
    return wanted<I>();
  }
  template <int I>
  ONEPASS_FUNCTION void tensor_gradient(lane g) const {
    if constexpr (wanted<I>()) write<Config::kOperand[I]>(a_.operand_gradient[I], g);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(lane g) const {
    if constexpr (wanted<I>()) {
      constexpr int slot = bits_below(Config::kWantsColumn, I);
      if constexpr (Config::kSumsInRegisters) {
        sums_[slot] = sums_[slot] + where(first_n<lane>(count_), g, lane(T(0)));
      } else {
        T* at = shared_sums_ + slot * slot_stride_ + column_;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (i < count_) at[i] += g.v[i];
        }
      }
    }
  }
  template <int J>
  ONEPASS_FUNCTION T parameter() const {
    return static_cast<T>(a_.parameter[J]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L random() const {
    return random_pack<T, V>(a_.dropout_state, K, row_, column_, a_.columns);
  }
  template <class L>
  ONEPASS_FUNCTION L column() const {
    return iota<L>(static_cast<T>(column_));
  }
  template <class L>
  ONEPASS_FUNCTION L matrix_row() const {
    return L(static_cast<T>(row_ % a_.matrix_rows));
  }
  template <int K>
  ONEPASS_FUNCTION lane keep(lane v) const {
    write<Config::kX>(a_.kept[K], v);
    return rounded(v);
  }
  ONEPASS_FUNCTION lane rounded(lane v) const { return rounded_to<Config::kX>(v); }
  template <class L, int K>
  ONEPASS_FUNCTION L kept() const {
    return read<Config::kX, false>(a_.kept[K]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L kept_gradient() const {
    return read<Config::kX, (Config::kSingleKeptGradient >> K & 1) != 0>(a_.kept_gradient[K]);
  }

 private:
  template <int I>
  static constexpr __device__ bool wanted() {
    return !Quiet && ((Config::kWantsColumn | Config::kWantsTensor) >> I & 1) != 0;
  }
  ONEPASS_FUNCTION int64 offset(const view& v) const {
    if constexpr (Config::kCollapsed) return row_ * v.stride[kMaxDims - 1];
    int64 sum = 0;
#pragma unroll
    for (int d = 0; d < kMaxDims; ++d) sum += digit_[d] * v.stride[d];
    return sum;
  }
  template <dtype D, bool Single>
  ONEPASS_FUNCTION lane read(const view& v) const {
    using number = typename stored<D>::type;
    const number* row = static_cast<const number*>(v.data) + offset(v);
    if constexpr (Single) return lane(count_ > 0 ? from_storage<D, T>(*row) : T(0));
    else return memory<D, V, Config::kAccess>::template load<T>(row + column_, count_);
  }
  template <dtype D>
  ONEPASS_FUNCTION void write(const view& v, lane value) const {
    using number = typename stored<D>::type;
    number* row = static_cast<number*>(v.data) + offset(v);
    memory<D, V, Config::kAccess>::store(row + column_, value, count_);
  }

  const arguments& a_;
  int64 row_ = 0, column_ = 0;
  int64 digit_[kMaxDims];
  int count_ = 0;
  lane* sums_ = nullptr;
  T* shared_sums_ = nullptr;
  int64 slot_stride_ = 0;
  number_of_x* x_row_ = nullptr;
};

// Writes a lane of one column sum into the block's part, number `part` of `parts`. The block's rows are added in a
// fixed order, in double: there can be hundreds.
template <class Config>
ONEPASS_FUNCTION void write_part(const arguments& a, pack<typename Config::arithmetic, Config::kLanes> sum, int slot,
                                 int64 parts, int64 part, int64 column, int across, int down) {
  using T = typename Config::arithmetic;
  constexpr int V = Config::kLanes, kAcross = Config::kAcross, kDown = Config::kDown;
  double total[V];
#pragma unroll
  for (int i = 0; i < V; ++i) total[i] = static_cast<double>(sum.v[i]);
  if constexpr (kDown > 1) {
    __shared__ T shared[kDown * kAcross * V];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i) shared[(down * V + i) * kAcross + across] = sum.v[i];
    __syncthreads();
    if (down != 0) return;
    for (int d = 1; d < kDown; ++d) {
#pragma unroll
      for (int i = 0; i < V; ++i) total[i] += static_cast<double>(shared[(d * V + i) * kAcross + across]);
    }
  }
  double* to = static_cast<double*>(a.column_partial) + (slot * parts + part) * a.columns;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (column + i < a.columns) to[column + i] = total[i];
  }
}

// How many of the V numbers from `column` on the row has.
template <int V>
ONEPASS_FUNCTION int count_at(int64 column, int64 columns) {
  const int64 left = columns - column;
  return left >= V ? V : left > 0 ? static_cast<int>(left) : 0;
}

ONEPASS_END
