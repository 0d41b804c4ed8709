// Lines with a row word on CUDA. kAcross threads of each of the kCluster blocks of a cluster share a row, kDown rows
// are in a block at a time, blocks stride over the rows. A thread has kHeldVectors vectors of a row. Either it holds
// them in registers from the row's statistics (backward: its sums) to its result; or it recomputes them (kRecomputes)
// from async copies, and may read the next row while this row's statistics are reduced (kAhead). Rows that are too long
// for both are in kernel/row/split_rows.cuda.h.
//
// Config, besides kernel/common/cursor.cuda.h's: kAcross, kDown, kCluster, kHeldVectors, kRecomputes, kAhead,
// kSumsInRegisters.
#pragma once

#include "onepass/kernel/row/elementwise.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"

ONEPASS_BEGIN

// The rows of a thread: its column, the first row, the step from one to the next, and what all are below.
template <class Config>
struct rows_of_thread {
  explicit ONEPASS_FUNCTION rows_of_thread(const arguments& a)
      : share(share_of<Config>(a, blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster)),
        first(static_cast<int64>(share.block) * Config::kDown + down),
        step(static_cast<int64>(share.blocks) * Config::kDown) {}
  ONEPASS_FUNCTION int64 end(const arguments& a) const { return a.rows + down; }
  ONEPASS_FUNCTION int64 row(int64 place) const { return place; }

  int across = static_cast<int>(threadIdx.x) % Config::kAcross, down = static_cast<int>(threadIdx.x) / Config::kAcross;
  share_of_blocks share;  // of clusters, where a row has some
  int64 first, step;
};
// In groups they are counted in the block's own order: places, of which some have no row.
template <class Config>
requires kGrouped<Config>
struct rows_of_thread<Config> {
  explicit ONEPASS_FUNCTION rows_of_thread(const arguments& a)
      : share(share_of<Config>(a, blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster)),
        first(down),
        walk(a, share) {}
  ONEPASS_FUNCTION int64 end(const arguments&) const { return int64{walk.steps()} * Config::kDown + down; }
  ONEPASS_FUNCTION static unsigned step_of(int64 place) { return static_cast<unsigned>(place) / Config::kDown; }
  ONEPASS_FUNCTION int64 row(int64 place) const { return walk.row(step_of(place), down); }

  int across = static_cast<int>(threadIdx.x) % Config::kAcross, down = static_cast<int>(threadIdx.x) / Config::kAcross;
  share_of_blocks share;
  int64 first;
  static constexpr int64 step = Config::kDown;
  group_walk<Config, Config::kDown> walk;
};

// Copies of the rows that a thread's vectors are part of, kStages rows ahead: a thread loads and reads its own vectors
// only; where rows do not begin at 16 bytes, vectors reach into windows that other threads of the row loaded.
template <class Config, class Line>
class row_copies {
 public:
  using cursor_type = cursor<Config, Line>;
  static constexpr bool kAny = Config::kStreams != 0;

  ONEPASS_FUNCTION row_copies(const arguments& a, char* shared, const rows_of_thread<Config>& thread,
                              const row_threads<Config>& threads)
      : a_(a), thread_(thread), threads_(threads), ahead_(a) {
    ahead_.set_copies(shared, thread.down);
    if constexpr (Config::kLoadedOnce != 0) each_vector([&] { ahead_.load_async_once(); });
#pragma unroll
    for (int stage = 0; stage < Config::kStages; ++stage) load_async(thread.first + stage * thread.step, stage);
  }
  // The copies of the next row have arrived; returns their stage.
  ONEPASS_FUNCTION int wait() {
    if constexpr (kAny) wait_for_copy_groups<Config::kStages - 1 - (Config::kAhead ? 1 : 0)>();
    if constexpr (kAny && cursor_type::kInWindows) threads_.meet();
    const int stage = next_;
    next_ = stage + 1 < Config::kStages ? stage + 1 : 0;
    return stage;
  }
  // Row `row`'s buffer is free: starts to load the row kStages steps later. So is its results' buffer.
  ONEPASS_FUNCTION void release(int64 row, int stage) {
    if constexpr (cursor_type::kInWindows) threads_.meet();
    load_async(row + Config::kStages * thread_.step, stage);
  }

 private:
  ONEPASS_FUNCTION void load_async(int64 place, int stage) {
    if constexpr (kAny) {
      const int64 row = thread_.row(place);
      if (row < a_.rows) {
        ahead_.set_row(row);
        ahead_.set_stage(stage);
        each_vector([&] { ahead_.load_async(); });
      }
      close_copy_group();
    }
  }
  template <class Body>
  ONEPASS_FUNCTION void each_vector(const Body& body) {
    const auto at = [&](int k, typename Config::index column, int count) {
      ahead_.set_column(column, count);
      ahead_.set_vector(k);
      body();
    };
    for_vectors<Config>(a_, thread_.across, at);
    if (cursor_type::kInWindows && thread_.across == 0)
      at(Config::kHeldVectors, column_of<Config>(Config::kHeldVectors, 0), 0);
  }
  const arguments& a_;
  const rows_of_thread<Config>& thread_;
  const row_threads<Config>& threads_;
  cursor_type ahead_;
  int next_ = 0;
};

// Calls saved = reads(row, stage), then finishes(row, stage, saved) for each of the thread's rows; with kAhead the next
// row is read before a row is finished. A block's threads make the same calls, with rows past the last one too:
// shuffles and barriers need every thread.
template <class Config, class Saved, class Copies, class Reads, class Finishes>
ONEPASS_FUNCTION void for_rows(const arguments& a, const rows_of_thread<Config>& thread, Copies& copies,
                               const Reads& reads, const Finishes& finishes) {
  const int64 step = thread.step, end = thread.end(a);
  if constexpr (!Config::kAhead) {
    for (int64 row = thread.first; row < end; row += step) {
      const int stage = copies.wait();
      finishes(row, stage, reads(row, stage));
      copies.release(row, stage);
    }
  } else {
    int stage = 0, stage_before = 0;
    Saved saved{}, saved_before{};
    for (int64 row = thread.first; row < end + step; row += step) {
      if (row < end) {
        stage = copies.wait();
        saved = reads(row, stage);
      }
      if (row != thread.first) {
        finishes(row - step, stage_before, saved_before);
        copies.release(row - step, stage_before);
      }
      stage_before = stage;
      saved_before = saved;
    }
  }
}

// Results that went to shared memory leave from there, when all of the row's threads have given theirs.
template <class Config, class Line>
ONEPASS_FUNCTION void store_row(const row_threads<Config>& threads, cursor<Config, Line>& at) {
  if constexpr (Config::kStaged != 0) {
    threads.meet();
    at.store_results(column_of<Config>(0, 0));
  }
}

// Behind a row whose result is stored: nothing. Where it is a few elements, kernel/linear/small_n.cuda.h has what takes
// them.
struct nothing_behind {};

// What words behind a row word take of a thread's vectors, loaded before the row's statistics: behind them each load
// would be waited for.
template <class Config, class Line>
class early_operands {
 public:
  using cursor_type = cursor<Config, Line>;
  ONEPASS_FUNCTION void load(const cursor_type& at, int k) {
    if constexpr (Config::kEarly != 0) at.load_early(of_vector_[k]);
  }
  ONEPASS_FUNCTION void give(cursor_type& at, int k) const {
    if constexpr (Config::kEarly != 0) at.set_early(of_vector_[k]);
  }

 private:
  static constexpr bool kAny = Config::kEarly != 0;
  uint4 of_vector_[kAny ? Config::kHeldVectors : 1][kAny ? cursor_type::kEarlyOperands : 1];
};

// Forward of the segments before the last, over the values that a thread holds: each row word's statistics, its
// result, and the words behind it.
template <class Config, class Line, int I = 0, class Threads, class Value>
ONEPASS_FUNCTION void earlier_segments(const arguments& a, int across, Threads& threads, cursor<Config, Line>& at,
                                       pack<typename Config::arithmetic, Config::kVectorSize>* held, const Value& value,
                                       const early_operands<Config, Line>& early, int64 row, bool is_saver) {
  if constexpr (I + 1 < Line::segments) {
    static_assert(!Config::kRecomputes && !Config::kAhead, "values of several row words are held");
    using segment = typename Line::template segment_at<I>;
    const auto of_row = statistics<Config, segment>(a, row, across, threads, held, value);
    if constexpr (!gives_number<typename segment::row>) {
      for_vectors<Config>(a, across, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        at.set_vector(k);
        early.give(at, k);
        using how = thread_row<Config, Threads, Value>;
        const auto z = row_forward<typename segment::row, how>(held[k], of_row.for_held, at);
        held[k] = segment::post::forward(z, at);
      });
    }
    if (is_saver) {
      if constexpr (Config::kSavesStatistics) save<Line, Config::kX, I>(a, row, of_row.saved);
      store_number<Config, segment>(a, row, of_row.saved);
    }
    earlier_segments<Config, Line, I + 1>(a, across, threads, at, held, value, early, row, is_saver);
  }
}

// The end of a row whose last word is an ending: its number, and the values kept on the way there that a row which is
// held has stored already.
template <class Config, class Line>
ONEPASS_FUNCTION void finish_number(const arguments& a, const rows_of_thread<Config>& thread,
                                    const row_threads<Config>& threads, cursor<Config, Line>& at, int64 row,
                                    word::row_numbers<typename Config::arithmetic> saved, bool is_saver) {
  if constexpr (Config::kRecomputes && Line::keeps > 0) {
    for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      at.set_vector(k);
      Line::pre::forward(at.x(), at);
    });
  }
  store_row(threads, at);
  if (!is_saver) return;
  if constexpr (Config::kSavesStatistics) save<Line, Config::kX>(a, row, saved);
  store_number<Config, Line>(a, row, saved);
}

template <class Config, class Line, class Behind = nothing_behind>
ONEPASS_FUNCTION void rowwise_forward(const arguments& a, Behind&& behind = {}) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  constexpr bool kHeld = !Config::kRecomputes;
  __shared__ typename row_threads<Config>::slots shared;
  extern __shared__ __align__(128) double dynamic[];
  row_threads<Config> threads(shared);
  const rows_of_thread<Config> thread(a);
  cursor<Config, Line> at(a);
  static_assert(cursor_of<cursor<Config, Line>, L>);
  char* loaded = reinterpret_cast<char*>(dynamic);
  at.set_copies(loaded, thread.down);
  at.set_results(loaded + cursor<Config, Line>::kCopyBytes, thread.down);
  row_copies<Config, Line> copies(a, loaded, thread, threads);
  if (Config::kRepeatedOperand != 0 && thread.share.block == 0) {  // all blocks at once would wait for each other
    for_vectors<Config>(a, thread.across, [&](int, typename Config::index column, int count) {
      at.set_column(column, count);
      at.prefetch_repeated();
    });
  }
  static_assert(kHeld || Config::kEarly == 0);
  L held[kHeld ? Config::kHeldVectors : 1];
  early_operands<Config, Line> early;
  word::row_numbers<T> for_held;
  const auto value = [&](int k, typename Config::index column, int count) {
    if constexpr (kHeld) return held[k];
    at.set_column(column, count);
    at.set_vector(k);
    return Line::pre::recompute(at.x(), at);
  };
  const auto is_saver = [&](bool exists) {  // of a row's statistics
    return exists && thread.across == 0 && (Config::kCluster == 1 || cluster_rank() == 0);
  };
  for_rows<Config, word::row_numbers<T>>(
      a, thread, copies,
      [&](int64 row, int stage) {
        const bool exists = Config::kDown == 1 || row < a.rows;
        at.set_row(row, exists);
        at.set_stage(stage);
        if constexpr (kHeld) {
          for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
            at.set_column(column, count);
            at.set_vector(k);
            held[k] = Line::pre::forward(at.x(), at);
          });
          for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
            at.set_column(column, count);
            early.load(at, k);
          });
        }
        if constexpr (Line::segments > 1)
          earlier_segments<Config, Line>(a, thread.across, threads, at, held, value, early, row, is_saver(exists));
        if constexpr (!Config::kAhead) {
          const auto of_row = statistics<Config, Line>(a, row, thread.across, threads, held, value);
          for_held = of_row.for_held;
          return of_row.saved;
        } else {
          sender<Config> half{threads};
          return statistics<Config, Line>(a, row, thread.across, half, held, value).saved;
        }
      },
      [&](int64 row, int stage, word::row_numbers<T> saved) {
        const bool exists = Config::kDown == 1 || row < a.rows;
        if constexpr (Config::kAhead) {
          receiver<Config> half{threads};
          saved = statistics<Config, Line>(a, row, thread.across, half, held, value).saved;
          at.set_row(row, exists);
          at.set_stage(stage);
        }
        if constexpr (Config::kOnlyStatistics) {
          if (is_saver(exists)) save<Line, Config::kX>(a, row, saved);
          return;
        }
        if constexpr (Line::gives_number) {
          finish_number<Config, Line>(a, thread, threads, at, row, saved, is_saver(exists));
          return;
        }
        const word::row_numbers<T> to_save = saved;
        if constexpr (kHeld) saved = for_held;
        if constexpr (Line::features > 0) at.set_features(plus::none<T, Line::features>().v);
        for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          at.set_vector(k);
          early.give(at, k);
          L u;
          if constexpr (kHeld) u = value(k, column, count);
          else u = Line::pre::forward(at.x(), at);
          using how = thread_row<Config, row_threads<Config>, decltype(value)>;
          const L z = row_forward<typename Line::row, how>(u, saved, at);
          const L y = Line::post::forward(z, at);
          if constexpr (Line::features == 0) at.store_y(y);
        });
        store_row(threads, at);
        if constexpr (Line::features > 0)
          behind.finish(row, exists, threads.reduce(load_numbers<Line::features>(at.features()), plus()));
        if (Config::kSavesStatistics && is_saver(exists)) save<Line, Config::kX>(a, row, to_save);
        if constexpr (Line::gives_codes) {
          if (is_saver(exists)) store_number<Config, Line>(a, row, to_save);
        }
      });
}

// dx of one vector, from the first row word's result, its gradient and their sums over the row; and the recomputed
// result.
template <class Config, class Line>
ONEPASS_FUNCTION void finish_vector(const arguments& a, cursor<Config, Line>& at,
                                    word::terms<typename cursor<Config, Line>::vector> here,
                                    word::row_numbers<typename Config::arithmetic> saved,
                                    word::pair<typename Config::arithmetic> totals) {
  using T = typename Config::arithmetic;
  using L = typename cursor<Config, Line>::vector;
  using first = typename Line::template segment_at<0>::row;
  const L du = gradient_before<first>(here.first, here.second, saved, totals, static_cast<T>(a.inverse_columns), at);
  L x{};
  if constexpr (Line::pre::needs_input) x = at.x();
  at.store_dx(Line::pre::backward(x, du, at));
  if constexpr (Config::kWantsRecompute && Line::segments == 1)
    at.store_recomputed(Line::post::recompute(result_of<first>(here.first, saved, at), at));
}

// Backward of the segments before the last, down to the first: in `held` come the result of row word I + 1 and its
// gradient, with their sums over the row in `totals`; those of the first row word are left there.
template <class Config, class Line, int I, class Threads, class Sums, class Numbers>
ONEPASS_FUNCTION void earlier_gradients(const arguments& a, int across, Threads& threads, cursor<Config, Line>& at,
                                        word::terms<typename cursor<Config, Line>::vector>* held, Sums& sums,
                                        const saved_numbers<typename Config::arithmetic, Line::segments>& saved,
                                        Numbers& totals) {
  if constexpr (I >= 0) {
    static_assert(!Config::kRecomputes && !Config::kAhead, "values of several row words are held");
    using T = typename Config::arithmetic;
    using L = typename cursor<Config, Line>::vector;
    using behind = typename Line::template segment_at<I + 1>::row;
    using segment = typename Line::template segment_at<I>;
    word::terms<L> total{L(T(0)), L(T(0))};
    for_vectors<Config>(a, across, [&](int k, typename Config::index column, int count) {
      at.set_column(column, count);
      at.set_vector(k);
      at.set_sums(sums[k]);
      const L du =
          gradient_before<behind>(held[k].first, held[k].second, saved.of[I + 1],
                                  word::pair<T>{totals.v[0], totals.v[1]}, static_cast<T>(a.inverse_columns), at);
      held[k] = value_and_gradient<Line, I, L>(at, saved, du);
      add_terms<segment>(held[k], saved.of[I], at, count, total);
    });
    totals = threads.reduce(Numbers{{sum_lanes(total.first), sum_lanes(total.second)}}, plus());
    earlier_gradients<Config, Line, I - 1>(a, across, threads, at, held, sums, saved, totals);
  }
}

template <class Config, class Line, class Behind = nothing_behind>
ONEPASS_FUNCTION void rowwise_backward(const arguments& a, Behind&& behind = {}) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  using cursor_type = cursor<Config, Line>;
  constexpr int kHolds = Config::kHeldVectors, kSums = kSlots < Config >> 0 ? kSlots<Config> : 1;
  constexpr int kTotals = Line::segments > 1 ? 2 : Line::row::about.sums;
  using saved_type = saved_numbers<T, Line::segments>;
  __shared__ typename row_threads<Config>::slots shared;
  extern __shared__ __align__(128) double dynamic[];
  row_threads<Config> threads(shared);
  const rows_of_thread<Config> thread(a);
  cursor_type at(a);
  cursor<Config, Line, true> again(a);
  char* loaded = reinterpret_cast<char*>(dynamic);
  T* memory = reinterpret_cast<T*>(loaded + cursor_type::kCopyBytes + cursor_type::kStagedBytes);
  at.set_copies(loaded, thread.down);
  at.set_results(loaded + cursor_type::kCopyBytes, thread.down);
  again.set_copies(loaded, thread.down);
  row_copies<Config, Line> copies(a, loaded, thread, threads);

  L sums[kHolds][kSums];  // of columns; where registers cannot hold them in memory, where a thread meets its own only
  constexpr int kOwn = kHolds * Config::kAcross * Config::kVectorSize;  // columns of this block
  const int64 own = column_of<Config>(0, 0);
  at.set_sums(memory - own, kOwn);
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
#pragma unroll
    for (int slot = 0; slot < kSums; ++slot) sums[k][slot] = L(T(0));
  }
  if constexpr (!Config::kSumsInRegisters) {
    for_vectors<Config>(a, thread.across, [&](int, typename Config::index column, int) {
      for (int slot = 0; slot < kSlots<Config>; ++slot) {
        for (int i = 0; i < Config::kVectorSize; ++i) memory[slot * kOwn + column - own + i] = T(0);
      }
    });
  }
  const auto saved_at = [&](int64 place) { return all_saved_of<Config, Line, true>(a, thread.row(place)); };
  const auto exists = [&](int64 row) { return (Config::kDown == 1 && !kGrouped<Config>) || row < a.rows; };
  saved_type next_saved = saved_at(thread.first);
  // The sums over a group of rows, which begin at nothing again.
  const auto write_group = [&](unsigned step) {
    if constexpr (kGrouped<Config>) {
      static_assert(!Config::kAhead, "the next row would be in a group's sums");
      if (!thread.walk.ends_group(step)) return;
      const int64 part = kWholeGroups<Config> ? thread.walk.group(step) : thread.share.block;
#pragma unroll
      for (int k = 0; k < kHolds; ++k) {
        const int64 begin = column_of<Config>(k, 0), column = begin - own + thread.across * Config::kVectorSize;
#pragma unroll
        for (int slot = 0; slot < kSlots<Config>; ++slot) {
          if (!is_grouped<Config>(slot)) continue;
          if constexpr (!Config::kSumsInRegisters) {
            for (int i = 0; i < Config::kVectorSize; ++i) {
              T& sum = memory[slot * kOwn + column + i];
              sums[k][slot].v[i] = sum, sum = T(0);
            }
          }
          write_part<Config, Line, kWholeGroups<Config>>(a, sums[k][slot], slot, part, begin, thread.across,
                                                         thread.down);
          sums[k][slot] = L(T(0));
        }
      }
    }
  };
  word::terms<L> held[Config::kRecomputes ? 1 : kHolds];
  numbers<T, larger(1, kTotals)> totals = plus::none<T, larger(1, kTotals)>();
  for_rows<Config, saved_type>(
      a, thread, copies,
      [&](int64 place, int stage) {
        const saved_type saved = next_saved;
        next_saved = saved_at(place + thread.step);
        const int64 row = thread.row(place);
        at.set_row(row, exists(row));
        at.set_stage(stage);
        if constexpr (Line::features > 0) {
          const auto gradients = behind.gradients(row);
          at.set_features(gradients.v);
          again.set_features(gradients.v);
        }
        word::terms<L> total{L(T(0)), L(T(0))};
        for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          at.set_vector(k);
          at.set_sums(sums[k]);
          const word::terms<L> here = value_and_gradient<Line, L>(at, saved);
          if constexpr (!Config::kRecomputes) held[k] = here;
          constexpr int kLast = Line::segments - 1;
          if constexpr (Config::kWantsRecompute && Line::segments > 1)
            at.store_recomputed(
                Line::post::recompute(result_of<typename Line::row>(here.first, saved.of[kLast], at), at));
          add_terms<Line>(here, saved.of[kLast], at, count, total);
        });
        plus combine;
        totals.v[0] = sum_lanes(total.first);
        if constexpr (kTotals > 1) totals.v[1] = sum_lanes(total.second);
        if constexpr (kTotals > 0) totals = threads.send(totals, combine);
        return saved;
      },
      [&](int64 place, int stage, saved_type saved) {
        if constexpr (kTotals > 0) totals = threads.receive(totals, plus());
        const int64 row = thread.row(place);
        at.set_row(row, exists(row));
        again.set_row(row, exists(row));
        at.set_stage(stage);
        again.set_stage(stage);
        if constexpr (Line::segments > 1)
          earlier_gradients<Config, Line, Line::segments - 2>(a, thread.across, threads, at, held, sums, saved, totals);
        for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          at.set_vector(k);
          at.set_sums(sums[k]);
          word::terms<L> here;
          if constexpr (Config::kRecomputes) {
            again.set_column(column, count);
            again.set_vector(k);
            here = value_and_gradient<Line, L>(again, saved);
          } else {
            here = held[k];
          }
          finish_vector<Config, Line>(a, at, here, saved.of[0],
                                      word::pair<T>{totals.v[0], kTotals > 1 ? totals.v[kTotals - 1] : T(0)});
        });
        store_row(threads, at);
        if constexpr (kGrouped<Config>) write_group(thread.step_of(place));
      });
  let_next_kernel_begin();
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
    const int64 begin = column_of<Config>(k, 0);
#pragma unroll
    for (int slot = 0; slot < kSlots<Config>; ++slot) {
      if (is_grouped<Config>(slot)) continue;
      if constexpr (!Config::kSumsInRegisters) {
        const int64 column = begin - own + thread.across * Config::kVectorSize;
        for (int i = 0; i < Config::kVectorSize; ++i) sums[k][slot].v[i] = memory[slot * kOwn + column + i];
      }
      write_part<Config, Line>(a, sums[k][slot], slot, thread.share.block, begin, thread.across, thread.down);
    }
  }
  if constexpr (Line::features > 0) behind.write_parts();
}

ONEPASS_END
