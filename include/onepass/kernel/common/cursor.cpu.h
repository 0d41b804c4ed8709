// The cursor of a CPU task: its row, and the columns of one lane. Every tensor's storage type is looked up at
// run time (the branch is the same all along a row), so one instantiation serves all mixtures of dtypes. Others serve
// the calls whose tensors all store one type, where a look at it would cost as much as the arithmetic.
#if defined(ONEPASS_KERNEL_COMMON_CURSOR_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_COMMON_CURSOR_CPU_H_
#undef ONEPASS_KERNEL_COMMON_CURSOR_CPU_H_
#else
#define ONEPASS_KERNEL_COMMON_CURSOR_CPU_H_
#endif

#include "onepass/lane/cpu.h"
#include "onepass/lane/functions.h"
#include "onepass/lane/random.h"
#include "onepass/kernel/arguments.h"
#include "onepass/kernel/common/column_order.h"
#include "onepass/word/chain.h"
#include "onepass/word/row.h"

ONEPASS_BEGIN

// body(0), ..., body(N - 1) with indices that the compiler knows: a cursor then lives in registers.
template <int N, class Body>
ONEPASS_FUNCTION void each_index(const Body& body) {
  if constexpr (N > 0) {
    each_index<N - 1>(body);
    body(N - 1);
  }
}

// One row of a tensor.
struct row_view {
  char* data = nullptr;
  dtype type = dtype::none;
  bool single = false;  // one number stands for the whole row
};

// The lanes of a kernel whose tensors all store one type.
template <class T, dtype Stored>
struct lane_chooser {
  using type = vec<T>;
};
template <>
struct lane_chooser<float, dtype::bf16> {
  using type = short_lane;
};
// Numbers that endings give, and scales, are no results of 16 bits.
template <class T, class Line, dtype Stored>
using lane_of =
    typename lane_chooser<T, gives_number<typename Line::row> || Line::by_groups ? dtype::none : Stored>::type;

// Of magnitudes; a NaN is the largest of all.
template <class L>
ONEPASS_FUNCTION L larger_magnitude(L a, L b) {
  return where(a < b, b, L(where(b == b, a, b)));
}
template <class L>
ONEPASS_FUNCTION typename L::scalar largest_magnitude_of(L magnitudes) {
  HWY_ALIGN typename L::scalar each[lanes<L>()];
  store_lane(magnitudes, each);
  typename L::scalar most = each[0];
  for (const typename L::scalar value : each) most = value > most || value != value ? value : most;
  return most;
}

// A group of columns, until its scale is known. Grouped: the word that gives the codes, placed.
template <class L, class Grouped>
struct held_group {
  HWY_ALIGN typename L::scalar values_of_group[Grouped::what::kColumns];
  L largest_of_group;
};
template <class L>
struct held_group<L, void> {};

// A lane whose columns are not to be had at once: the first `count` from `place` on, in the line's order. ForTwo: one
// element stands for two columns.
template <class L, class Line, bool ForTwo = false>
HWY_NOINLINE L gather(const row_view& v, const arguments& a, int64 place, int count) {
  HWY_ALIGN typename L::scalar numbers[lanes<L>()] = {};
  for (int i = 0; i < count; ++i) {
    const int64 column = ForTwo ? (place + i) / 2 : column_order<Line>::column_at(a, place + i);
    numbers[i] = hn::GetLane(broadcast<L>(v.data + column * size_of(v.type), v.type).raw);
  }
  return load_lane<L>(numbers);
}
// A lane whose columns are of several channels.
template <class L>
HWY_NOINLINE L numbers_of_channels(const char* data, dtype type, int64 columns, int64 column, int count) {
  HWY_ALIGN typename L::scalar numbers[lanes<L>()] = {};
  for (int i = 0; i < count; ++i)
    numbers[i] = hn::GetLane(broadcast<L>(data + (column + i) / columns * size_of(type), type).raw);
  return load_lane<L>(numbers);
}
template <class L, class Line>
HWY_NOINLINE void scatter(L value, const row_view& v, const arguments& a, int64 place, int count) {
  using T = typename L::scalar;
  HWY_ALIGN T numbers[lanes<L>()];
  store_lane(value, numbers);
  for (int i = 0; i < count; ++i)
    store_partial(v.data, v.type, column_order<Line>::column_at(a, place + i), vec<T>(numbers[i]), 1);
}

// Stored: what every tensor stores, none of them with one number for a whole row; dtype::none: looked up.
template <class T, class Line, dtype Stored>
class cursor : held_group<lane_of<T, Line, Stored>, typename Line::grouped> {
 public:
  using lane = lane_of<T, Line, Stored>;
  using order = column_order<Line>;
  static constexpr bool kUniform = Stored != dtype::none;

  // Beside the cursor: they fill their blocks out of line.
  struct random_sources {
    random_source of[larger(1, Line::dropouts)];
  };

  // quiet: gives no gradients to operands (a second look at a row).
  ONEPASS_FUNCTION cursor(const arguments& a, random_sources& random, bool quiet = false)
      : a_(a), collapsed_(a.size[0] == 1 && a.size[1] == 1 && a.size[2] == 1), random_(random) {
    each_index<Line::dropouts>([&](int i) ONEPASS_LAMBDA { random.of[i].reset(a.dropout_state, i, a.columns); });
    each_index<Line::operands>(
        [&](int i) ONEPASS_LAMBDA { wants_[i] = !quiet && (a.operand_gradient[i].data || (a.wants_column >> i & 1)); });
    each_index<kMaxParameters>([&](int i) ONEPASS_LAMBDA { parameter_[i] = static_cast<T>(a.parameter[i]); });
  }

  ONEPASS_FUNCTION void set_row(int64 row) {
    row_ = row;
    int64 digit[kMaxDims] = {0, 0, 0, row};
    matrix_row_ = row % a_.matrix_rows;  // nothing reads it but `causal`: elsewhere the compiler drops it
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
    each_index<Line::operands>([&](int i) ONEPASS_LAMBDA {
      operand_[i] = row_of(a_.operand[i], digit);
      operand_gradient_[i] = row_of(a_.operand_gradient[i], digit);
    });
    each_index<Line::keeps>([&](int k) ONEPASS_LAMBDA {
      kept_[k] = row_of(a_.kept[k], digit);
      kept_gradient_[k] = row_of(a_.kept_gradient[k], digit);
    });
    each_index<Line::dropouts>([&](int i) ONEPASS_LAMBDA { random_.of[i].set_row(a_.first_row + row_); });
    stream_y_ = a_.stream_stores && can_stream_to(y_);
    stream_dx_ = a_.stream_stores && dx_.data && can_stream_to(dx_);
  }

  // count: how many of the lane's numbers exist; fewer than a whole lane only at the end of the row.
  ONEPASS_FUNCTION void set_column(int64 column, int count) {
    column_ = column;
    count_ = count;
  }
  ONEPASS_FUNCTION int count() const { return count_; }

  ONEPASS_FUNCTION lane x() const { return read(x_); }
  ONEPASS_FUNCTION lane dy() const {
    if constexpr (Line::features > 0 || Line::gives_number) return lane(T(0));
    else return read(y_);
  }
  // The row's number that an ending gives, or its gradient; K: of a kept value, -1: the result.
  template <int K>
  ONEPASS_FUNCTION void store_number(T number) const {
    *number_at<K>() = number;
  }
  template <int K>
  ONEPASS_FUNCTION T number_gradient() const {
    return *number_at<K, true>();
  }
  ONEPASS_FUNCTION void store_y(lane v) {
    if constexpr (Line::by_groups) store_in_groups(v);
    else if constexpr (Line::gives_codes) write_codes(v);
    else write(y_, v, stream_y_);
  }
  ONEPASS_FUNCTION void store_dx(lane v) const {
    if (dx_.data) write(dx_, v, stream_dx_);
  }

  // For the chain (see word/chain.h).
  template <class L, int I>
  ONEPASS_FUNCTION L operand() const {
    return read(operand_[I]);
  }
  template <int I>
  ONEPASS_FUNCTION bool wants() const {
    return wants_[I];
  }
  // Whether it is a sum over rows is the call's to say, whatever the word's operand is.
  template <int I>
  ONEPASS_FUNCTION void tensor_gradient(lane g) const {
    if (column_sum_[I]) add_to_column<I>(g);
    else write(operand_gradient_[I], g, false);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(lane g) const {
    tensor_gradient<I>(g);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(lane dy, lane x) const {
    if (HWY_UNLIKELY(!column_sum_[I])) return write(operand_gradient_[I], dy * x, false);
    T* at = column_sum_[I] + place_of_sum<I>();
    store_lane(fma(dy, x, load_lane<lane>(at)), at);
  }
  ONEPASS_FUNCTION T row_length() const { return static_cast<T>(a_.columns); }
  ONEPASS_FUNCTION const double* numbers() const { return a_.parameter; }
  template <int J>
  ONEPASS_FUNCTION T parameter() const {
    return parameter_[J];
  }
  // Of a word by channels, whose columns are neighbours.
  template <class L, int I>
  ONEPASS_FUNCTION L channel() {
    const row_view& v = operand_[I];
    if (v.single) return broadcast<lane>(v.data, v.type);
    const int64 columns = a_.operand[I].column_stride;
    channel_at& at = channels_at_[I];
    if (HWY_UNLIKELY(column_ < at.begin || column_ >= at.begin + columns)) {
      at.number = column_ / columns;
      at.begin = at.number * columns;
    }
    if (HWY_UNLIKELY(column_ + count_ > at.begin + columns))
      return numbers_of_channels<lane>(v.data, type_of(v), columns, column_, count_);
    return broadcast<lane>(v.data + at.number * size_of(type_of(v)), type_of(v));
  }
  // Of `rope`: an element for each column that it turns, or for each two.
  template <class L, int I>
  ONEPASS_FUNCTION L table() const {
    const row_view& v = operand_[I];
    const int count = turned();
    const bool is_whole = HWY_LIKELY(count == lanes<lane>());
    if (a_.operand[I].column_stride != kOneForTwo) {
      if constexpr (order::kZips) return read_zipped(v, count);
      if (is_whole || v.single) return read(v);
      return gather<lane, Line>(v, a_, column_, count);
    }
    if (!is_whole) return gather<lane, Line, true>(v, a_, column_, count);
    const auto of_pairs = load<half_lane<lane>>(v.data, type_of(v), column_ / 2);
    return zip<lane>(of_pairs, of_pairs);
  }
  ONEPASS_FUNCTION int turned() const {
    if constexpr (Line::turned_parameter < 0) return count_;
    const int64 left = order::template turned<int64>(a_) - column_;
    return left < 0 ? 0 : left < count_ ? static_cast<int>(left) : count_;
  }
  template <class L, int K>
  ONEPASS_FUNCTION typename L::mask keeps(int threshold) {
    if constexpr (!order::kZips) return random_.of[K].template next<L>(column_) >= L(static_cast<T>(threshold));
    else
      return zipped([&]<class Some>(int64 column) ONEPASS_LAMBDA {
               return random_.of[K].template next<Some>(column);
             }) >= L(static_cast<T>(threshold));
  }
  template <class L>
  ONEPASS_FUNCTION L column() const {
    if constexpr (!order::kZips) return iota<L>(static_cast<T>(column_));
    else return zipped([]<class Some>(int64 column) ONEPASS_LAMBDA { return iota<Some>(static_cast<T>(column)); });
  }
  ONEPASS_FUNCTION lane plus_at(lane v, int64 column, T number) const {
    const int64 in = column - column_;
    if (HWY_LIKELY(in < 0 || in >= lanes<lane>())) return v;
    const int i = static_cast<int>(in);
    return where(first_n<lane>(i), v, lane(where(first_n<lane>(i + 1), v + lane(number), v)));
  }
  template <class L>
  ONEPASS_FUNCTION L matrix_row() const {
    return L(static_cast<T>(matrix_row_));
  }
  template <int K>
  ONEPASS_FUNCTION lane keep(lane v) const {
    write(kept_[K], v, false);
    return as_kept<K>(v);
  }
  template <int K>
  ONEPASS_FUNCTION lane as_kept(lane v) const {
    return onepass::ONEPASS_TARGET::rounded(v, kUniform ? Stored : a_.kept[K].type);
  }
  ONEPASS_FUNCTION lane rounded(lane v) const { return onepass::ONEPASS_TARGET::rounded(v, stored_type()); }
  template <class L, int K>
  ONEPASS_FUNCTION L kept() const {
    return read(kept_[K]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L kept_gradient() const {
    return read(kept_gradient_[K]);
  }
  // The row's features, which begin at nothing and end in y; or, in backward, their gradients from there.
  ONEPASS_FUNCTION void clear_features() {
    each_index<Line::features>([&](int j) ONEPASS_LAMBDA { feature_[j] = lane(T(0)); });
  }
  template <int J>
  ONEPASS_FUNCTION void contract(lane x, lane w) {
    const lane sum = fma(x, w, feature_[J]);
    feature_[J] = whole() ? sum : lane(where(first_n<lane>(count_), sum, feature_[J]));
  }
  ONEPASS_FUNCTION void store_features() const {
    each_index<Line::features>(
        [&](int j) ONEPASS_LAMBDA { store_partial(y_.data, type_of(y_), j, vec<T>(sum_lanes(feature_[j])), 1); });
  }
  ONEPASS_FUNCTION void load_feature_gradients() {
    each_index<Line::features>(
        [&](int j) ONEPASS_LAMBDA { feature_[j] = broadcast<lane>(y_.data + j * size_of(type_of(y_)), type_of(y_)); });
  }
  template <int J>
  ONEPASS_FUNCTION lane feature_gradient() const {
    return feature_[J];
  }

  // x's dtype.
  ONEPASS_FUNCTION dtype stored_type() const {
    if constexpr (kUniform) return Stored;
    else return Line::gives_number || Line::gives_codes ? a_.x.type : a_.y.type;
  }

  // Backward's running column sums, one array of columns (rounded up to whole lanes) for each wanted operand.
  ONEPASS_FUNCTION void set_column_sums(T* sums, int64 stride) {
    int slot = 0;
    each_index<Line::operands>([&](int i) ONEPASS_LAMBDA {
      if (a_.wants_column >> i & 1) column_sum_[i] = sums + stride * slot++;
    });
  }

 private:
  // Lanes come one behind the other, and rows and tasks are whole groups: the group's last one finds its scale.
  ONEPASS_FUNCTION void store_in_groups(lane v) {
    using codes = typename Line::grouped::what;
    constexpr int kColumns = codes::kColumns, kLanes = lanes<lane>();
    static_assert(kColumns % kLanes == 0);
    const auto in = static_cast<int>(column_ % kColumns);
    store_lane(v, this->values_of_group + in);
    const lane magnitude = abs(v);
    this->largest_of_group = in == 0 ? magnitude : larger_magnitude(this->largest_of_group, magnitude);
    if (in + kLanes < kColumns) return;
    const T scale = codes::scale(largest_magnitude_of(this->largest_of_group));
    reinterpret_cast<T*>(kept_[Line::grouped::ordinal].data)[column_ / kColumns] = scale;
    for (int i = 0; i < kColumns; i += kLanes)
      store_codes(y_.data, y_.type, column_ - in + i, codes::codes(load_lane<lane>(this->values_of_group + i), scale),
                  kLanes);
  }
  // Of channels all of a unit's lanes are added to one.
  template <int I>
  ONEPASS_FUNCTION int64 place_of_sum() const {
    if constexpr ((Line::channels >> I & 1) != 0)
      if (unit_ > 0) return (column_ >> unit_) * lanes<lane>();
    return column_;
  }
  template <int I>
  ONEPASS_FUNCTION void add_to_column(lane g) const {
    T* at = column_sum_[I] + place_of_sum<I>();  // padded to whole lanes
    store_lane(load_lane<lane>(at) + g, at);
  }

  template <int K, bool Gradient = false>
  ONEPASS_FUNCTION T* number_at() const {
    if constexpr (K < 0) return reinterpret_cast<T*>(y_.data);
    else return reinterpret_cast<T*>(Gradient ? kept_gradient_[K].data : kept_[K].data);
  }
  static constexpr bool kStoresT = Stored == (sizeof(T) == 8 ? dtype::f64 : dtype::f32);
  struct channel_at {
    int64 begin = 0, number = 0;
  };

  static ONEPASS_FUNCTION row_view row_of(const view& v, const int64* digit) {
    if (!v.data) return {};
    int64 offset = 0;
    each_index<kMaxDims>([&](int d) ONEPASS_LAMBDA { offset += digit[d] * v.stride[d]; });
    return {static_cast<char*>(v.data) + offset * size_of(v.type), v.type, v.column_stride == 0};
  }
  ONEPASS_FUNCTION bool whole() const { return HWY_LIKELY(count_ == lanes<lane>()); }
  static ONEPASS_FUNCTION dtype type_of(const row_view& v) { return kUniform ? Stored : v.type; }
  ONEPASS_FUNCTION bool can_stream_to(const row_view& v) const {
    using half = half_lane<lane>;
    if constexpr (!order::kZips) return can_stream<lane>(v.data, v.type);
    else
      return Line::turned_parameter < 0 && can_stream<half>(v.data, v.type) &&
             can_stream<half>(v.data + a_.columns / 2 * size_of(v.type), v.type);
  }
  // In lines that zip columns: whether the lane is whole, and on one side of where what is turned ends.
  ONEPASS_FUNCTION bool is_together(int count) const {
    const auto end = order::template turned<int64>(a_);
    return HWY_LIKELY(count == lanes<lane>() && (column_ >= end || column_ + count <= end));
  }
  // body<Some>(column): Some's elements from a column on, which are taken for the lane's.
  template <class Body>
  ONEPASS_FUNCTION lane zipped(const Body& body) const {
    if (is_together(count_)) {
      using half = half_lane<lane>;
      const auto pair = order::pair_at(a_, column_);
      return zip<lane>(body.template operator()<half>(pair.first),
                       body.template operator()<half>(pair.first + pair.apart));
    } else {
      HWY_ALIGN T numbers[lanes<lane>()] = {};
      for (int i = 0; i < count_; ++i)
        numbers[i] = hn::GetLane(body.template operator()<lane>(order::column_at(a_, column_ + i)).raw);
      return load_lane<lane>(numbers);
    }
  }
  ONEPASS_FUNCTION lane read(const row_view& v) const {
    if constexpr (order::kZips) {
      return read_zipped(v, count_);
    } else if constexpr (kStoresT) {
      const T* at = reinterpret_cast<const T*>(v.data) + column_;
      return whole() ? load_lane<lane>(at) : load_first<lane>(at, count_);
    } else {
      if (!kUniform && HWY_UNLIKELY(v.single)) return broadcast<lane>(v.data, v.type);
      if (whole()) return load<lane>(v.data, type_of(v), column_);
      return load_partial<lane>(v.data, type_of(v), column_, count_);
    }
  }
  // The lane's first `count` elements.
  ONEPASS_FUNCTION lane read_zipped(const row_view& v, int count) const {
    if (!kUniform && HWY_UNLIKELY(v.single)) return broadcast<lane>(v.data, v.type);
    if (!is_together(count)) return gather<lane, Line>(v, a_, column_, count);
    const auto pair = order::pair_at(a_, column_);
    return zip<lane>(load<half_lane<lane>>(v.data, type_of(v), pair.first),
                     load<half_lane<lane>>(v.data, type_of(v), pair.first + pair.apart));
  }
  ONEPASS_FUNCTION void write_codes(lane value) const {
    if constexpr (!order::kZips) {
      store_codes(y_.data, y_.type, column_, value, count_);
    } else {
      constexpr int kLanes = lanes<lane>();
      HWY_ALIGN char codes[kLanes];
      store_codes(codes, y_.type, 0, value, count_);
      char* row = static_cast<char*>(y_.data);
      if (is_together(count_)) {
        const auto pair = order::pair_at(a_, column_);
        for (int i = 0; i < kLanes / 2; ++i)
          row[pair.first + i] = codes[2 * i], row[pair.first + pair.apart + i] = codes[2 * i + 1];
      } else {
        for (int i = 0; i < count_; ++i) row[order::column_at(a_, column_ + i)] = codes[i];
      }
    }
  }
  ONEPASS_FUNCTION void write(const row_view& v, lane value, bool past_caches) const {
    if constexpr (order::kZips) {
      if (!is_together(count_)) return scatter<lane, Line>(value, v, a_, column_, count_);
      const auto pair = order::pair_at(a_, column_);
      const auto of = unzip(value);
      if (past_caches) {
        stream(v.data, type_of(v), pair.first, of.first);
        stream(v.data, type_of(v), pair.first + pair.apart, of.second);
      } else {
        store(v.data, type_of(v), pair.first, of.first);
        store(v.data, type_of(v), pair.first + pair.apart, of.second);
      }
    } else if constexpr (kStoresT) {
      T* at = reinterpret_cast<T*>(v.data) + column_;
      if (!whole()) store_first(value, at, count_);
      else if (past_caches) stream_lane(value, at);
      else store_lane(value, at);
    } else {
      if (!whole()) store_partial(v.data, type_of(v), column_, value, count_);
      else if (past_caches) stream(v.data, type_of(v), column_, value);
      else store(v.data, type_of(v), column_, value);
    }
  }

  const arguments& a_;
  const bool collapsed_;
  const int unit_ = a_.unit > 1 ? __builtin_ctz(static_cast<unsigned>(a_.unit)) : 0;  // its logarithm
  bool stream_y_ = false, stream_dx_ = false;
  int count_ = 0;
  int64 row_ = 0, column_ = 0, matrix_row_ = 0;
  row_view x_, y_, dx_;
  row_view operand_[larger(1, Line::operands)], operand_gradient_[larger(1, Line::operands)];
  row_view kept_[larger(1, Line::keeps)], kept_gradient_[larger(1, Line::keeps)];
  bool wants_[larger(1, Line::operands)] = {};
  T parameter_[kMaxParameters] = {};
  T* column_sum_[larger(1, Line::operands)] = {};
  lane feature_[larger(1, Line::features)];
  channel_at channels_at_[Line::channels != 0 ? Line::operands : 1];
  random_sources& random_;
};

ONEPASS_END
#endif
