// Lines with a row word on CUDA. kAcross threads share a row, kDown rows are in a block at a time, blocks stride over
// the rows. A row is held in registers, kHeldLanes lanes a thread; kHeldLanes = 0 streams rows that are too long for
// that, reading them once more for each pass.
//
// Config, besides place.cuda.h's: kAcross, kDown, kHeldLanes, kSumsInRegisters, kSumsInShared.
#pragma once

#include "onepass/skeleton/place.cuda.h"

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

// A thread's lanes of the row: body(k, column, count), k counting from 0.
template <class Config, class Body>
ONEPASS_FUNCTION void for_lanes(const arguments& a, int across, bool valid, const Body& body) {
  constexpr int V = Config::kLanes;
  if constexpr (Config::kHeldLanes > 0) {
#pragma unroll
    for (int k = 0; k < Config::kHeldLanes; ++k) {
      const int64 column = static_cast<int64>(k * Config::kAcross + across) * V;
      body(k, column, valid ? count_at<V>(column, a.columns) : 0);
    }
  } else {
    if (!valid) return;
    for (int64 column = static_cast<int64>(across) * V; column < a.columns; column += Config::kAcross * V) {
      body(0, column, count_at<V>(column, a.columns));
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

  ONEPASS_FUNCTION thread_row(const arguments& a, int across, bool valid, row_threads<Config>& threads, lane* held, const Value& value)
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
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross, down = static_cast<int>(threadIdx.x) / Config::kAcross;
  place<Config, Line> at(a);
  L held[kHeld ? Config::kHeldLanes : 1];
  // The bound is the same for all threads of a block: shuffles and barriers need every thread.
  for (int64 base = static_cast<int64>(blockIdx.x) * Config::kDown; base < a.rows; base += static_cast<int64>(gridDim.x) * Config::kDown) {
    const int64 row = base + down;
    const bool valid = row < a.rows;
    at.set_row(row);
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
    for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
      at.set_column(column, count);
      L u;
      if constexpr (kHeld) u = held[k];
      else u = Line::pre::forward(at.x(), at);
      const L z = Line::row::template forward<decltype(whole)>(u, saved);
      at.store_y(Line::post::forward(z, at));
    });
  }
}

// u, z and dz of one lane in backward.
template <class Line, class L, class Place, class T>
ONEPASS_FUNCTION stage::terms<L> value_and_gradient(Place& at, stage::pair<T> saved) {
  L x{};
  if constexpr (!Line::pre::resumes) x = at.x();
  const L z = Line::row::recompute(Line::pre::recompute(x, at), saved);
  return {z, Line::post::backward(z, at.dy(), at)};
}

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  constexpr bool kHeld = Config::kHeldLanes > 0;
  constexpr int kHolds = kHeld ? Config::kHeldLanes : 1, kSums = kSlots<Config> > 0 ? kSlots<Config> : 1;
  __shared__ stage::pair<T> shared[2 * row_threads<Config>::kWarps];
  extern __shared__ double dynamic[];
  row_threads<Config> threads(shared);
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross, down = static_cast<int>(threadIdx.x) / Config::kAcross;
  place<Config, Line> at(a);
  L sums[kHolds][kSums];
  // Sums that registers cannot hold: shared memory, or the block's own part. A thread meets its own columns only.
  double* part = static_cast<double*>(a.column_partial) + static_cast<int64>(blockIdx.x) * a.columns;
  const int64 part_stride = static_cast<int64>(gridDim.x) * a.columns;
  sum_in_memory<Config>* memory = reinterpret_cast<sum_in_memory<Config>*>(Config::kSumsInShared ? dynamic : part);
  const int64 memory_stride = Config::kSumsInShared ? a.columns : part_stride;
  if constexpr (Config::kSumsInRegisters) {
#pragma unroll
    for (int k = 0; k < kHolds; ++k) {
#pragma unroll
      for (int slot = 0; slot < kSums; ++slot) sums[k][slot] = L(T(0));
    }
  } else if constexpr (kSlots<Config> > 0) {
    at.set_sums(memory, memory_stride);
    for_lanes<Config>(a, across, true, [&](int, int64 column, int count) {
      for (int slot = 0; slot < kSlots<Config>; ++slot) {
        for (int i = 0; i < count; ++i) memory[slot * memory_stride + column + i] = 0;
      }
    });
  }
  for (int64 base = static_cast<int64>(blockIdx.x) * Config::kDown; base < a.rows; base += static_cast<int64>(gridDim.x) * Config::kDown) {
    const int64 row = base + down;
    const bool valid = row < a.rows;
    at.set_row(row);
    stage::pair<T> saved{};
    if (valid) {
      saved.first = static_cast<const T*>(a.statistics)[row];
      if constexpr (Line::row::about.statistics > 1) saved.second = static_cast<const T*>(a.statistics)[a.rows + row];
    }
    stage::terms<L> held[kHolds];
    L first(T(0)), second(T(0));
    place<Config, Line, true> quiet(a);
    if constexpr (!kHeld) quiet.set_row(row);
    for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
      stage::terms<L> here;
      if constexpr (kHeld) {
        at.set_column(column, count);
        at.set_sums(sums[k]);
        here = held[k] = value_and_gradient<Line, L>(at, saved);
      } else {
        quiet.set_column(column, count);
        here = value_and_gradient<Line, L>(quiet, saved);
      }
      const stage::terms<L> term = Line::row::backward_terms(here.first, here.second);
      first = first + where(first_n<L>(count), term.first, L(T(0)));
      second = second + where(first_n<L>(count), term.second, L(T(0)));
    });
    const stage::pair<T> totals = threads.reduce(stage::pair<T>{sum_lanes(first), sum_lanes(second)}, plus());
    for_lanes<Config>(a, across, valid, [&](int k, int64 column, int count) {
      at.set_column(column, count);
      at.set_sums(sums[k]);
      stage::terms<L> here;
      if constexpr (kHeld) here = held[k];
      else here = value_and_gradient<Line, L>(at, saved);
      const L du = Line::row::backward(here.first, here.second, saved, totals, static_cast<T>(a.columns));
      L x{};
      if constexpr (Line::pre::needs_input) x = at.x();
      at.store_dx(Line::pre::backward(x, du, at));
    });
  }
  if constexpr (kSlots<Config> > 0 && Config::kSumsInRegisters) {
#pragma unroll
    for (int k = 0; k < kHolds; ++k) {
#pragma unroll
      for (int slot = 0; slot < kSums; ++slot) {
        write_part<Config>(a, sums[k][slot], slot, gridDim.x, blockIdx.x, static_cast<int64>(k * Config::kAcross + across) * Config::kLanes, across, down);
      }
    }
  } else if constexpr (kSlots<Config> > 0 && Config::kSumsInShared) {
    for_lanes<Config>(a, across, true, [&](int, int64 column, int count) {
      for (int slot = 0; slot < kSlots<Config>; ++slot) {
        for (int i = 0; i < count; ++i) part[slot * part_stride + column + i] = memory[slot * memory_stride + column + i];
      }
    });
  }
}

ONEPASS_END
