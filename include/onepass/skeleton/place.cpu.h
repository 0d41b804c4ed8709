// Where a chain stands on the CPU: a row, and the columns of one lane. Every tensor's storage type is looked up at
// run time (the branch is the same all along a row), so one instantiation serves all mixtures of dtypes. Another serves
// the calls whose tensors all store T itself, where a look at the type would cost as much as the arithmetic.
#if defined(ONEPASS_SKELETON_PLACE_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_SKELETON_PLACE_CPU_H_
#undef ONEPASS_SKELETON_PLACE_CPU_H_
#else
#define ONEPASS_SKELETON_PLACE_CPU_H_
#endif

#include <hwy/cache_control.h>

#include <new>

#include "onepass/lane/cpu.h"
#include "onepass/lane/math.h"
#include "onepass/lane/random.h"
#include "onepass/skeleton/arguments.h"
#include "onepass/stage/chain.h"
#include "onepass/stage/row.h"

ONEPASS_BEGIN

// One row of a tensor.
struct row_view {
  char* data = nullptr;
  dtype type = dtype::none;
  bool single = false;  // one number stands for the whole row
};

// Uniform: every tensor stores T, none has one number for a whole row.
template <class T, class Line, bool Uniform>
class place {
 public:
  using lane = vec<T>;

  explicit ONEPASS_FUNCTION place(const arguments& a)
      : a_(a), collapsed_(a.size[0] == 1 && a.size[1] == 1 && a.size[2] == 1) {
    for (int i = 0; i < Line::dropouts; ++i) random_[i].reset(a.dropout_state, i, a.columns);
  }

  ONEPASS_FUNCTION void set_row(int64 row) {
    row_ = row;
    int64 digit[kMaxDims] = {0, 0, 0, row};
    if (!collapsed_) {
      for (int d = kMaxDims - 1; d > 0; --d) {
        digit[d] = row % a_.size[d];
        row /= a_.size[d];
      }
      digit[0] = row;
    }
    x_ = row_of(a_.x, digit);
    y_ = row_of(a_.y, digit);
    dx_ = row_of(a_.dx, digit);
    for (int i = 0; i < Line::operands; ++i) {
      operand_[i] = row_of(a_.operand[i], digit);
      operand_gradient_[i] = row_of(a_.operand_gradient[i], digit);
    }
    for (int k = 0; k < Line::keeps; ++k) {
      kept_[k] = row_of(a_.kept[k], digit);
      kept_gradient_[k] = row_of(a_.kept_gradient[k], digit);
    }
    for (int i = 0; i < Line::dropouts; ++i) random_[i].set_row(row_);
    stream_y_ = a_.stream_stores && can_stream<lane>(y_.data, y_.type);
    stream_dx_ = a_.stream_stores && dx_.data && can_stream<lane>(dx_.data, dx_.type);
  }

  // count: how many of the lane's numbers exist; fewer than a whole lane only at the end of the row.
  ONEPASS_FUNCTION void set_column(int64 column, int count) {
    column_ = column;
    count_ = count;
  }
  ONEPASS_FUNCTION int count() const { return count_; }

  ONEPASS_FUNCTION lane x() const { return read(x_); }
  ONEPASS_FUNCTION lane dy() const { return read(y_); }
  ONEPASS_FUNCTION void store_y(lane v) const { write(y_, v, stream_y_); }
  ONEPASS_FUNCTION void store_dx(lane v) const {
    if (dx_.data) write(dx_, v, stream_dx_);
  }

  // For the chain (see stage/chain.h).
  template <class L, int I>
  ONEPASS_FUNCTION L operand() const {
    return read(operand_[I]);
  }
  template <int I>
  ONEPASS_FUNCTION bool wants() const {
    return operand_gradient_[I].data || (a_.wants_column >> I & 1);
  }
  template <int I>
  ONEPASS_FUNCTION void tensor_gradient(lane g) const {
    write(operand_gradient_[I], g, false);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(lane g) const {
    T* at = column_sum_[I] + column_;  // padded to whole lanes
    store_lane(load_lane<lane>(at) + g, at);
  }
  template <int J>
  ONEPASS_FUNCTION T parameter() const {
    return static_cast<T>(a_.parameter[J]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L random() {
    return random_[K].template next<L>(column_);
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
    write(kept_[K], v, false);
    return rounded(v);
  }
  ONEPASS_FUNCTION lane rounded(lane v) const { return Uniform ? v : onepass::ONEPASS_TARGET::rounded(v, y_.type); }
  template <class L, int K>
  ONEPASS_FUNCTION L kept() const {
    return read(kept_[K]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L kept_gradient() const {
    return read(kept_gradient_[K]);
  }

  // Backward's running column sums, one array of columns (rounded up to whole lanes) for each wanted operand.
  ONEPASS_FUNCTION void set_column_sums(T* sums, int64 stride) {
    for (int i = 0, slot = 0; i < Line::operands; ++i) {
      if (a_.wants_column >> i & 1) column_sum_[i] = sums + stride * slot++;
    }
  }

 private:
  static ONEPASS_FUNCTION row_view row_of(const view& v, const int64* digit) {
    if (!v.data) return {};
    int64 offset = 0;
    for (int d = 0; d < kMaxDims; ++d) offset += digit[d] * v.stride[d];
    return {static_cast<char*>(v.data) + offset * size_of(v.type), v.type, v.column_stride == 0};
  }
  ONEPASS_FUNCTION bool whole() const { return HWY_LIKELY(count_ == lanes<lane>()); }
  ONEPASS_FUNCTION lane read(const row_view& v) const {
    if constexpr (Uniform) {
      if (whole()) return load_lane<lane>(reinterpret_cast<const T*>(v.data) + column_);
      return load_partial<lane>(v.data, kOwn, column_, count_);
    } else {
      if (HWY_UNLIKELY(v.single)) return broadcast<lane>(v.data, v.type);
      if (whole()) return load<lane>(v.data, v.type, column_);
      return load_partial<lane>(v.data, v.type, column_, count_);
    }
  }
  ONEPASS_FUNCTION void write(const row_view& v, lane value, bool past_caches) const {
    const dtype type = Uniform ? kOwn : v.type;
    if (!whole()) store_partial(v.data, type, column_, value, count_);
    else if (past_caches) stream(v.data, type, column_, value);
    else store(v.data, type, column_, value);
  }

  static constexpr dtype kOwn = sizeof(T) == 8 ? dtype::f64 : dtype::f32;
  const arguments& a_;
  const bool collapsed_;
  bool stream_y_ = false, stream_dx_ = false;
  int count_ = 0;
  int64 row_ = 0, column_ = 0;
  row_view x_, y_, dx_;
  row_view operand_[larger(1, Line::operands)], operand_gradient_[larger(1, Line::operands)];
  row_view kept_[larger(1, Line::keeps)], kept_gradient_[larger(1, Line::keeps)];
  T* column_sum_[larger(1, Line::operands)] = {};
  random_source random_[larger(1, Line::dropouts)];
};

// Memory for one task, aligned for whole lanes.
template <class T>
class scratch {
 public:
  explicit scratch(int64 size)
      : data_(static_cast<T*>(::operator new(static_cast<std::size_t>(size) * sizeof(T), std::align_val_t(64)))) {}
  ~scratch() { ::operator delete(data_, std::align_val_t(64)); }
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ONEPASS_FUNCTION T* data() const { return data_; }

 private:
  T* data_;
};

template <class L>
ONEPASS_FUNCTION int64 whole_lanes(int64 columns) {
  return (columns + lanes<L>() - 1) / lanes<L>() * lanes<L>();
}

// Calls body(column, count) for each lane of columns [begin, end).
template <class L, class Body>
ONEPASS_FUNCTION void for_columns(int64 begin, int64 end, const Body& body) {
  constexpr int kLanes = lanes<L>();
  int64 c = begin;
  for (; c + kLanes <= end; c += kLanes) body(c, kLanes);
  if (c < end) body(c, static_cast<int>(end - c));
}

// The running column sums of one task over columns [begin, end): short sums in level-one cache, added to the task's
// part, which is double, every kRows rows: the error does not grow with the rows.
template <class T>
class column_sums {
 public:
  static constexpr int kRows = 32;

  template <class Place>
  ONEPASS_FUNCTION column_sums(const arguments& a, int64 begin, int64 end, Place& at)
      : slots_(static_cast<int>(hwy::PopCount(a.wants_column))),
        begin_(begin),
        end_(end),
        stride_(whole_lanes<vec<T>>(end - begin)),
        slot_stride_((a.rows + a.task_rows - 1) / a.task_rows * a.columns),
        running_(stride_ * slots_ + 1) {
    for (int64 i = 0; i < stride_ * slots_; ++i) running_.data()[i] = 0;
    at.set_column_sums(running_.data() - begin, stride_);
  }
  // The part that a row block writes; zeroed here, so that every part is whole.
  ONEPASS_FUNCTION void start(const arguments& a, int64 part) {
    part_ = static_cast<double*>(a.column_partial) + part * a.columns;
    for (int s = 0; s < slots_; ++s) {
      for (int64 c = begin_; c < end_; ++c) part_[s * slot_stride_ + c] = 0;
    }
  }
  ONEPASS_FUNCTION void end_row() {
    if (slots_ != 0 && ++rows_ == kRows) flush();
  }
  ONEPASS_FUNCTION void flush() {
    rows_ = 0;
    for (int s = 0; s < slots_; ++s) {
      T* from = running_.data() + s * stride_;
      double* to = part_ + s * slot_stride_ + begin_;
      for (int64 c = 0; c < end_ - begin_; ++c) {
        to[c] += static_cast<double>(from[c]);
        from[c] = 0;
      }
    }
  }

 private:
  int slots_, rows_ = 0;
  int64 begin_, end_, stride_, slot_stride_;
  double* part_ = nullptr;
  scratch<T> running_;
};

ONEPASS_END
#endif
