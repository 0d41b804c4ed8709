// Lines with a row word on CUDA whose rows are too long for the threads of a cluster: three kernels: partial statistics
// (backward: two sums) of parts a.task_columns long, to a.row_parts; one combine per row; an elementwise pass in tiles.
// Rows are read twice.
#pragma once

#include "onepass/kernel/row/rowwise.cuda.h"
#include "onepass/kernel/row/shapes.h"

ONEPASS_BEGIN

ONEPASS_FUNCTION int64 parts_of_row(const arguments& a) { return (a.columns + a.task_columns - 1) / a.task_columns; }

// What a row's statistics are taken with in place of row_threads: adds up what this thread has of a part...
template <class Config>
struct gatherer {
  static constexpr bool kHasNumbers = true, kAtOnce = false;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  T total[kPartNumbers];
  bool any = false;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> own, Combine combine) {
    store_numbers(any ? combine(load_numbers<N>(total), own) : own, total);
    any = true;
    return own;
  }
};
// ... writes what the block has of it...
template <class Config>
struct part_writer {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr int kCombined = 0;
  using T = typename Config::arithmetic;
  row_threads<Config>& threads;
  const gatherer<Config>& gathered;
  T* part;
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N>, Combine combine) {
    const auto all = threads.reduce(load_numbers<N>(gathered.total), combine);
    if (threadIdx.x == 0) store_numbers(all, part);
    return all;
  }
};
// ... and combines a row's parts.
template <class Config>
struct part_reader {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
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
  const part_of_row<Config> part(a);
  cursor<Config, Line> at(a);
  at.set_row(part.row);
  const auto across = static_cast<int>(threadIdx.x);
  L held[Config::kHeldVectors];
  const auto value = [&](int k, typename Config::index, int) { return held[k]; };
  gatherer<Config> gathered;
  for (int64 first = part.begin; first < part.end; first += part_of_row<Config>::kColumns) {
    for_vectors<Config>(a, across, first, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      held[k] = Line::pre::recompute(at.x(), at);
    });
    statistics<Config, Line>(a, across, gathered, held, value, first);
  }
  let_next_kernel_begin();
  part_writer<Config> whole{threads, gathered, part.numbers};
  statistics<Config, Line>(a, across, whole, held, value);
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_combined(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  wait_for_kernel_before();
  const int64 row = blockIdx.x, parts = parts_of_row(a);
  L* const none = nullptr;
  const auto value = [](int, typename Config::index, int) { return L(T(0)); };
  part_reader<Config> whole{threads, static_cast<const T*>(a.row_parts) + row * parts * kPartNumbers, parts};
  const word::row_numbers<T> saved =
      statistics<Config, Line>(a, static_cast<int>(threadIdx.x), whole, none, value).saved;
  let_next_kernel_begin();
  if (threadIdx.x == 0) save<Line, Config::kX>(a, row, saved);
}

struct row_in_tiles {
  static constexpr bool kHeld = false, kCentred = false;
};

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward_tiles(const arguments& a) {
  using T = typename Config::arithmetic;
  wait_for_kernel_before();
  forward_in_tiles<Config, Line>(a, [&](auto& at, auto row) {
    const auto u = Line::pre::forward(at.x(), at);
    const word::row_numbers<T> saved =
        row < a.rows ? saved_of<Line, T, Config::kX>(a, row) : word::row_numbers<T>{T(0), T(0)};
    return Line::post::forward(Line::row::template forward<row_in_tiles>(u, saved), at);
  });
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_parts(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  const part_of_row<Config> part(a);
  cursor<Config, Line, true> at(a);
  at.set_row(part.row);
  const auto saved = all_saved_of<Line, T, Config::kX>(a, part.row);
  word::terms<L> total{L(T(0)), L(T(0))};
  for (int64 first = part.begin; first < part.end; first += part_of_row<Config>::kColumns) {
    for_vectors<Config>(a, static_cast<int>(threadIdx.x), first, [&](int, typename Config::index column, int count) {
      at.set_column(column, count);
      const word::terms<L> here = value_and_gradient<Line, L>(at, saved);
      add_terms<Line>(here, count, total);
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
  T* totals = static_cast<T*>(a.totals);
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
  for_tiles<Config>(a, [&](auto row_of, auto column_of) {
    cursor<Config, Line> at(a);
    at.set_sums(sums);
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      const auto row = row_of(u);
      move_to<Config>(a, at, u, row_of, column_of);
      word::pair<T> of_row{T(0), T(0)};
      const auto saved = all_saved_of<Line, T, Config::kX>(a, row);
      if (row < a.rows) {
        const T* totals = static_cast<const T*>(a.totals);
        of_row = {totals[row], totals[a.rows + row]};
      }
      finish_vector<Config, Line>(a, at, value_and_gradient<Line, L>(at, saved), saved.of[0], of_row);
    }
    store_tile<Config>(a, at, row_of, column_of);
  });
  write_parts<Config>(a, sums);
}

ONEPASS_END
