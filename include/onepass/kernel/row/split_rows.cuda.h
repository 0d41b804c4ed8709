// Lines with row words on CUDA whose rows are too long for the threads of a cluster: for each row word, in backward
// from the last to the first, partial statistics (backward: two sums) of parts a.task_columns long, to a.row_parts, and
// one combine per row; then an elementwise pass in tiles. Rows are read once more than there are row words.
#pragma once

#include "onepass/kernel/row/shapes.h"
#include "onepass/kernel/row/streamed.cuda.h"

ONEPASS_BEGIN

ONEPASS_FUNCTION int64 parts_of_row(const arguments& a) { return (a.columns + a.task_columns - 1) / a.task_columns; }

// What a part's threads are combined with in place of row_threads; it leaves what they have.
template <class Config>
struct part_writer {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr pick kPick = pick::elsewhere;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  row_threads<Config>& threads;
  const gatherer<Config>& gathered;
  T* to;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N>, Combine combine) {
    const auto all = threads.reduce(load_numbers<N>(gathered.total), combine);
    if (threadIdx.x == 0) store_numbers(all, to);
    return all;
  }
};
// What a row's parts are.
template <class Config>
struct part_reader {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr pick kPick = pick::again;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  row_threads<Config>& threads;
  const T* parts;
  int64 count;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N>, Combine combine) {
    auto all = Combine::template none<T, N>();
    for (int64 part = threadIdx.x; part < count; part += Config::kAcross)
      all = combine(all, load_numbers<N>(parts + part * kPartNumbers));
    return threads.reduce(all, combine);
  }
};

// A block's part: which, its columns, and what it leaves.
template <class Config>
struct part_of_row {
  using T = typename Config::arithmetic;
  const int64 row, begin, end;
  T* const numbers;
  explicit ONEPASS_FUNCTION part_of_row(const arguments& a)
      : row(blockIdx.x / parts_of_row(a)),
        begin(blockIdx.x % parts_of_row(a) * a.task_columns),
        end(begin + a.task_columns < a.columns ? begin + a.task_columns : a.columns),
        numbers(static_cast<T*>(a.row_parts) + blockIdx.x * static_cast<int64>(kPartNumbers)) {}
  static constexpr int kColumns =
      Config::kAcross * Config::kHeldVectors * Config::kVectorSize;  // that the block has at a time
};

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_parts(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  constexpr int I = Config::kRowWord;
  using segment = typename Line::template segment_at<I>;
  if constexpr (I > 0) wait_for_kernel_before();
  const part_of_row<Config> part(a);
  saved_numbers<typename Config::arithmetic, Line::segments> saved;
  if constexpr (I > 0) read_saved<Config, Line, false, 0, I>(a, part.row, saved);
  cursor<Config, Line> at(a);
  at.set_row(part.row);
  const auto across = static_cast<int>(threadIdx.x);
  L held[Config::kHeldVectors];
  const auto value = [&](int k, typename Config::index, int) { return held[k]; };
  gatherer<Config> gathered;
  for (int64 first = part.begin; first < part.end; first += part_of_row<Config>::kColumns) {
    for_vectors<Config>(a, across, first, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      held[k] = value_before<Line, I>(L(at.x()), saved, at);
    });
    statistics<Config, segment>(a, part.row, across, gathered, held, value, first);
  }
  let_next_kernel_begin();
  part_writer<Config> whole{threads, gathered, part.numbers};
  statistics<Config, segment>(a, part.row, across, whole, held, value);
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_combined(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  wait_for_kernel_before();
  constexpr int I = Config::kRowWord;
  using segment = typename Line::template segment_at<I>;
  const int64 row = blockIdx.x, parts = parts_of_row(a);
  L* const none = nullptr;
  cursor<Config, Line> at(a);
  at.set_row(row);
  saved_numbers<T, Line::segments> before;
  if constexpr (I > 0) read_saved<Config, Line, false, 0, I>(a, row, before);
  const auto value = [&](int, typename Config::index column, int count) {
    at.set_column(column, count);
    return value_before<Line, I>(L(at.x()), before, at);
  };
  part_reader<Config> whole{threads, static_cast<const T*>(a.row_parts) + row * parts * kPartNumbers, parts};
  const word::row_numbers<T> saved =
      statistics<Config, segment>(a, row, static_cast<int>(threadIdx.x), whole, none, value).saved;
  let_next_kernel_begin();
  if (threadIdx.x == 0) {
    save<Line, Config::kX, I>(a, row, saved);
    store_number<Config, segment>(a, row, saved);
  }
}

struct row_in_tiles {
  static constexpr bool kHeld = false, kCentred = false;
};

// Row words and the words behind them, from row word I on.
template <class Line, int I, class L, class T, class Cursor>
ONEPASS_FUNCTION L segments_forward(L u, const saved_numbers<T, Line::segments>& saved, Cursor& at) {
  using segment = typename Line::template segment_at<I>;
  const L y = segment::post::forward(row_forward<typename segment::row, row_in_tiles>(u, saved.of[I], at), at);
  if constexpr (I + 1 < Line::segments) return segments_forward<Line, I + 1>(y, saved, at);
  else return y;
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_tiles(const arguments& a) {
  wait_for_kernel_before();
  forward_in_tiles<Config, Line>(a, [&](auto& at, auto row) {
    const auto u = Line::pre::forward(at.x(), at);
    return segments_forward<Line, 0>(u, all_saved_of<Config, Line, false>(a, row), at);
  });
}

// The sums over a row that are known of row words from I on, [row word][2][rows].
template <class Line, int I, class T>
ONEPASS_FUNCTION void read_totals(const arguments& a, int64 row, word::pair<T> (&to)[Line::segments]) {
  if constexpr (I < Line::segments) {
    const T* totals = static_cast<const T*>(a.totals) + 2 * I * a.rows;
    const bool has_some = Line::template segment_at<I>::row::about.sums > 0 && row < a.rows;
    to[I] = has_some ? word::pair<T>{totals[row], totals[a.rows + row]} : word::pair<T>{T(0), T(0)};
    read_totals<Line, I + 1>(a, row, to);
  }
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_parts(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  constexpr int I = Config::kRowWord;
  using segment = typename Line::template segment_at<I>;
  if constexpr (I + 1 < Line::segments) wait_for_kernel_before();
  const part_of_row<Config> part(a);
  cursor<Config, Line, true> at(a);
  at.set_row(part.row);
  const auto saved = all_saved_of<Config, Line, true>(a, part.row);
  word::pair<T> sums[Line::segments];
  read_totals<Line, I + 1>(a, part.row, sums);
  word::terms<L> total{L(T(0)), L(T(0))};
  for (int64 first = part.begin; first < part.end; first += part_of_row<Config>::kColumns) {
    for_vectors<Config>(a, static_cast<int>(threadIdx.x), first, [&](int, typename Config::index column, int count) {
      at.set_column(column, count);
      const word::terms<L> here = value_and_gradient<Line, I, L>(at, saved, sums, static_cast<T>(a.inverse_columns));
      add_terms<segment>(here, saved.of[I], at, count, total);
    });
  }
  let_next_kernel_begin();
  const auto all = threads.reduce(numbers<T, 2>{{sum_lanes(total.first), sum_lanes(total.second)}}, plus());
  if (threadIdx.x == 0) store_numbers(all, part.numbers);
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_combined(const arguments& a) {
  using T = typename Config::arithmetic;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  wait_for_kernel_before();
  const int64 row = blockIdx.x, parts = parts_of_row(a);
  part_reader<Config> whole{threads, static_cast<const T*>(a.row_parts) + row * parts * kPartNumbers, parts};
  const auto all = whole.reduce(plus::none<T, 2>(), plus());
  let_next_kernel_begin();
  T* totals = static_cast<T*>(a.totals) + 2 * Config::kRowWord * a.rows;
  if (threadIdx.x == 0) totals[row] = all.v[0], totals[a.rows + row] = all.v[1];
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_tiles(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  L sums[kSlots<Config> > 0 ? kSlots<Config> : 1];
#pragma unroll
  for (int slot = 0; slot < kSlots<Config>; ++slot) sums[slot] = L(T(0));
  wait_for_kernel_before();
  const auto tile = [&](auto row_of, auto column_of) {
    cursor<Config, Line> at(a);
    at.set_sums(sums);
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      const auto row = row_of(u);
      move_to<Config>(a, at, u, row_of, column_of);
      const auto saved = all_saved_of<Config, Line, true>(a, row);
      word::pair<T> totals[Line::segments];
      read_totals<Line, 0>(a, row, totals);
      const word::terms<L> here = value_and_gradient<Line, 0, L>(at, saved, totals, static_cast<T>(a.inverse_columns));
      if constexpr (Config::kWantsRecompute && Line::segments > 1) {
        L x{};
        if constexpr (!Line::pre::resumes) x = at.x();
        at.store_recomputed(Line::post::recompute(row_result<Line, Line::segments - 1>(x, saved, at), at));
      }
      finish_vector<Config, Line>(a, at, here, saved.of[0], totals[0]);
    }
    store_tile<Config>(a, at, row_of, column_of);
  };
  for_tiles<Config>(a, tile, [&](int64 g) { write_group<Config, Line>(a, sums, g); });
  write_parts<Config, Line>(a, sums);
}

ONEPASS_END
