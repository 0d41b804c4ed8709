// The cursor of a CUDA thread: its row and its columns. It loads operands and stores results and gradients for the
// chain. All that can be known when a kernel is compiled is in Config (kernel/configuration.h).
#pragma once

#include "onepass/kernel/configuration.h"
#include "onepass/kernel/common/position.cuda.h"
#include "onepass/kernel/common/reduce.cuda.h"
#include "onepass/kernel/common/shapes.h"
#include "onepass/lane/device/memory.cuda.h"
#include "onepass/lane/functions.h"
#include "onepass/lane/target.h"
#include "onepass/word/chain.h"
#include "onepass/word/row.h"
#include "onepass/kernel/common/column_order.h"

ONEPASS_BEGIN

// Sets of a call's tensors on CUDA, as bits.

constexpr __device__ int bits_below(uint64 bits, int i) {
  int count = 0;
  for (int k = 0; k < i; ++k) count += static_cast<int>(bits >> k & 1);
  return count;
}

// Whether a tensor is in a set (bits), and how many of the set are before it.
constexpr bool is_in(uint64 tensors, stream s) { return (tensors & bit_of(s)) != 0; }
constexpr int place_in(uint64 tensors, stream s) { return bits_below(tensors, static_cast<int>(s)); }

template <class Config>
inline constexpr int kSlots = bits_below(Config::kWantsColumn, kMaxOperands);

// Quiet: gives no gradients to operands (a pass that only sums).
template <class Config, class Line, bool Quiet = false>
class cursor : public position<Config> {
 public:
  using T = typename Config::arithmetic;
  static constexpr int V = Config::kVectorSize;
  using vector = pack<T, V>;
  using index = typename Config::index;
  using order = column_order<Line>;

  // Runs of columns that make a vector: of a line with `rope` two, each moved by one access.
  static constexpr int kRuns = Line::turns == turning::none ? 1 : 2, kRun = V / kRuns;
  using run_of_columns = pack<T, kRun>;

  explicit ONEPASS_FUNCTION cursor(const arguments& a) : position<Config>(a) {
    if constexpr (Line::dropouts > 0) random_ = load_random_state(a.dropout_state);
  }

  // Where this vector's columns of wanted operand number `slot` are summed: registers, or shared memory that is its
  // own.
  ONEPASS_FUNCTION void set_sums(vector* registers) { sums_ = registers; }
  ONEPASS_FUNCTION void set_sums(T* shared, int64 slot_stride) {
    shared_sums_ = shared;
    slot_stride_ = slot_stride;
  }

  // Runs of vectors in shared memory: rows of a block, vectors of the row, in the order of its columns. Where accesses
  // are smaller than vectors, a vector's numbers are in two windows of 16 bytes, and a run has more than it has
  // vectors.
  static constexpr bool kInWindows = Config::kAccess < kRun;
  static constexpr bool kWholeLanes = Config::kAccess == V && !Config::kRagged;  // or none, of a row's end
  static constexpr int kVectorBytes = V * size_of(Config::kX);
  static constexpr int kRunVectors = Config::kAcross * (Config::kHeldVectors > 0 ? Config::kHeldVectors : 1);
  static constexpr int kRunBytes = row_bytes(1, kRunVectors, Config::kSpareVectors, kVectorBytes);
  static ONEPASS_FUNCTION char* vector_in_run(char* shared, int run) {
    return shared + (run * kRunBytes + static_cast<int>(threadIdx.x) % Config::kAcross * kVectorBytes / kRuns);
  }
  // From the vector's first run of columns to its second.
  static constexpr int kSecondBytes = kRunVectors * kVectorBytes / 2;

  // Operands of this vector that are read before the words that take them, as they are stored.
  static constexpr int kEarlyOperands = bits_below(Config::kEarly, kMaxOperands);
  ONEPASS_FUNCTION void load_early(uint4* to) const {
    each<kOperands>([&]<int I>(number<I>) {
      if constexpr (is_early<I>()) {
        constexpr bool kDense = is_in(Config::kDense, stream::operand + I),
                       kRepeated = (Config::kRepeatedOperand >> I & 1) != 0;
        const auto* at = this->template address<Config::kOperand[I], kDense, kRepeated>(a_.operand[I]);
        to[nth_early<I>()] = early_memory<I>::load(at, kRepeated ? repeated_count_ : count_).words[0];
      }
    });
  }
  ONEPASS_FUNCTION void set_early(const uint4* registers) { early_ = registers; }

  // Async copies of the streams' rows: stages of rows, and behind them the operands that are loaded once.
  static constexpr int kStreamBytes = Config::kDown * kRunBytes;
  static constexpr int kStageBytes = bits_below(Config::kStreams, 64) * kStreamBytes;
  static constexpr int kCopyBytes =
      Config::kStages * kStageBytes + bits_below(Config::kLoadedOnce, kMaxOperands) * kStreamBytes;
  ONEPASS_FUNCTION void set_copies(char* shared, int run) { copies_ = vector_in_run(shared, run); }
  ONEPASS_FUNCTION void set_stage(int stage) { stage_ = copies_ + stage * kStageBytes; }
  ONEPASS_FUNCTION void set_vector(int k) {
    constexpr int kNext = Config::kAcross * kVectorBytes / kRuns;
    copy_ = stage_ + k * kNext;
    once_ = copies_ + (Config::kStages * kStageBytes + k * kNext);
    result_ = results_ + k * kNext;
  }
  // Reads copies at this address, the vector `numbers` elements further.
  ONEPASS_FUNCTION void set_copy(char* copy, int numbers) { copy_ = copy, copied_numbers_ = numbers; }

  // Results that leave through shared memory, from where whole windows are stored when all of the row's threads have
  // met.
  static constexpr int kResultBytes = kStreamBytes * (Config::kUnroll > 0 ? Config::kUnroll : 1);
  static constexpr int kStagedBytes = bits_below(Config::kStaged, 64) * kResultBytes;
  ONEPASS_FUNCTION void set_results(char* shared, int run) { results_ = result_ = vector_in_run(shared, run); }
  // The run's numbers are those of the row from `column` on.
  ONEPASS_FUNCTION void store_results(index column) {
    const index left = exists_ ? static_cast<index>(a_.columns) - column : 0;
    column_ = column;
    run_ = left >= kRunVectors * V ? kRunVectors * V : left > 0 ? static_cast<int>(left) : 0;
    store_result<Config::kY, stream::y>(Config::kWantsDx ? a_.dx : a_.y);
    store_result<Config::kX, stream::recomputed>(a_.recomputed);
    each<kOperands>(
        [&]<int I>(number<I>) { store_result<Config::kOperand[I], stream::operand + I>(a_.operand_gradient[I]); });
    each<kKeeps>([&]<int K>(number<K>) { store_result<Config::kKept[K], stream::kept + K>(a_.kept[K]); });
  }

  ONEPASS_FUNCTION void load_async() const {
    load_async<Config::kX, stream::x>(a_.x);
    load_async<Config::kX, stream::y>(a_.y);
    each<kOperands>([&]<int I>(number<I>) { load_async<Config::kOperand[I], stream::operand + I>(a_.operand[I]); });
    each<kKeeps>([&]<int K>(number<K>) {
      load_async<Config::kKept[K], stream::kept + K>(a_.kept[K]);
      load_async<Config::kKept[K], stream::kept_gradient + K>(a_.kept_gradient[K]);
    });
  }
  ONEPASS_FUNCTION void load_async_once() const {
    each<kOperands>([&]<int I>(number<I>) {
      if constexpr (loaded_once<I>())
        load_runs_async<Config::kOperand[I], false, true>(once_ + nth_once<I>() * kStreamBytes, a_.operand[I]);
    });
  }
  // Prefetches what all rows share: it is needed late, and then at once.
  ONEPASS_FUNCTION void prefetch_repeated() const {
    each<kOperands>([&]<int I>(number<I>) {
      if constexpr ((Config::kRepeatedOperand >> I & 1) != 0 && !loaded_once<I>() && !is_short<I>()) {
        if (count_ > 0) prefetch(this->template address<Config::kOperand[I], false, true>(a_.operand[I]));
      }
    });
  }

  // Prefetches this vector of x and of the operands that differ from row to row.
  ONEPASS_FUNCTION void prefetch_inputs() const {
    if constexpr (!Config::kSingleX) prefetch_inputs<Config::kX, stream::x>(a_.x);
    each<Line::operands>([&]<int I>(number<I>) {
      if constexpr (((Config::kRepeatedOperand | Config::kSingleOperand) >> I & 1) == 0 && !is_short<I>())
        prefetch_inputs<Config::kOperand[I], stream::operand + I>(a_.operand[I]);
    });
  }

  // Among cursors of the same rows, the one that writes what all of them would.
  static ONEPASS_FUNCTION bool is_first() { return true; }

  ONEPASS_FUNCTION vector x() const { return read<Config::kX, Config::kSingleX, stream::x>(a_.x); }
  // As it is stored, where it is not a single number.
  ONEPASS_FUNCTION auto x_stored() const {
    using memory_of = memory<Config::kX, V, Config::kAccess>;
    constexpr bool kIsDense = is_in(Config::kDense, stream::x);
    if constexpr (is_in(Config::kStreams, stream::x)) {
      return memory_of::load_copied(copy_ + place_in(Config::kStreams, stream::x) * kStreamBytes,
                                    this->template row_address<Config::kX, kIsDense>(a_.x));
    } else {
      return memory_of::load_windows(this->template address<Config::kX, kIsDense>(a_.x), count_);
    }
  }
  ONEPASS_FUNCTION vector dy() const {
    if constexpr (Line::features > 0 || Line::gives_number) return vector(T(0));
    else return read<Config::kX, Config::kSingleY, stream::y>(a_.y);
  }
  ONEPASS_FUNCTION void store_y(vector v) const {
    if constexpr (Line::by_groups) write<Config::kY, stream::y>(a_.y, codes_of_groups(v));
    else write<Config::kY, stream::y>(a_.y, v);
  }
  ONEPASS_FUNCTION void store_dx(vector v) const {
    if constexpr (Config::kWantsDx) write<Config::kX, stream::y>(a_.dx, v);
  }
  ONEPASS_FUNCTION void store_recomputed(vector v) const { write<Config::kX, stream::recomputed>(a_.recomputed, v); }

  // For the chain (see word/chain.h).
  template <class L, int I>
  ONEPASS_FUNCTION L operand() const {
    // One row that begins at 16 bytes has whole vectors, behind its end whatever is there.
    constexpr int kAccess = (Config::kAlignedOperand >> I & 1) != 0 ? kRun : Config::kAccess;
    constexpr bool kIsShared = (Config::kSharedOperand >> I & 1) != 0 && !is_in(Config::kStreams, stream::operand + I);
    if constexpr (is_early<I>()) {
      return early_memory<I>::template numbers_of<T>({.words = {early_[nth_early<I>()]}});
    } else if constexpr (kIsShared && !loaded_once<I>()) {
      using memory_of = memory<Config::kOperand[I], V, kAccess>;
      const auto* row = static_cast<const typename stored<Config::kOperand[I]>::type*>(a_.operand[I].data) +
                        this->template offset<1>(a_.operand[I]);
      return memory_of::template numbers_of<T>(memory_of::load_windows(row + widened(column_), shared_count_));
    } else if constexpr (loaded_once<I>()) {
      const auto read_once = [&](int second, index) {
        return read_copied<Config::kOperand[I], kAccess>(
            once_ + (nth_once<I>() * kStreamBytes + second * kSecondBytes),
            this->template row_address<Config::kOperand[I], false, true>(a_.operand[I]));
      };
      return of_runs(read_once);
    } else {
      return read<Config::kOperand[I], (Config::kSingleOperand >> I & 1) != 0, stream::operand + I,
                  (Config::kRepeatedOperand >> I & 1) != 0, kAccess>(a_.operand[I]);
    }
  }
  // Of a word by channels, whose columns are neighbours.
  template <class L, int I>
  ONEPASS_FUNCTION L channel() const {
    constexpr bool kRepeated = (Config::kRepeatedOperand >> I & 1) != 0;
    const view& v = a_.operand[I];
    if constexpr ((Config::kSingleOperand >> I & 1) != 0) {
      return operand<L, I>();
    } else {
      const auto columns = static_cast<index>(v.column_stride);
      const auto number_of = [&](index channel) {
        return from_storage<Config::kOperand[I], T>(
            *this->template address<Config::kOperand[I], false, kRepeated>(v, channel));
      };
      if constexpr (Config::kChannels == of_any) {
        vector all;
#pragma unroll
        for (int i = 0; i < V; ++i) all.v[i] = i < count_ ? number_of((column_ + i) / columns) : T(0);
        return all;
      } else if constexpr (Config::kChannels == of_whole_lanes) {
        return vector(count_ > 0 ? number_of(column_ / columns) : T(0));
      } else {
        return vector(count_ > 0 ? number_of(column_ >> (31 - __clz(v.column_stride))) : T(0));
      }
    }
  }
  // Of `rope`: an element for each column that it turns, or for each two.
  template <class L, int I>
  ONEPASS_FUNCTION L table() const {
    if constexpr ((Config::kOneForTwo >> I & 1) == 0) {
      return operand<L, I>();
    } else {
      constexpr bool kRepeated = (Config::kRepeatedOperand >> I & 1) != 0;
      const run_of_columns of_pairs =
          read_run<Config::kOperand[I], stream::operand + I, kRepeated, Config::kAccess>(a_.operand[I], 0, column_ / 2);
      return zip(of_pairs, of_pairs);
    }
  }
  ONEPASS_FUNCTION int turned() const { return column_ < order::template turned<index>(a_) ? V : 0; }
  template <int I>
  ONEPASS_FUNCTION constexpr bool wants() const {
    return wanted<I>();
  }
  // Whether it is a sum over rows is the call's to say, whatever the word's operand is.
  template <int I>
  ONEPASS_FUNCTION void tensor_gradient(vector g) const {
    if constexpr (is_of_units<I>()) add_to_unit<I>(g);
    else if constexpr (is_summed<I>()) add_to_column<I>(g, [](vector sum, vector more) { return sum + more; });
    else if constexpr (wanted<I>()) write<Config::kOperand[I], stream::operand + I>(a_.operand_gradient[I], g);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(vector g) const {
    tensor_gradient<I>(g);
  }
  template <int I>
  ONEPASS_FUNCTION void column_gradient(vector dy, vector x) const {
    if constexpr (is_of_units<I>()) add_to_unit<I>(dy * x);
    else if constexpr (is_summed<I>()) add_to_column<I>(dy, [x](vector sum, vector more) { return fma(more, x, sum); });
    else tensor_gradient<I>(dy * x);
  }
  ONEPASS_FUNCTION T row_length() const { return static_cast<T>(a_.columns); }
  ONEPASS_FUNCTION const double* numbers() const { return a_.parameter; }
  template <int J>
  ONEPASS_FUNCTION T parameter() const {
    return static_cast<T>(a_.parameter[J]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION pack_mask<V> keeps(int threshold) const {
    if constexpr (kRuns == 1) {
      return random_at_least<V>(random<K>(), column_, threshold);
    } else {
      const auto keeps_of = [&](int second) {
        const index column = run_column(second);
        return random_at_least<kRun>(random<K>(column), column, threshold);
      };
      const pack_mask<kRun> first = keeps_of(0), second = keeps_of(1);
      pack_mask<V> all;
#pragma unroll
      for (int i = 0; i < kRun; ++i) all.m[place_of(0, i)] = first.m[i], all.m[place_of(1, i)] = second.m[i];
      return all;
    }
  }
  // Of dropout number K, at the eight columns that the vector is of.
  template <int K>
  ONEPASS_FUNCTION philox_words random() const {
    return random<K>(column_);
  }
  template <int K>
  ONEPASS_FUNCTION philox_words random(index column) const {
    const int64 row = Config::kMembers > 0 ? a_.first_row + row_ : row_;
    return random_words(random_, K, row, column, a_.columns);
  }
  template <class L>
  ONEPASS_FUNCTION L column() const {
    return of_runs([](int, index column) { return iota<run_of_columns>(static_cast<T>(column)); });
  }
  ONEPASS_FUNCTION vector plus_at(vector v, int64 column, T number) const {
    const int64 in = column - widened(column_);
    const int element = in < 0 || in >= V ? V : static_cast<int>(in);  // no branch: loads go on behind it
#pragma unroll
    for (int i = 0; i < V; ++i) v.v[i] += i == element ? number : T(0);
    return v;
  }
  template <class L>
  ONEPASS_FUNCTION L matrix_row() const {
    return L(static_cast<T>(matrix_row_));
  }
  template <int K>
  ONEPASS_FUNCTION vector keep(vector v) const {
    write<Config::kKept[K], stream::kept + K>(a_.kept[K], v);
    return as_kept<K>(v);
  }
  template <int K>
  ONEPASS_FUNCTION vector as_kept(vector v) const {
    return rounded_to<Config::kKept[K]>(v);
  }
  ONEPASS_FUNCTION vector rounded(vector v) const { return rounded_to<Config::kX>(v); }
  template <class L, int K>
  ONEPASS_FUNCTION L kept() const {
    return read<Config::kKept[K], false, stream::kept + K>(a_.kept[K]);
  }
  template <class L, int K>
  ONEPASS_FUNCTION L kept_gradient() const {
    return read<Config::kKept[K], (Config::kSingleKeptGradient >> K & 1) != 0, stream::kept_gradient + K>(
        a_.kept_gradient[K]);
  }
  // This thread's part of the row's features; or, in backward, their gradients.
  ONEPASS_FUNCTION void set_features(const T* from) {
#pragma unroll
    for (int j = 0; j < Line::features; ++j) features_[j] = from[j];
  }
  ONEPASS_FUNCTION const T* features() const { return features_; }
  template <int J>
  ONEPASS_FUNCTION void contract(vector x, vector w) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (kWholeLanes || i < count_) features_[J] = fma_number(x.v[i], w.v[i], features_[J]);
    }
  }
  template <int J>
  ONEPASS_FUNCTION T feature_gradient() const {
    return features_[J];
  }

 private:
  using base = position<Config>;
  using base::a_, base::any_exists_, base::column_, base::count_, base::exists_, base::matrix_row_, base::offset,
      base::repeated_count_, base::row_, base::shared_count_, base::widened;

  // body(number<I>()) for each I below N.
  template <int I>
  struct number {};
  template <int N, int I = 0, class Body>
  static ONEPASS_FUNCTION void each(const Body& body) {
    if constexpr (I < N) {
      body(number<I>());
      each<N, I + 1>(body);
    }
  }

  // The first column of one of the vector's runs.
  ONEPASS_FUNCTION index run_column(int second) const {
    if constexpr (kRuns == 1) return column_;
    if constexpr (!order::kZips) return column_ + second * kRun;
    const pair_of_columns<index> pair = order::pair_at(a_, column_);
    return second == 0 ? pair.first : pair.first + pair.apart;
  }
  // Where in the vector element i of a run stands.
  static constexpr ONEPASS_FUNCTION int place_of(int second, int i) {
    return order::kZips ? 2 * i + second : second * kRun + i;
  }
  // run(0, its first column), and run(1, its first column), as a vector.
  template <class Run>
  ONEPASS_FUNCTION vector of_runs(const Run& run) const {
    if constexpr (kRuns == 1) {
      return run(0, column_);
    } else {
      const run_of_columns first = run(0, run_column(0)), second = run(1, run_column(1));
      vector all;
#pragma unroll
      for (int i = 0; i < kRun; ++i) all.v[place_of(0, i)] = first.v[i], all.v[place_of(1, i)] = second.v[i];
      return all;
    }
  }
  template <class Body>
  ONEPASS_FUNCTION void each_run(vector v, const Body& body) const {
    if constexpr (kRuns == 1) {
      body(0, column_, v);
    } else {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        run_of_columns run;
#pragma unroll
        for (int i = 0; i < kRun; ++i) run.v[i] = v.v[place_of(second, i)];
        body(second, run_column(second), run);
      }
    }
  }

  // The vectors of a group of columns are those of neighbouring threads of a warp, which are all here: rows are whole
  // groups.
  ONEPASS_FUNCTION vector codes_of_groups(vector v) const {
    using codes = typename Line::grouped::what;
    constexpr int kThreads = codes::kColumns / V;
    static_assert(kRuns == 1 && kThreads > 0 && kThreads <= 32 && Config::kAcross % kThreads == 0);
    const T scale = codes::scale(largest_magnitude_of<kThreads>(largest_magnitude_of(v, V, T(0))));
    const view& scales = a_.kept[Line::grouped::ordinal];
    if (threadIdx.x % kThreads == 0 && count_ > 0)
      static_cast<T*>(scales.data)[offset(scales) + widened(column_ / codes::kColumns)] = scale;
    return codes::codes(v, scale);
  }
  template <int I, class Add>
  ONEPASS_FUNCTION void add_to_column(vector g, const Add& add) const {
    if constexpr (wanted<I>()) {
      constexpr int slot = bits_below(Config::kWantsColumn, I);
      if constexpr (Config::kSumsInRegisters) {
        if (count_ > 0) sums_[slot] = add(sums_[slot], g);  // behind the row's end there may be anything
      } else {
        T* at = shared_sums_ + slot * slot_stride_ + column_;
        vector sum;
#pragma unroll
        for (int i = 0; i < V; ++i) sum.v[i] = i < count_ ? at[i] : T(0);
        sum = add(sum, g);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (i < count_) at[i] = sum.v[i];
        }
      }
    }
  }
  // A vector is within a unit: what it adds is one number, in the place of its first element.
  template <int I>
  ONEPASS_FUNCTION void add_to_unit(vector g) const {
    if constexpr (wanted<I>()) {
      constexpr int slot = bits_below(Config::kWantsColumn, I);
      if (count_ == 0) return;
      if constexpr (Config::kSumsInRegisters) sums_[slot].v[0] += sum_lanes(g);
      else shared_sums_[slot * slot_stride_ + column_] += sum_lanes(g);
    }
  }
  // Of `rope` or of channels: its rows may be shorter than x's.
  template <int I>
  static constexpr __device__ bool is_short() {
    const bool is_table = Line::turned_operand >= 0 && (I == Line::turned_operand || I == Line::turned_operand + 1);
    return is_table || (Line::channels >> I & 1) != 0;
  }
  template <int I>
  static constexpr __device__ bool is_summed() {
    return (Config::kWantsColumn >> I & 1) != 0;
  }
  template <int I>
  static constexpr __device__ bool is_of_units() {
    return Config::kUnit > 1 && is_summed<I>() && (Line::channels >> I & 1) != 0;
  }
  template <int I>
  static constexpr __device__ bool wanted() {
    return !Quiet && ((Config::kWantsColumn | Config::kWantsTensor) >> I & 1) != 0;
  }
  template <dtype D, bool Single, stream S, bool Repeated = false, int Access = Config::kAccess>
  ONEPASS_FUNCTION vector read(const view& v) const {
    if constexpr (Single && !is_in(Config::kStreams, S)) {
      const auto* row = static_cast<const typename stored<D>::type*>(v.data) + offset(v);
      return vector(count_ > 0 ? from_storage<D, T>(*row) : T(0));
    } else if constexpr (kRuns == 1) {
      return read_run<D, S, Repeated, Access>(v, 0, column_);
    } else {
      return of_runs([&](int second, index column) { return read_run<D, S, Repeated, Access>(v, second, column); });
    }
  }
  template <dtype D, stream S, bool Repeated, int Access>
  ONEPASS_FUNCTION run_of_columns read_run(const view& v, int second, index column) const {
    using memory_of = memory<D, kRun, Access>;
    if constexpr (is_in(Config::kStreams, S)) {
      return read_copied<D>(
          copy_ + place_in(Config::kStreams, S) * kStreamBytes + copied_numbers_ * size_of(D) + second * kSecondBytes,
          this->template row_address<D, is_in(Config::kDense, S)>(v));
    } else {
      const auto* at = this->template address<D, is_in(Config::kDense, S), Repeated>(v, column);
      if constexpr (Config::kInPlace && S == stream::y)
        return memory_of::template numbers_of<T>(memory_of::load_own(at, count_ / kRuns));
      return memory_of::template numbers_of<T>(
          memory_of::load_windows(at, (Repeated ? repeated_count_ : count_) / kRuns));
    }
  }
  template <dtype D, int Access = Config::kAccess>
  ONEPASS_FUNCTION run_of_columns read_copied(const char* copy, uint32 row) const {
    using memory_of = memory<D, kRun, Access>;
    return memory_of::template numbers_of<T>(memory_of::load_copied(copy, row));
  }
  // Of results.
  static constexpr __device__ bool has_dense_rows(stream s) { return s != stream::y || !Config::kStridedDx; }
  template <dtype D, stream S>
  ONEPASS_FUNCTION void write(const view& v, vector value) const {
    if constexpr (is_in(Config::kStaged, S)) {
      using memory_of = memory<D, V, Config::kAccess>;
      *reinterpret_cast<uint4*>(result_ + place_in(Config::kStaged, S) * kResultBytes) =
          memory_of::whole(memory_of::buffer_of(value));
    } else {
      each_run(value, [&](int, index column, auto run) {
        auto* const to = this->template address<D, has_dense_rows(S)>(v, column);
        if constexpr (Config::kRagged) {
          if (count_ < V) return memory<D, kRun, 1>::store(to, run, count_);
        }
        memory<D, kRun, Config::kAccess>::store(to, run, count_ / kRuns);
      });
    }
  }

  template <dtype D, stream S>
  ONEPASS_FUNCTION void store_result(const view& v) const {
    if constexpr (is_in(Config::kStaged, S)) {
      const int across = static_cast<int>(threadIdx.x) % Config::kAcross;
      store_run<size_of(D), kRunVectors / Config::kAcross, Config::kAcross>(
          this->template address<D, has_dense_rows(S)>(v),
          results_ - across * kVectorBytes + place_in(Config::kStaged, S) * kResultBytes, run_, across);
    }
  }

  template <dtype D>
  ONEPASS_FUNCTION void load_async(char* to, const void* at) const {
    memory<D, kRun, Config::kAccess>::copy(to, at, static_cast<int>(static_cast<index>(a_.columns) - column_));
  }
  template <dtype D, bool Dense, bool Repeated = false>
  ONEPASS_FUNCTION void load_runs_async(char* to, const view& v) const {
#pragma unroll
    for (int second = 0; second < kRuns; ++second)
      load_async<D>(to + second * kSecondBytes, this->template address<D, Dense, Repeated>(v, run_column(second)));
  }
  template <dtype D, stream S>
  ONEPASS_FUNCTION void load_async(const view& v) const {
    if constexpr (is_in(Config::kStreams, S))
      load_runs_async<D, is_in(Config::kDense, S)>(copy_ + place_in(Config::kStreams, S) * kStreamBytes, v);
  }
  template <int I>
  static constexpr __device__ bool loaded_once() {
    return (Config::kLoadedOnce >> I & 1) != 0;
  }
  template <int I>
  static constexpr __device__ int nth_once() {
    return bits_below(Config::kLoadedOnce, I);
  }
  template <int I>
  using early_memory = memory<Config::kOperand[I], V, V>;
  template <int I>
  static constexpr __device__ bool is_early() {
    return (Config::kEarly >> I & 1) != 0;
  }
  template <int I>
  static constexpr __device__ int nth_early() {
    return bits_below(Config::kEarly, I);
  }
  template <dtype D, stream S>
  ONEPASS_FUNCTION void prefetch_inputs(const view& v) const {
    constexpr int kLine = 128;
    if (count_ > 0 && column_ * size_of(D) % kLine == 0)
      prefetch(this->template address<D, is_in(Config::kDense, S)>(v));
  }

  random_state random_{};
  int run_ = 0, copied_numbers_ = 0;
  char *copies_ = nullptr, *stage_ = nullptr, *copy_ = nullptr, *once_ = nullptr;
  char *results_ = nullptr, *result_ = nullptr;
  vector* sums_ = nullptr;
  const uint4* early_ = nullptr;
  T* shared_sums_ = nullptr;
  int64 slot_stride_ = 0;
  T features_[larger(1, Line::features)];
};

ONEPASS_END
