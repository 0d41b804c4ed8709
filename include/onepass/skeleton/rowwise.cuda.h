// Lines with a row word on CUDA. kAcross threads of each of the kCluster blocks of a cluster share a row, kDown rows
// are in a block at a time, blocks stride over the rows. A row is held in registers, kHeldLanes lanes a thread.
// kHeldLanes = 0 streams rows that are too long for that: forward reads them once more for each pass (from shared
// memory where x's row fits it); backward is two kernels, one for the sums over each row and one in tiles for the rest.
//
// Config, besides place.cuda.h's: kAcross, kDown, kCluster, kHeldLanes, kSumsInRegisters; kUnroll for the tiles;
// kHoldsStored: the held values are numbers of x's type, and held so; kComputesAgain: backward does not hold the row's
// values and gradients, but makes them again from what the copies brought.
#pragma once

#include "onepass/skeleton/elementwise.cuda.h"

ONEPASS_BEGIN

// Numbers that a reduction combines.
template <class T, int N>
struct numbers {
  T v[N];
};

struct plus {
  template <class T, int N>
  ONEPASS_FUNCTION numbers<T, N> operator()(numbers<T, N> a, numbers<T, N> b) const {
#pragma unroll
    for (int i = 0; i < N; ++i) a.v[i] += b.v[i];
    return a;
  }
};
struct larger_of {
  template <class T>
  ONEPASS_FUNCTION numbers<T, 1> operator()(numbers<T, 1> a, numbers<T, 1> b) const {
    return {{max_number(a.v[0], b.v[0])}};
  }
};

// Mean and Σ (x - mean)² of two sets of numbers together (Chan, Golub, LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances", 1979). Sets of the same size, which doubles with each level:
template <class T>
struct merge_equal {
  T size;
  ONEPASS_FUNCTION numbers<T, 2> operator()(numbers<T, 2> a, numbers<T, 2> b) {
    const T apart = a.v[0] - b.v[0], half = T(0.5) * size;
    size += size;
    return {{T(0.5) * (a.v[0] + b.v[0]), fma_number(apart * apart, half, a.v[1] + b.v[1])}};
  }
};
// Of any size, which is the third number.
struct merge {
  template <class T>
  ONEPASS_FUNCTION numbers<T, 3> operator()(numbers<T, 3> a, numbers<T, 3> b) const {
    const T apart = a.v[0] - b.v[0], size = a.v[2] + b.v[2];
    const T inverse = size > T(0) ? reciprocal_number(size) : T(0);
    return {{T(0.5) * fma_number(apart, (a.v[2] - b.v[2]) * inverse, a.v[0] + b.v[0]),
             fma_number(apart * apart, a.v[2] * b.v[2] * inverse, a.v[1] + b.v[1]), size}};
  }
};
// Largest number m and Σ exp(x - m) (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018). -infinity
// shifts by nothing.
template <class T>
ONEPASS_FUNCTION T shift_of(T largest) {
  return largest == static_cast<T>(-kInfinity) ? T(0) : largest;
}
struct merge_exponentials {
  template <class T>
  ONEPASS_FUNCTION numbers<T, 2> operator()(numbers<T, 2> a, numbers<T, 2> b) const {
    const T largest = max_number(a.v[0], b.v[0]), shift = shift_of(largest);
    return {{largest, a.v[1] * exp_number(a.v[0] - shift) + b.v[1] * exp_number(b.v[0] - shift)}};
  }
};

// The blocks of a cluster.
ONEPASS_FUNCTION int cluster_rank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
ONEPASS_FUNCTION void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
ONEPASS_FUNCTION void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

ONEPASS_FUNCTION uint32 shared_address(const void* at) { return static_cast<uint32>(__cvta_generic_to_shared(at)); }
// Where an address in this block's shared memory is in another block's.
ONEPASS_FUNCTION uint32 in_block(uint32 address, int rank) {
  uint32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// A mailbox counts the bytes that the blocks of a cluster send to a block: one reduction's are its phase.
ONEPASS_FUNCTION void open_mailbox(uint64* box) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(box)) : "memory");
}
ONEPASS_FUNCTION void expect(uint64* box, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(box)), "r"(bytes)
               : "memory");
}
ONEPASS_FUNCTION void send(uint32 to, uint32 box, float value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(box)
               : "memory");
}
ONEPASS_FUNCTION void send(uint32 to, uint32 box, double value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
               "l"(__double_as_longlong(value)), "r"(box)
               : "memory");
}
ONEPASS_FUNCTION void wait_for_mail(uint64* box, int phase) {
  uint32 done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(box)), "r"(phase)
        : "memory");
  }
}

// Combines over the threads of a row; every thread gets the same result.
template <class Config>
class row_threads {
 public:
  using T = typename Config::arithmetic;
  static constexpr int kWarps = Config::kAcross > 32 ? Config::kAcross / 32 : 1;
  static constexpr int kWidth = Config::kAcross < 32 ? Config::kAcross : 32;
  static constexpr int kCluster = Config::kCluster, kParts = kWarps * kCluster, kMost = 3;
  static constexpr int kRows = kWarps > 1 ? Config::kDown : 1;  // that share a block, each with its own barrier
  struct slots {  // two sets take turns: one barrier a reduction is enough
    T of[kRows][2][kParts][kMost];
    uint64 mailbox[2];
  };

  explicit ONEPASS_FUNCTION row_threads(slots& shared) : shared_(shared) {
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) {
        open_mailbox(&shared.mailbox[0]);
        open_mailbox(&shared.mailbox[1]);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      arrive_at_cluster();  // no one sends before all have opened theirs
    }
  }

  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> own, Combine combine) {
    own = in_warp(own, combine, kWidth);
    if constexpr (kParts == 1) return own;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % kWarps,
              row = static_cast<int>(threadIdx.x) / 32 / kWarps;
    auto& set = shared_.of[row][turn_];
    if constexpr (kCluster > 1) {
      if (!begun_) wait_for_cluster();
      begun_ = true;
      uint64* box = &shared_.mailbox[turn_];
      if (threadIdx.x == 0) expect(box, kParts * N * static_cast<int>(sizeof(T)));
      if (lane < kCluster) {
        const uint32 there = in_block(shared_address(set[cluster_rank() * kWarps + warp]), lane),
                     its_box = in_block(shared_address(box), lane);
#pragma unroll
        for (int i = 0; i < N; ++i) send(there + i * static_cast<uint32>(sizeof(T)), its_box, own.v[i]);
      }
      wait_for_mail(box, phase_);
      phase_ ^= turn_;
    } else {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) set[warp][i] = own.v[i];
      }
      if constexpr (kRows == 1) __syncthreads();
      else asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "n"(Config::kAcross) : "memory");
    }
    turn_ ^= 1;
    own = at(set[lane % kParts], own);
    for (int part = lane + 32; part < kParts; part += 32) own = combine(own, at(set[part], own));
    return in_warp(own, combine, kParts < 32 ? kParts : 32);
  }

 private:
  template <int N>
  static ONEPASS_FUNCTION numbers<T, N> at(const T* slot, numbers<T, N> value) {
#pragma unroll
    for (int i = 0; i < N; ++i) value.v[i] = slot[i];
    return value;
  }
  template <int N, class Combine>
  static ONEPASS_FUNCTION numbers<T, N> in_warp(numbers<T, N> own, Combine& combine, int width) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance >= width) continue;
      numbers<T, N> other;
#pragma unroll
      for (int i = 0; i < N; ++i) other.v[i] = __shfl_xor_sync(0xffffffffu, own.v[i], distance);
      own = combine(own, other);
    }
    return own;
  }
  slots& shared_;
  int turn_ = 0, phase_ = 0;
  bool begun_ = false;
};

struct nothing {
  ONEPASS_FUNCTION void operator()(int64, int) const {}
};

// The first column of this thread's lane k, or of the block's.
template <class Config>
ONEPASS_FUNCTION typename Config::index column_of(int k, int across) {
  const int block = Config::kCluster > 1 ? cluster_rank() : 0;
  return ((block * Config::kHeldLanes + k) * Config::kAcross + across) * Config::kLanes;
}

// A thread's lanes of the row: body(k, column, count), k counting from 0. Where lanes fill the row exactly, the
// compiler knows the count, and no number is masked. after(column, count) follows on four bodies of a streamed row: so
// many loads are in flight even where it must not be passed.
template <class Config, class Body, class After = nothing>
ONEPASS_FUNCTION void for_lanes(const arguments& a, int across, const Body& body, const After& after = {}) {
  constexpr int V = Config::kLanes;
  auto count = [&](typename Config::index column) { return Config::kExact ? V : count_at<V>(column, a.columns); };
  if constexpr (Config::kHeldLanes > 0) {
#pragma unroll
    for (int k = 0; k < Config::kHeldLanes; ++k) {
      const auto column = column_of<Config>(k, across);
      body(k, column, count(column));
    }
  } else {
    constexpr int kGroup = 4, kStep = Config::kAcross * V;
    typename Config::index column = across * V;
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
  static constexpr bool kHeld = Config::kHeldLanes > 0 && !Config::kHoldsStored;

  ONEPASS_FUNCTION thread_row(const arguments& a, int across, row_threads<Config>& threads, lane* held,
                              const Value& value)
      : a_(a), across_(across), threads_(threads), held_(held), value_(value) {}

  ONEPASS_FUNCTION T inverse_columns() const { return static_cast<T>(a_.inverse_columns); }
  template <class F>
  ONEPASS_FUNCTION T sum(const F& f) {
    lane total(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      total = total + where(first_n<lane>(count), f(value_(k, column, count)), lane(T(0)));
    });
    return threads_.reduce(numbers<T, 1>{{sum_lanes(total)}}, plus()).v[0];
  }
  ONEPASS_FUNCTION T squares() {
    lane total(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      const lane value = where(first_n<lane>(count), value_(k, column, count), lane(T(0)));
      total = fma(value, value, total);
    });
    return threads_.reduce(numbers<T, 1>{{sum_lanes(total)}}, plus()).v[0];
  }
  template <class F>
  ONEPASS_FUNCTION stage::pair<T> sum_pair(const F& f) {
    lane first(T(0)), second(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      const stage::terms<lane> value = f(value_(k, column, count));
      first = first + where(first_n<lane>(count), value.first, lane(T(0)));
      second = second + where(first_n<lane>(count), value.second, lane(T(0)));
    });
    const auto total = threads_.reduce(numbers<T, 2>{{sum_lanes(first), sum_lanes(second)}}, plus());
    return {total.v[0], total.v[1]};
  }
  // Of a held row in one reduction: each thread's own numbers in two passes, then the threads' results together.
  ONEPASS_FUNCTION stage::pair<T> moments() {
    if constexpr (Config::kHeldLanes == 0) return stage::moments_in_two_passes(*this);
    T size = Config::kHeldLanes * Config::kLanes;
    if constexpr (!Config::kExact) {
      int present = 0;
      for_lanes<Config>(a_, across_, [&](int, typename Config::index, int count) { present += count; });
      size = static_cast<T>(present);
    }
    const T inverse = Config::kExact ? T(1.0 / (Config::kHeldLanes * Config::kLanes))
                                     : (size > T(0) ? reciprocal_number(size) : T(0));
    lane total(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      total = total + where(first_n<lane>(count), value_(k, column, count), lane(T(0)));
    });
    const T mean = sum_lanes(total) * inverse;
    lane first(T(0)), second(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      const lane centred = where(first_n<lane>(count), value_(k, column, count) - lane(mean), lane(T(0)));
      if constexpr (!kShort) first = first + centred;
      second = fma(centred, centred, second);
    });
    const T off = sum_lanes(first), rest = off * inverse;  // what rounding took from the mean
    const T squares = sum_lanes(second) - rest * off;
    if constexpr (Config::kExact) {
      const auto all = threads_.reduce(numbers<T, 2>{{mean + rest, squares}}, merge_equal<T>{size});
      return {all.v[0], all.v[1] * inverse_columns()};
    } else {
      const auto all = threads_.reduce(numbers<T, 3>{{mean + rest, squares, size}}, merge());
      return {all.v[0], all.v[1] * inverse_columns()};
    }
  }
  // Of a held row in one reduction, each thread with its own shift at first.
  ONEPASS_FUNCTION stage::pair<T> exponentials() {
    const lane lowest(static_cast<T>(-kInfinity));
    lane best = lowest;
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      best = ONEPASS_TARGET::max(best, where(first_n<lane>(count), value_(k, column, count), lowest));
    });
    T largest = max_lanes(best);
    if constexpr (Config::kHeldLanes == 0) largest = threads_.reduce(numbers<T, 1>{{largest}}, larger_of()).v[0];
    const T shift = shift_of(largest);
    lane total(T(0));
    for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
      const lane value = exp(value_(k, column, count) - lane(shift));
      if constexpr (kHeld) held_[k] = value;
      total = total + where(first_n<lane>(count), value, lane(T(0)));
    });
    if constexpr (Config::kHeldLanes == 0)
      return {shift, threads_.reduce(numbers<T, 1>{{sum_lanes(total)}}, plus()).v[0]};
    const auto all = threads_.reduce(numbers<T, 2>{{largest, sum_lanes(total)}}, merge_exponentials());
    const T whole_shift = shift_of(all.v[0]);
    if constexpr (kHeld) {
      const lane rescaled(exp_number(shift - whole_shift));
#pragma unroll
      for (int k = 0; k < Config::kHeldLanes; ++k) held_[k] = held_[k] * rescaled;
    }
    return {whole_shift, all.v[1]};
  }

 private:
  const arguments& a_;
  int across_;
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

// Copies of the rows that a thread's lanes are part of, kStages rows ahead: a thread brings and reads its own lanes
// only.
template <class Config, class Line>
class row_copies {
 public:
  using place_of = place<Config, Line>;
  static constexpr bool kAny = place_of::kStreamed > 0;

  ONEPASS_FUNCTION row_copies(const arguments& a, char* shared, int across, int64 row, int64 step)
      : a_(a), across_(across), step_(step), ahead_(a) {
    ahead_.set_copies(shared);
#pragma unroll
    for (int stage = 0; stage < Config::kStages; ++stage) bring(row + stage * step, stage);
  }
  // The copies of the next row have arrived; returns their stage.
  ONEPASS_FUNCTION int wait() {
    if constexpr (kAny) wait_for_copy_groups<Config::kStages - 1>();
    return stage_;
  }
  // The place of those copies may take others: those of the row kStages steps behind `row`.
  ONEPASS_FUNCTION void release(int64 row) {
    bring(row + Config::kStages * step_, stage_);
    stage_ = stage_ + 1 < Config::kStages ? stage_ + 1 : 0;
  }

 private:
  ONEPASS_FUNCTION void bring(int64 row, int stage) {
    if constexpr (kAny) {
      if (row < a_.rows) {
        ahead_.set_row(row);
        ahead_.set_stage(stage);
        for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          ahead_.set_column(column, count);
          ahead_.set_lane(k);
          ahead_.bring();
        });
      }
      close_copy_group();
    }
  }
  const arguments& a_;
  const int across_;
  const int64 step_;
  place_of ahead_;
  int stage_ = 0;
};

template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_forward(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  using memory_of_x = memory<Config::kX, Config::kLanes, Config::kAccess>;
  constexpr bool kHeld = Config::kHeldLanes > 0, kStored = Config::kHoldsStored;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  extern __shared__ __align__(128) double dynamic[];
  place<Config, Line> at(a), next(a);
  at.set_row_memory(dynamic);
  next.set_row_memory(dynamic);
  at.set_copies(reinterpret_cast<char*>(dynamic));
  const int64 first = static_cast<int64>(blockIdx.x / Config::kCluster) * Config::kDown;
  const int64 step = static_cast<int64>(gridDim.x / Config::kCluster) * Config::kDown;
  row_copies<Config, Line> copies(a, reinterpret_cast<char*>(dynamic), across, first + down, step);
  if constexpr (Config::kRowInShared) {
    at.set_row(first);
    for_lanes<Config>(a, across, [&](int, typename Config::index column, int count) {
      at.set_column(column, count);
      at.bring_x();
    });
  }
  L held[kHeld && !kStored ? Config::kHeldLanes : 1];
  typename memory_of_x::buffer stored[kStored ? Config::kHeldLanes : 1];
  // The bound is the same for all threads of a block: shuffles and barriers need every thread.
  for (int64 base = first; base < a.rows; base += step) {
    const int64 row = base + down;
    const bool valid = Config::kDown == 1 || row < a.rows;
    at.set_row(row, valid);
    at.set_stage(copies.wait());
    if constexpr (Config::kRowInShared) wait_for_copies();
    if constexpr (kHeld) {
      for_lanes<Config>(a, across, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        at.set_lane(k);
        if constexpr (kStored && same_type<typename Line::pre, chain<>>) stored[k] = at.stored_x();
        else if constexpr (kStored) stored[k] = memory_of_x::buffer_of(Line::pre::forward(at.x(), at));
        else held[k] = Line::pre::forward(at.x(), at);
      });
    }
    const auto value = [&](int k, typename Config::index column, int count) {
      if constexpr (kStored) return memory_of_x::template numbers_of<T>(memory_of_x::anew(stored[k]));
      else if constexpr (kHeld) return held[k];
      at.set_column(column, count);
      return Line::pre::recompute(at.x(), at);
    };
    thread_row<Config, decltype(value)> whole(a, across, threads, held, value);
    const stage::pair<T> saved = Line::row::statistics(whole, row_parameter<Config, Line>(a));
    if (Config::kSavesStatistics && valid && across == 0 && (Config::kCluster == 1 || cluster_rank() == 0)) {
      static_cast<T*>(a.statistics)[row] = saved.first;
      if constexpr (Line::row::about.statistics > 1) static_cast<T*>(a.statistics)[a.rows + row] = saved.second;
    }
    const auto finish = [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      at.set_lane(k);
      L u;
      if constexpr (kHeld) u = value(k, column, count);
      else u = Line::pre::forward(at.x(), at);
      const L z = Line::row::template forward<decltype(whole)>(u, saved);
      at.store_y(Line::post::forward(z, at));
    };
    if (Config::kRowInShared && base + step < a.rows) {  // the next row arrives while this one leaves
      next.set_row(row + step);
      for_lanes<Config>(a, across, finish, [&](typename Config::index column, int count) {
        next.set_column(column, count);
        next.bring_x();
      });
    } else {
      for_lanes<Config>(a, across, finish);
    }
    copies.release(row);
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
  const L du = Line::row::backward(here.first, here.second, saved, totals, static_cast<T>(a.inverse_columns));
  L x{};
  if constexpr (Line::pre::needs_input) x = at.x();
  at.store_dx(Line::pre::backward(x, du, at));
}

// Backward of held rows.
template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  using place_of = place<Config, Line>;
  constexpr int kHolds = Config::kHeldLanes, kSums = kSlots < Config >> 0 ? kSlots<Config> : 1;
  __shared__ typename row_threads<Config>::slots shared;
  extern __shared__ __align__(128) double dynamic[];
  row_threads<Config> threads(shared);
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  place_of at(a);
  place<Config, Line, true> again(a);
  char* brought = reinterpret_cast<char*>(dynamic);
  T* memory = reinterpret_cast<T*>(brought + Config::kStages * place_of::kStageBytes);
  at.set_copies(brought);
  again.set_copies(brought);
  const int64 first_row = static_cast<int64>(blockIdx.x / Config::kCluster) * Config::kDown;
  const int64 step = static_cast<int64>(gridDim.x / Config::kCluster) * Config::kDown;
  row_copies<Config, Line> copies(a, brought, across, first_row + down, step);

  L sums[kHolds][kSums];  // of columns; where registers cannot hold them in memory, where a thread meets its own only
  constexpr int kOwn = kHolds * Config::kAcross * Config::kLanes;  // columns of this block
  const int64 own = column_of<Config>(0, 0);
  at.set_sums(memory - own, kOwn);
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
#pragma unroll
    for (int slot = 0; slot < kSums; ++slot) sums[k][slot] = L(T(0));
  }
  if constexpr (!Config::kSumsInRegisters) {
    for_lanes<Config>(a, across, [&](int, typename Config::index column, int) {
      for (int slot = 0; slot < kSlots<Config>; ++slot) {
        for (int i = 0; i < Config::kLanes; ++i) memory[slot * kOwn + column - own + i] = T(0);
      }
    });
  }
  const auto saved_at = [&](int64 row) {
    return row < a.rows ? saved_of<Line, T>(a, row) : stage::pair<T>{T(0), T(0)};
  };
  stage::pair<T> next_saved = saved_at(first_row + down);
  for (int64 base = first_row; base < a.rows; base += step) {
    const int64 row = base + down;
    at.set_row(row, Config::kDown == 1 || row < a.rows);
    const stage::pair<T> saved = next_saved;
    next_saved = saved_at(row + step);
    const int stage = copies.wait();
    at.set_stage(stage);
    again.set_stage(stage);
    stage::terms<L> held[Config::kComputesAgain ? 1 : kHolds];
    stage::terms<L> total{L(T(0)), L(T(0))};
    for_lanes<Config>(a, across, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      at.set_lane(k);
      at.set_sums(sums[k]);
      const stage::terms<L> here = value_and_gradient<Line, L>(at, saved);
      if constexpr (!Config::kComputesAgain) held[k] = here;
      Line::row::add_terms(here.first, where(first_n<L>(count), here.second, L(T(0))), total);
    });
    const auto totals = threads.reduce(numbers<T, 2>{{sum_lanes(total.first), sum_lanes(total.second)}}, plus());
    for_lanes<Config>(a, across, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      at.set_lane(k);
      at.set_sums(sums[k]);
      stage::terms<L> here;
      if constexpr (Config::kComputesAgain) {
        again.set_row(row, Config::kDown == 1 || row < a.rows);
        again.set_column(column, count);
        again.set_lane(k);
        here = value_and_gradient<Line, L>(again, saved);
      } else {
        here = held[k];
      }
      finish_lane<Config, Line>(a, at, here, saved, stage::pair<T>{totals.v[0], totals.v[1]});
    });
    copies.release(row);
  }
  let_next_kernel_begin();
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
    const int64 begin = column_of<Config>(k, 0);
#pragma unroll
    for (int slot = 0; slot < kSlots<Config>; ++slot) {
      if constexpr (!Config::kSumsInRegisters) {
        const int64 column = begin - own + across * Config::kLanes;
        for (int i = 0; i < Config::kLanes; ++i) sums[k][slot].v[i] = memory[slot * kOwn + column + i];
      }
      write_part<Config>(a, sums[k][slot], slot, gridDim.x / Config::kCluster, blockIdx.x / Config::kCluster, begin,
                         across, down);
    }
  }
}

// The first kernel of a streamed backward: a block for a row, the row's two sums.
template <class Config, class Line>
ONEPASS_FUNCTION void rowwise_backward_totals(const arguments& a) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;
  __shared__ typename row_threads<Config>::slots shared;
  row_threads<Config> threads(shared);
  place<Config, Line, true> at(a);
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    at.set_row(row);
    const stage::pair<T> saved = saved_of<Line, T>(a, row);
    stage::terms<L> total{L(T(0)), L(T(0))};
    for_lanes<Config>(a, static_cast<int>(threadIdx.x), [&](int, typename Config::index column, int count) {
      at.set_column(column, count);
      const stage::terms<L> here = value_and_gradient<Line, L>(at, saved);
      Line::row::add_terms(here.first, where(first_n<L>(count), here.second, L(T(0))), total);
    });
    const auto totals = threads.reduce(numbers<T, 2>{{sum_lanes(total.first), sum_lanes(total.second)}}, plus());
    if (threadIdx.x == 0) {
      static_cast<T*>(a.totals)[row] = totals.v[0];
      static_cast<T*>(a.totals)[a.rows + row] = totals.v[1];
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
      const auto row = row_of(u);
      if (row >= static_cast<typename Config::index>(a.rows)) continue;
      at.set_row(row);
      at.set_column(column_of(u), Config::kExact ? Config::kLanes : count_at<Config::kLanes>(column_of(u), a.columns));
      const stage::pair<T> saved = saved_of<Line, T>(a, row);
      const T* totals = static_cast<const T*>(a.totals);
      finish_lane<Config, Line>(a, at, value_and_gradient<Line, L>(at, saved), saved,
                                stage::pair<T>{totals[row], totals[a.rows + row]});
    }
  });
  write_parts<Config>(a, sums);
}

ONEPASS_END
