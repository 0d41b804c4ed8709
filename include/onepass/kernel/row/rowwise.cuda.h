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

// The rows of a thread: its column, the first row, and the step from one to the next.
template <class Config>
struct rows_of_thread {
  explicit ONEPASS_FUNCTION rows_of_thread(const arguments& a)
      : share(share_of<Config>(a, blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster)),
        first(static_cast<int64>(share.block) * Config::kDown + down),
        step(static_cast<int64>(share.blocks) * Config::kDown) {}

  int across = static_cast<int>(threadIdx.x) % Config::kAcross, down = static_cast<int>(threadIdx.x) / Config::kAcross;
  share_of_blocks share;  // of clusters, where a row has some
  int64 first, step;
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
  // The place of `row`'s copies may take others, those of the row kStages steps behind it; its results' place too.
  ONEPASS_FUNCTION void release(int64 row, int stage) {
    if constexpr (cursor_type::kInWindows) threads_.meet();
    load_async(row + Config::kStages * thread_.step, stage);
  }

 private:
  ONEPASS_FUNCTION void load_async(int64 row, int stage) {
    if constexpr (kAny) {
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
template <class Config, class Copies, class Reads, class Finishes>
ONEPASS_FUNCTION void for_rows(const arguments& a, const rows_of_thread<Config>& thread, Copies& copies,
                               const Reads& reads, const Finishes& finishes) {
  const int64 step = thread.step, end = a.rows + thread.down;
  if constexpr (!Config::kAhead) {
    for (int64 row = thread.first; row < end; row += step) {
      const int stage = copies.wait();
      finishes(row, stage, reads(row, stage));
      copies.release(row, stage);
    }
  } else {
    int stage = 0, stage_before = 0;
    word::row_numbers<typename Config::arithmetic> saved{}, saved_before{};
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

// Behind a row whose result is stored: nothing. Where it is a few numbers, kernel/linear/small_n.cuda.h has what takes
// them.
struct nothing_behind {};

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
  L held[kHeld ? Config::kHeldVectors : 1];
  word::row_numbers<T> for_held;
  const auto value = [&](int k, typename Config::index column, int count) {
    if constexpr (kHeld) return held[k];
    at.set_column(column, count);
    at.set_vector(k);
    return Line::pre::recompute(at.x(), at);
  };
  for_rows<Config>(
      a, thread, copies,
      [&](int64 row, int stage) {
        at.set_row(row, Config::kDown == 1 || row < a.rows);
        at.set_stage(stage);
        if constexpr (kHeld) {
          for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
            at.set_column(column, count);
            at.set_vector(k);
            held[k] = Line::pre::forward(at.x(), at);
          });
        }
        if constexpr (!Config::kAhead) {
          const auto of_row = statistics<Config, Line>(a, thread.across, threads, held, value);
          for_held = of_row.for_held;
          return of_row.saved;
        } else {
          sender<Config> half{threads};
          return statistics<Config, Line>(a, thread.across, half, held, value).saved;
        }
      },
      [&](int64 row, int stage, word::row_numbers<T> saved) {
        const bool exists = Config::kDown == 1 || row < a.rows;
        if constexpr (Config::kAhead) {
          receiver<Config> half{threads};
          saved = statistics<Config, Line>(a, thread.across, half, held, value).saved;
          at.set_row(row, exists);
          at.set_stage(stage);
        }
        if constexpr (Config::kOnlyStatistics) {
          if (exists && thread.across == 0 && (Config::kCluster == 1 || cluster_rank() == 0))
            save<Line, Config::kX>(a, row, saved);
          return;
        }
        const word::row_numbers<T> to_save = saved;
        if constexpr (kHeld) saved = for_held;
        if constexpr (Line::features > 0) at.set_features(plus::none<T, Line::features>().v);
        for_vectors<Config>(a, thread.across, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          at.set_vector(k);
          L u;
          if constexpr (kHeld) u = value(k, column, count);
          else u = Line::pre::forward(at.x(), at);
          const L z = Line::row::template forward<thread_row<Config, row_threads<Config>, decltype(value)>>(u, saved);
          const L y = Line::post::forward(z, at);
          if constexpr (Line::features == 0) at.store_y(y);
        });
        store_row(threads, at);
        if constexpr (Line::features > 0)
          behind.finish(row, exists, threads.reduce(load_numbers<Line::features>(at.features()), plus()));
        if (Config::kSavesStatistics && exists && thread.across == 0 && (Config::kCluster == 1 || cluster_rank() == 0))
          save<Line, Config::kX>(a, row, to_save);
      });
}

// dx of one vector, from the row's sums, and the recomputed result.
template <class Config, class Line>
ONEPASS_FUNCTION void finish_vector(const arguments& a, cursor<Config, Line>& at,
                                    word::terms<typename cursor<Config, Line>::vector> here,
                                    word::row_numbers<typename Config::arithmetic> saved,
                                    word::pair<typename Config::arithmetic> totals) {
  using T = typename Config::arithmetic;
  using L = typename cursor<Config, Line>::vector;
  const L du = Line::row::backward(here.first, here.second, saved, totals, static_cast<T>(a.inverse_columns));
  L x{};
  if constexpr (Line::pre::needs_input) x = at.x();
  at.store_dx(Line::pre::backward(x, du, at));
  if constexpr (Config::kWantsRecompute) at.store_recomputed(Line::post::recompute(here.first, at));
}

template <class Config, class Line, class Behind = nothing_behind>
ONEPASS_FUNCTION void rowwise_backward(const arguments& a, Behind&& behind = {}) {
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kVectorSize>;
  using cursor_type = cursor<Config, Line>;
  constexpr int kHolds = Config::kHeldVectors, kSums = kSlots < Config >> 0 ? kSlots<Config> : 1;
  constexpr int kTotals = Line::row::about.sums;
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
  const auto saved_at = [&](int64 row) {
    return row < a.rows ? saved_of<Line, T, Config::kX>(a, row) : word::row_numbers<T>{T(0), T(0)};
  };
  word::row_numbers<T> next_saved = saved_at(thread.first);
  word::terms<L> held[Config::kRecomputes ? 1 : kHolds];
  numbers<T, larger(1, kTotals)> totals = plus::none<T, larger(1, kTotals)>();
  for_rows<Config>(
      a, thread, copies,
      [&](int64 row, int stage) {
        const word::row_numbers<T> saved = next_saved;
        next_saved = saved_at(row + thread.step);
        at.set_row(row, Config::kDown == 1 || row < a.rows);
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
          add_terms<Line>(here, count, total);
        });
        plus combine;
        totals.v[0] = sum_lanes(total.first);
        if constexpr (kTotals > 1) totals.v[1] = sum_lanes(total.second);
        if constexpr (kTotals > 0) totals = threads.send(totals, combine);
        return saved;
      },
      [&](int64 row, int stage, word::row_numbers<T> saved) {
        if constexpr (kTotals > 0) totals = threads.receive(totals, plus());
        const bool exists = Config::kDown == 1 || row < a.rows;
        at.set_row(row, exists);
        again.set_row(row, exists);
        at.set_stage(stage);
        again.set_stage(stage);
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
          finish_vector<Config, Line>(a, at, here, saved,
                                      word::pair<T>{totals.v[0], kTotals > 1 ? totals.v[kTotals - 1] : T(0)});
        });
        store_row(threads, at);
      });
  let_next_kernel_begin();
#pragma unroll
  for (int k = 0; k < kHolds; ++k) {
    const int64 begin = column_of<Config>(k, 0);
#pragma unroll
    for (int slot = 0; slot < kSlots<Config>; ++slot) {
      if constexpr (!Config::kSumsInRegisters) {
        const int64 column = begin - own + thread.across * Config::kVectorSize;
        for (int i = 0; i < Config::kVectorSize; ++i) sums[k][slot].v[i] = memory[slot * kOwn + column + i];
      }
      write_part<Config>(a, sums[k][slot], slot, thread.share.block, begin, thread.across, thread.down);
    }
  }
  if constexpr (Line::features > 0) behind.write_parts();
}

ONEPASS_END
