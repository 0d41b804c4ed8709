// Lines with a row word on CUDA. kAcross threads share a row, kDown rows are in a block at a time, blocks stride over
// the rows. A row is held in registers, kHeldLanes lanes a thread. kHeldLanes = 0 streams rows that are too long for
// that: forward reads them once more for each pass (from shared memory where x's row fits it); backward is two kernels,
// one for the sums over each row and one in tiles for the rest.
//
// Config, besides place.cuda.h's: kAcross, kDown, kHeldLanes, kSumsInRegisters, kExact; kUnroll for the tiles.
#pragma once

#include "onepass/skeleton/elementwise.cuda.h"

ONEPASS_BEGIN

// Sums over the threads of a row; every thread gets the same result. kDown > 1 only where a row fits a warp.
template <class Config>
class row_threads {
 public:
  using T = typename Config::arithmetic;
  static constexpr int kWarps = Config::kAcross > 32 ? Config::kAcross / 32 : 1;
  static constexpr int kWidth = Config::kAcross < 32 ? Config::kAcross : 32;

  explicit ONEPASS_FUNCTION row_threads(stage::pair<T>* shared) : shared_(shared) {}

  // V: T, or a pair of them.
  template <class V, class Combine>
  ONEPASS_FUNCTION V reduce(V own, const Combine& combine) {
    own = in_warp(own, combine, kWidth);
    if constexpr (kWarps == 1) return own;
    // Two sets of slots take turns: one barrier a reduction is enough.
    V* slots = reinterpret_cast<V*>(shared_ + turn_ * kWarps);
    turn_ ^= 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) slots[threadIdx.x / 32] = own;
    __syncthreads();
    own = slots[lane % kWarps];
    return in_warp(own, combine, kWarps);
  }

 private:
  template <class V, class Combine>
  static ONEPASS_FUNCTION V in_warp(V own, const Combine& combine, int width) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < width) own = combine(own, from_lane(own, distance));
    }
    return own;
  }
  static ONEPASS_FUNCTION T from_lane(T own, int distance) { return __shfl_xor_sync(0xffffffffu, own, distance); }
  static ONEPASS_FUNCTION stage::pair<T> from_lane(stage::pair<T> own, int distance) {
    return {from_lane(own.first, distance), from_lane(own.second, distance)};
  }
  stage::pair<T>* shared_;
  int turn_ = 0;
};

struct plus {
  template <class V>
  ONEPASS_FUNCTION V operator()(V a, V b) const {
    return a + b;
  }
};
struct larger_of {
  template <class T>
  ONEPASS_FUNCTION T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

struct nothing {
  ONEPASS_FUNCTION void operator()(int64, int) const {}
};

// A thread's lanes of the row: body(k, column, count), k counting from 0. Where lanes fill the row exactly, the
// compiler knows the count, and no number is masked. after(column, count) follows on four bodies of a streamed row: so
// many loads are in flight even where it must not be passed.
template <class Config, class Body, class After = nothing>
ONEPASS_FUNCTION void for_lanes(const arguments& a, int across, bool valid, const Body& body, const After& after = {}) {
  constexpr int V = Config::kLanes;
  auto count = [&](int64 column) { return Config::kExact ? V : count_at<V>(column, a.columns); };
  if constexpr (Config::kHeldLanes > 0) {
#pragma unroll
    for (int k = 0; k < Config::kHeldLanes; ++k) {
      const int64 column = static_cast<int64>(k * Config::kAcross + across) * V;
      body(k, column, Config::kDown == 1 || valid ? count(column) : 0);
    }
  } else {
    if (!valid) return;
    constexpr int kGroup = 4, kStep = Config::kAcross * V;
    int64 column = static_cast<int64>(across) * V;
    for (; column + (kGroup - 1) * kStep < a.columns; column += kGroup * kStep) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) body(0, column + i * kStep, count(column + i * kStep));
#pragma unroll
      for (int i = 0; i < kGroup; ++i) after(column + i * kStep, count(column + i * kStep));
    }
    for (; column < a.columns; column += kStep) {
      body(0, column, count(column));
      after(column, count(column));
    }
  }
}

// The row as a row word sees it (see stage/row.h). Value(k, column, count) gives a lane: from registers, or anew.
template <class Config, class Value>
class thread_row {
 public:
  using T = typename Config::arithmetic;
  using lane = pack<T, Config::kLanes>;
  static constexpr bool kHeld = Config::kHeldLanes > 0;

  ONEPASS_FUNCTION thread_row(const arguments& a, int across, bool valid, row_threads<Config>& threads, lane* held,
                              const Value& value)
      : a_(a), across_(across), valid_(valid), threads_(threads), held_(held), value_(value) {}

  ONEPASS_FUNCTION T columns() const { return static_cast<T>(a_.columns); }
  template <class F>
  ONEPASS_FUNCTION T sum(const F& f) {
    return each<false>(f);
  }
  template <class F>
  ONEPASS_FUNCTION stage::pair<T> sum_pair(const F& f) {
    lane first(T(0)), second(T(0));
    for_lanes<Config>(a_, across_, valid_, [&](int k, int64 column, int count) {
      const stage::terms<lane> value = f(value_(k, column, count));
      first = first + where(first_n<lane>(count), value.first, lane(T(0)));
      second = second + where(first_n<lane>(count), value.second, lane(T(0)));
    });
    return threads_.reduce(stage::pair<T>{sum_lanes(first), sum_lanes(second)}, plus());
  }
  template <class F>
  ONEPASS_FUNCTION T replace_sum(const F& f) {
    return each<true>(f);
  }
  template <class F>
  ONEPASS_FUNCTION T max(const F& f) {
    const lane lowest(static_cast<T>(-kInfinity));
    lane best = lowest;
    for_lanes<Config>(a_, across_, valid_, [&](int k, int64 column, int count) {
      best = ONEPASS_TARGET::max(best, where(first_n<lane>(count), f(value_(k, column, count)), lowest));
    });
    return threads_.reduce(max_lanes(best), larger_of());
  }

 private:
  template <bool Replace, class F>
  ONEPASS_FUNCTION T each(const F& f) {
    lane total(T(0));
    for_lanes<Config>(a_, across_, valid_, [&](int k, int64 column, int count) {
      const lane value = f(value_(k, column, count));
      if constexpr (Replace && kHeld) held_[k] = value;
      total = total + where(first_n<lane>(count), value, lane(T(0)));
    });
    return threads_.reduce(sum_lanes(total), plus());
  }
  const arguments& a_;
  int across_;
  bool valid_;
  row_threads<Config>& threads_;
  lane* held_;
  const Value& value_;
};

template <class Config, class Line>
ONEPASS_FUNCTION typename Config::arithmetic row_parameter(const arguments& a) {
  using T = typename Config::arithmetic;
  if constexpr (Line::row_parameter >= 0) return static_cast<T>(a.parameter[Line::row_parameter]);
  else return T(0);
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  constexpr bool kHeld = Config::kHeldLanes > 0;
  __shared__ stage::pair<T> shared[2 * row_threads<Config>::kWarps];
  row_threads<Config> threads(shared);
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  extern __shared__ double dynamic[];
  place<Config, Line> at(a), next(a);
  at.set_row_memory(dynamic);
  next.set_row_memory(dynamic);
  const int64 step = static_cast<int64>(gridDim.x) * Config::kDown;
  if constexpr (Config::kRowInShared) {
    at.set_row(blockIdx.x);
    for_lanes<Config>(a, across, true, [&](int, int64 column, int count) {
      at.set_column(column, count);
      at.bring_x();
    });
  }
  L held[kHeld ? Config::kHeldLanes : 1];
  // The bound is the same for all threads of a block: shuffles and barriers need every thread.
  for (int64 base = static_cast<int64>(blockIdx.x) * Config::kDown; base < a.rows; base += step) {
    const int64 row = base + down;
    const bool valid = row < a.rows;
    at.set_row(row);
    if constexpr (Config::kRowInShared) wait_for_copies();
    if constexpr (kHeld) {
      for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
        at.set_column(column, count);
        held[k] = Line::pre::forward(at.x(), at);
      });
    }
    const auto value = [&](int k, int64 column, int count) {
      if constexpr (kHeld) return held[k];
      at.set_column(column, count);
      return Line::pre::recompute(at.x(), at);
    };
    thread_row<Config, decltype(value)> whole(a, across, valid, threads, held, value);
    const stage::pair<T> saved = Line::row::statistics(whole, row_parameter<Config, Line>(a));
    if (Config::kSavesStatistics && valid && across == 0) {
      static_cast<T*>(a.statistics)[row] = saved.first;
      if constexpr (Line::row::about.statistics > 1) static_cast<T*>(a.statistics)[a.rows + row] = saved.second;
    }
    const auto finish = [&](int k, int64 column, int count) {
      at.set_column(column, count);
      L u;
      if constexpr (kHeld) u = held[k];
      else u = Line::pre::forward(at.x(), at);
      const L z = Line::row::template forward<decltype(whole)>(u, saved);
      at.store_y(Line::post::forward(z, at));
    };
    if (Config::kRowInShared && base + step < a.rows) {  // the next row arrives while this one leaves
      next.set_row(row + step);
      for_lanes<Config>(a, across, valid, finish, [&](int64 column, int count) {
        next.set_column(column, count);
        next.bring_x();
      });
    } else {
      for_lanes<Config>(a, across, valid, finish);
    }
  }
}

template <class Line, class T>
ONEPASS_FUNCTION stage::pair<T> saved_of(const arguments& a, int64 row) {
  if constexpr (row_result<Line>::kIsGiven) return {T(0), T(0)};
  const T* statistics = static_cast<const T*>(a.statistics);
  return {statistics[row], Line::row::about.statistics > 1 ? statistics[a.rows + row] : T(0)};
}

// dx of one lane, the row's sums being known.
template <class Config, class Line>
ONEPASS_FUNCTION void finish_lane(const arguments& a, place<Config, Line>& at,
                                  stage::terms<typename place<Config, Line>::lane> here,
                                  stage::pair<typename Config::arithmetic> saved,
                                  stage::pair<typename Config::arithmetic> totals) {
  using T = typename Config::arithmetic;
  using L = typename place<Config, Line>::lane;
  const L du = Line::row::backward(here.first, here.second, saved, totals, static_cast<T>(a.columns));
  L x{};
  if constexpr (Line::pre::needs_input) x = at.x();
  at.store_dx(Line::pre::backward(x, du, at));
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  constexpr int kHolds = Config::kHeldLanes, kSums = kSlots < Config >> 0 ? kSlots<Config> : 1;
  __shared__ stage::pair<T> shared[2 * row_threads<Config>::kWarps];
  extern __shared__ double dynamic[];
  row_threads<Config> threads(shared);
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  place<Config, Line> at(a);
  L sums[kHolds][kSums];
  T* memory = reinterpret_cast<T*>(dynamic);  // sums that registers cannot hold; a thread meets its own columns only
  at.set_sums(memory, a.columns);
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
#pragma unroll
    for (int slot = 0; slot < kSums; ++slot) sums[k][slot] = L(T(0));
  }
  if constexpr (!Config::kSumsInRegisters) {
    for_lanes<Config>(a, across, true, [&](int, int64 column, int count) {
      for (int slot = 0; slot < kSlots<Config>; ++slot) {
        for (int i = 0; i < count; ++i) memory[slot * a.columns + column + i] = T(0);
      }
    });
  }
  for (int64 base = static_cast<int64>(blockIdx.x) * Config::kDown; base < a.rows;
       base += static_cast<int64>(gridDim.x) * Config::kDown) {
    const int64 row = base + down;
    const bool valid = row < a.rows;
    at.set_row(row);
    const stage::pair<T> saved = valid ? saved_of<Line, T>(a, row) : stage::pair<T>{T(0), T(0)};
    stage::terms<L> held[kHolds];
    L first(T(0)), second(T(0));
    for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
      at.set_column(column, count);
      at.set_sums(sums[k]);
      held[k] = value_and_gradient<Line, L>(at, saved);
      const stage::terms<L> term = Line::row::backward_terms(held[k].first, held[k].second);
      first = first + where(first_n<L>(count), term.first, L(T(0)));
      second = second + where(first_n<L>(count), term.second, L(T(0)));
    });
    const stage::pair<T> totals = threads.reduce(stage::pair<T>{sum_lanes(first), sum_lanes(second)}, plus());
    for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
      at.set_column(column, count);
      at.set_sums(sums[k]);
      finish_lane<Config, Line>(a, at, held[k], saved, totals);
    });
  }
  for_lanes<Config>(a, across, true, [&](int k, int64 column, int count) {
#pragma unroll
    for (int slot = 0; slot < kSlots<Config>; ++slot) {
      if constexpr (!Config::kSumsInRegisters) {
        for (int i = 0; i < count; ++i) sums[k][slot].v[i] = memory[slot * a.columns + column + i];
      }
      write_part<Config>(a, sums[k][slot], slot, gridDim.x, blockIdx.x, column, across, down);
    }
  });
}

// The first kernel of a streamed backward: a block for a row, the row's two sums.
template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_totals(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  __shared__ stage::pair<T> shared[2 * row_threads<Config>::kWarps];
  row_threads<Config> threads(shared);
  place<Config, Line, true> at(a);
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    at.set_row(row);
    const stage::pair<T> saved = saved_of<Line, T>(a, row);
    L first(T(0)), second(T(0));
    for_lanes<Config>(a, static_cast<int>(threadIdx.x), true, [&](int, int64 column, int count) {
      at.set_column(column, count);
      const stage::terms<L> here = value_and_gradient<Line, L>(at, saved);
      const stage::terms<L> term = Line::row::backward_terms(here.first, here.second);
      first = first + where(first_n<L>(count), term.first, L(T(0)));
      second = second + where(first_n<L>(count), term.second, L(T(0)));
    });
    const stage::pair<T> totals = threads.reduce(stage::pair<T>{sum_lanes(first), sum_lanes(second)}, plus());
    if (threadIdx.x == 0) {
      static_cast<T*>(a.totals)[row] = totals.first;
      static_cast<T*>(a.totals)[a.rows + row] = totals.second;
    }
  }
}

// The second: tiles, as for an elementwise line.
template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_tiles(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  L sums[kSlots<Config> > 0 ? kSlots<Config> : 1];
#pragma unroll
  for (int slot = 0; slot < kSlots<Config>; ++slot) sums[slot] = L(T(0));
  for_tiles<Config>(a, [&](auto row_of, auto column_of) {
    place<Config, Line> at(a);
    at.set_sums(sums);
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      const int64 row = row_of(u);
      if (row >= a.rows) continue;
      at.set_row(row);
      at.set_column(column_of(u), count_at<Config::kLanes>(column_of(u), a.columns));
      const stage::pair<T> saved = saved_of<Line, T>(a, row);
      const T* totals = static_cast<const T*>(a.totals);
      finish_lane<Config, Line>(a, at, value_and_gradient<Line, L>(at, saved), saved,
                                stage::pair<T>{totals[row], totals[a.rows + row]});
    }
  });
  write_parts<Config>(a, sums);
}

ONEPASS_END
