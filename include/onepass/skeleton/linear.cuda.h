// Lines with `linear` in one kernel (sm_90a): a matrix product whose tiles the words behind `linear` take from shared
// memory, while the next tile is under way, and whose input the words before it make some tiles ahead, in memory that
// the second-level cache still holds when a tile of it is asked for.
//
// A block has four warpgroups. All make the rows that the first tiles need. Then the first makes the other rows, and
// takes products to the end of the line. Two multiply, 64 rows of a tile each, which they hand over, each in memory of
// its own, or in turn: then the second waits until the first one's are taken, and runs behind it from there on. Of the
// last, a thread brings tiles of both matrices into a ring, another tells all blocks which rows have been made. Blocks
// of a cluster have tiles below each other and share what they bring of the matrix.
//
// Where a norm is deferred (deferred_norm.cuda.h), the input is x itself, and the first warpgroup takes its rows'
// moments from the tiles on their way to the product: those of the next tile between rows of this one.
//
// Config:
//   kX                storage type throughout: bf16 or f16
//   kTileN, kStages, kCluster
//   kBuffers          2: each multiplying warpgroup has room for its products, 1: they have one in turn
//   kGroup            tiles of a cluster below each other that are taken before the next ones beside them
//   before, behind    what place.cuda.h asks for; before::kAny: whether there are words before `linear`, kAtOnce: rows
//                     that a thread makes at a time
//   first_rows        as before, for all threads
//   kDefers           before is a norm, with or without affine, and deferred
#pragma once

#include "onepass/lane/matrix.cuda.h"
#include "onepass/skeleton/deferred_norm.cuda.h"
#include "onepass/skeleton/thread_row.cuda.h"

ONEPASS_BEGIN

struct linear_arguments {
  tensor_map input, matrix;
  int64 depth;                  // columns of both
  uint32* ready;                // of each 128 rows of the input, how many have been made
  const float *sums, *offsets;  // of a deferred norm, as many as the tiles have columns
  arguments behind, before;
};

inline constexpr int kTileM = 128, kTileK = 64, kGroupThreads = 128;

// The tiles of a cluster: rows of tiles in groups, each group column by column, so that the caches hold what is shared.
template <class Config>
struct tile_order {
  int down, across, clusters, cluster;

  explicit ONEPASS_FUNCTION tile_order(const linear_arguments& a)
      : down(static_cast<int>((a.behind.rows + kTileM * Config::kCluster - 1) / (kTileM * Config::kCluster))),
        across(static_cast<int>((a.behind.columns + Config::kTileN - 1) / Config::kTileN)),
        clusters(static_cast<int>(gridDim.x) / Config::kCluster),
        cluster(static_cast<int>(blockIdx.x) / Config::kCluster) {}

  ONEPASS_FUNCTION int turns() const { return (down * across + clusters - 1) / clusters; }
  // Whether there is a tile for this cluster, and where this block's begins.
  ONEPASS_FUNCTION bool at(int turn, int& row, int& column) const {
    const int tile = turn * clusters + cluster;
    if (tile >= down * across) return false;
    const int of_group = Config::kGroup * across, group = tile / of_group, rest = tile - group * of_group;
    const int first = group * Config::kGroup, height = down - first < Config::kGroup ? down - first : Config::kGroup;
    const int rank = Config::kCluster > 1 ? cluster_rank() : 0;
    row = ((first + rest % height) * Config::kCluster + rank) * kTileM;
    column = rest / height * Config::kTileN;
    return true;
  }
  // Rows of the input that the turns before this one read, at most.
  ONEPASS_FUNCTION int64 rows_before(int turn) const {
    const int of_group = Config::kGroup * across, groups = turn * clusters / of_group;
    const int rest = turn * clusters - groups * of_group, of_last = rest < Config::kGroup ? rest : Config::kGroup;
    return static_cast<int64>(groups * Config::kGroup + of_last) * (kTileM * Config::kCluster);
  }
};

template <class Config>
struct linear_shared {
  static constexpr int kInputBytes = kTileM * kTileK * 2, kMatrixBytes = Config::kTileN * kTileK * 2;
  static constexpr int kStageBytes = kInputBytes + kMatrixBytes;

  uint64 full[Config::kStages], empty[Config::kStages];
  uint64 product_full[2], product_empty[2];  // for each warpgroup that multiplies
  uint64 made[2], told[2];                   // rows of the input, in turn
  uint64 norm_full;                          // where it is deferred
  stage::pair<float> norm[Config::kDefers ? kTileM : 1];
  folded_pair folded[Config::kDefers ? Config::kTileN / 2 : 1];

  static ONEPASS_FUNCTION uint32 stages(char* dynamic) { return (shared_address(dynamic) + 1023) & ~1023u; }
  static ONEPASS_FUNCTION char* stage(char* dynamic, int of) {
    return dynamic + (stages(dynamic) - shared_address(dynamic)) + of * kStageBytes;
  }
  // Of the warpgroup's 64 rows.
  static ONEPASS_FUNCTION char* products(char* dynamic, int group) {
    return stage(dynamic, Config::kStages) + group % Config::kBuffers * (64 * Config::kTileN * 2);
  }

  ONEPASS_FUNCTION void open() {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      open_mailbox(&full[stage], 1);
      open_mailbox(&empty[stage], 2 * Config::kCluster + (Config::kDefers ? kGroupThreads / 32 : 0));
    }
    for (int i = 0; i < 2; ++i) {
      open_mailbox(&product_full[i], kGroupThreads);
      open_mailbox(&product_empty[i], kGroupThreads);
      open_mailbox(&made[i], kGroupThreads);
      open_mailbox(&told[i], 1);
    }
    open_mailbox(&norm_full, kGroupThreads);
    let_cluster_see_mailboxes();
  }
};

// Where a ring is.
template <int kStages>
struct ring_position {
  int stage = 0;
  uint32 phase = 0;
  ONEPASS_FUNCTION void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

template <class Config>
ONEPASS_FUNCTION void bring_tiles(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic) {
  using layout = linear_shared<Config>;
  constexpr int kPart = Config::kTileN / Config::kCluster;
  const tile_order<Config> tiles(a);
  const int rank = Config::kCluster > 1 ? cluster_rank() : 0;
  ring_position<Config::kStages> at;
  prefetch(a.input), prefetch(a.matrix);
  int row, column;
  for (int turn = 0; tiles.at(turn, row, column); ++turn) {
    if constexpr (Config::before::kAny) {
      const int64 left = a.behind.rows - row;
      if (left > 0) wait_for_count(a.ready + row / kTileM, left < kTileM ? static_cast<uint32>(left) : kTileM);
      let_copies_see_writes();
    }
    for (int k = 0; k < a.depth; k += kTileK) {
      wait_for_mail(&shared.empty[at.stage], at.phase ^ 1);
      arrive_and_expect(&shared.full[at.stage], layout::kStageBytes);
      const uint32 to = layout::stages(dynamic) + at.stage * layout::kStageBytes;
      const uint32 box = shared_address(&shared.full[at.stage]);
      bring_tile(to, a.input, row, k, box);
      const uint32 part = to + layout::kInputBytes + rank * (kPart * kTileK * 2);
      if constexpr (Config::kCluster == 1) bring_tile(part, a.matrix, column, k, box);
      else bring_tile_to((1 << Config::kCluster) - 1, part, a.matrix, column + rank * kPart, k, box);
      at.next();
    }
  }
}

// Where a row of products has its piece of 16 bytes: rows that are stored at a time differ in their banks.
ONEPASS_FUNCTION int place_of_piece(int piece, int row) { return piece ^ (row & 7); }

// 64 rows of products into shared memory.
template <dtype D, int N>
ONEPASS_FUNCTION void hand_over(const float (&d)[N / 2], char* products) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
  const int matrix = lane / 8;  // of the four that store_matrices takes: 8 rows below, 8 columns beside
  const uint32 row = shared_address(products) + (warp * 16 + (matrix & 1) * 8 + lane % 8) * (N * 2);
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    const float* at = d + 4 * j;
    store_matrices(row + place_of_piece(j + (matrix >> 1), lane) * 16, pair_to_storage<D>(at[0], at[1]),
                   pair_to_storage<D>(at[2], at[3]), pair_to_storage<D>(at[4], at[5]),
                   pair_to_storage<D>(at[6], at[7]));
  }
}

template <class Config>
ONEPASS_FUNCTION void multiply_tiles(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic) {
  using layout = linear_shared<Config>;
  constexpr int N = Config::kTileN;
  const tile_order<Config> tiles(a);
  const int own = static_cast<int>(threadIdx.x) / kGroupThreads - 1;  // which 64 rows
  const bool speaks = threadIdx.x % kGroupThreads == 0;
  ring_position<Config::kStages> at;
  int row, column;
  for (int turn = 0; tiles.at(turn, row, column); ++turn) {
    float d[N / 2] = {};
    int before = 0;  // the stage that the products under way read
    for (int k = 0; k < a.depth; k += kTileK) {
      wait_for_mail(&shared.full[at.stage], at.phase);
      const uint32 stage = layout::stages(dynamic) + at.stage * layout::kStageBytes;
      const uint64 rows = tile_descriptor(stage + own * (64 * kTileK * 2)),
                   columns = tile_descriptor(stage + layout::kInputBytes);
      begin_products();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step)
        add_product<Config::kX, N>(d, rows + 2 * step, columns + 2 * step, k + step > 0);
      close_products();
      wait_for_products<1>();
      if (speaks && k > 0) arrive_in_cluster<Config::kCluster>(&shared.empty[before]);
      before = at.stage;
      at.next();
    }
    wait_for_products<0>();
    if (speaks) arrive_in_cluster<Config::kCluster>(&shared.empty[before]);
    if constexpr (Config::kDefers) {
      wait_for_mail(&shared.norm_full, turn & 1);
      apply_norm<N>(d, shared.norm + 64 * own, shared.folded);
    }
    wait_for_mail(&shared.product_empty[own], (turn + (Config::kBuffers == 2 ? 1 : 1 + own)) & 1);
    hand_over<Config::kX, N>(d, layout::products(dynamic, own));
    arrive(&shared.product_full[own]);
  }
}

// Rows of what `linear` takes: kAtOnce for each thread at a time.
template <class Config, class Line>
class input_rows {
 public:
  static constexpr int kRows = Config::kDown * Config::kAtOnce;

  ONEPASS_FUNCTION input_rows(const arguments& a, typename row_threads<Config>::slots& shared)
      : a_(a), threads_(shared) {}

  // kRows rows from `first` on; those from `next` on are asked for.
  ONEPASS_FUNCTION void make(int64 first, int64 next) {
    place<Config, Line> at(a_);
    each_lane(at, next, [&](int, int) { at.announce(); });
    if constexpr (same_type<typename Line::row, void>) {
      each_lane(at, first, [&](int, int) { at.store_y(Line::pre::forward(at.x(), at)); });
    } else {
      L held[Config::kAtOnce][Config::kHeldLanes]{};
      each_lane(at, first, [&](int i, int k) { held[i][k] = Line::pre::forward(at.x(), at); });
      each_row(at, first, [&](int i, int64 row) {
        const auto value = [&](int k, typename Config::index, int) { return held[i][k]; };
        const auto of_row = statistics<Config, Line>(a_, across_, threads_, held[i], value);
        stage::pair<T> saved = of_row.saved;
        if (Config::kSavesStatistics && row < a_.rows && across_ == 0) save<Line>(a_, row, saved);
        saved.second = saved.second * of_row.held_factor;
        for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
          at.set_column(column, count);
          using row_of = thread_row<Config, row_threads<Config>, decltype(value)>;
          at.store_y(Line::post::forward(Line::row::template forward<row_of>(held[i][k], saved), at));
        });
      });
    }
    let_copies_see_writes();
  }

 private:
  using T = typename Config::arithmetic;
  using L = pack<T, Config::kLanes>;

  // body(i, row) for each of this thread's rows.
  template <class Body>
  ONEPASS_FUNCTION void each_row(place<Config, Line>& at, int64 first, const Body& body) const {
#pragma unroll
    for (int i = 0; i < Config::kAtOnce; ++i) {
      const int64 row = first + i * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross;
      at.set_row(static_cast<typename Config::index>(row), row < a_.rows);
      body(i, row);
    }
  }
  // body(i, k) at lane k of row i.
  template <class Body>
  ONEPASS_FUNCTION void each_lane(place<Config, Line>& at, int64 first, const Body& body) const {
    each_row(at, first, [&](int i, int64) {
      for_lanes<Config>(a_, across_, [&](int k, typename Config::index column, int count) {
        at.set_column(column, count);
        body(i, k);
      });
    });
  }
  const arguments& a_;
  const int across_ = static_cast<int>(threadIdx.x) % Config::kAcross;
  row_threads<Config> threads_;
};

// All blocks hear of rows that this one has made.
ONEPASS_FUNCTION void tell_of_rows(const linear_arguments& a, int64 first, int rows) {
  const int64 left = a.before.rows - first;
  add_for_all(a.ready + first / kTileM, static_cast<uint32>(left < rows ? static_cast<int>(left) : rows));
}

// All threads make the rows before row `end`, the blocks in turn.
template <class Config, class Line>
ONEPASS_FUNCTION void make_first_rows(const linear_arguments& a, int64 end,
                                      typename row_threads<Config>::slots& shared) {
  using rows = input_rows<Config, Line>;
  rows input(a.before, shared);
  const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
  for (int64 row = static_cast<int64>(blockIdx.x) * rows::kRows; row < end && row < a.before.rows; row += step) {
    input.make(row, row + step);
    __syncthreads();
    if (threadIdx.x == 0) tell_of_rows(a, row, rows::kRows);
  }
}

// The rows behind those, a block's in turn with those of all others: made by a warpgroup...
template <class Config, class Line>
class later_rows {
 public:
  using rows = input_rows<Config, Line>;

  ONEPASS_FUNCTION later_rows(const arguments& a, int64 first, uint64 (&made)[2], uint64 (&told)[2],
                              typename row_threads<Config>::slots& shared)
      : input_(a, shared),
        made_(made),
        told_(told),
        rows_(a.rows),
        next_(first + static_cast<int64>(blockIdx.x) * rows::kRows) {}

  // All of this block's before row `end`.
  ONEPASS_FUNCTION void make_until(int64 end) {
    const int64 step = static_cast<int64>(gridDim.x) * rows::kRows;
    for (; next_ < end && next_ < rows_; next_ += step, ++turn_) {
      wait_for_mail(&told_[turn_ % 2], (turn_ / 2 + 1) & 1);
      input_.make(next_, next_ + step);
      arrive(&made_[turn_ % 2]);
    }
  }

 private:
  rows input_;
  uint64 (&made_)[2];
  uint64 (&told_)[2];
  int64 rows_, next_;
  int turn_ = 0;
};
// ... and told of by another thread, which does not keep it waiting.
template <class Config, class Line, class Shared>
ONEPASS_FUNCTION void tell_of_later_rows(const linear_arguments& a, int64 first, Shared& shared) {
  constexpr int kRows = input_rows<Config, Line>::kRows;
  int64 row = first + static_cast<int64>(blockIdx.x) * kRows;
  for (int turn = 0; row < a.before.rows; row += static_cast<int64>(gridDim.x) * kRows, ++turn) {
    wait_for_mail(&shared.made[turn % 2], turn / 2 & 1);
    tell_of_rows(a, row, kRows);
    arrive(&shared.told[turn % 2]);
  }
}

// The norms of the rows of this block's tiles, one turn after the other: a thread has a row of each.
template <class Config, class Line>
class deferred_norms {
 public:
  ONEPASS_FUNCTION deferred_norms(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic)
      : a_(a), shared_(shared), dynamic_(dynamic), tiles_(a), moments_(static_cast<float>(a.before.inverse_columns)) {
    begin(0);
  }

  // What those who multiply need of this turn's norm; then the next turn begins.
  ONEPASS_FUNCTION void give(int turn, int row, int column) {
    while (column_ < a_.depth) take();
    float eps = 0;
    if constexpr (Line::row_parameter >= 0) eps = static_cast<float>(a_.before.parameter[Line::row_parameter]);
    const stage::pair<float> of = Line::row::statistics(moments_, eps);
    shared_.norm[threadIdx.x] = Line::row::about.statistics > 1 ? of : stage::pair<float>{0.0f, of.first};
    for (int i = static_cast<int>(threadIdx.x); i < Config::kTileN / 2; i += kGroupThreads) {
      const int at = column + 2 * i;
      shared_.folded[i] = {{a_.sums[at], a_.sums[at + 1]}, {a_.offsets[at], a_.offsets[at + 1]}};
    }
    arrive(&shared_.norm_full);
    const int64 own = row + static_cast<int>(threadIdx.x);
    if (Config::before::kSavesStatistics && column == 0 && own < a_.before.rows) save<Line>(a_.before, own, of);
    begin(turn + 1);
  }
  // A tile of the next turn, if it is there.
  ONEPASS_FUNCTION void go_on() {
    if (column_ < a_.depth && __all_sync(0xffffffffu, has_mail(&shared_.full[at_.stage], at_.phase))) take();
  }

 private:
  using layout = linear_shared<Config>;

  ONEPASS_FUNCTION void begin(int turn) {
    int row, column;
    column_ = tiles_.at(turn, row, column) ? 0 : a_.depth;
    moments_.begin();
  }
  ONEPASS_FUNCTION void take() {
    wait_for_mail(&shared_.full[at_.stage], at_.phase);
    const int64 left = a_.depth - column_;
    moments_.take(layout::stage(dynamic_, at_.stage), static_cast<int>(threadIdx.x),
                  left < kTileK ? static_cast<int>(left) : kTileK);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared_.empty[at_.stage]);
    at_.next();
    column_ += kTileK;
  }
  const linear_arguments& a_;
  layout& shared_;
  char* dynamic_;
  const tile_order<Config> tiles_;
  tile_moments<Config::kX, typename Line::row> moments_;
  ring_position<Config::kStages> at_;
  int64 column_ = 0;
};

// 64 rows of products to the end of the line; all threads call `between` now and then.
template <class Config, class Line, class Between>
ONEPASS_FUNCTION void finish_rows(const arguments& a, char* products, int row, int column, const Between& between) {
  using index = typename Config::index;
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  const index first = column + across * Config::kLanes;
  const int count = Config::kExact ? Config::kLanes : count_at<Config::kLanes>(first, a.columns);
  for (int top = 0; top < 64; top += Config::kDown * Config::kUnroll) {
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      const int r = top + u * Config::kDown + down;
      if (r >= 64) continue;
      place<Config, Line> at(a);
      at.set_copies(products + (place_of_piece(across, r) - across) * 16, r);
      at.set_stage(0);
      at.set_lane(0);
      at.set_row(static_cast<index>(row) + r, row + r < a.rows);
      at.set_column(first, count);
      at.store_y(Line::pre::forward(at.x(), at));
    }
    between();
  }
}

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void linear_forward(const linear_arguments& a) {
  using before = typename Config::before;
  using first_rows = typename Config::first_rows;
  using layout = linear_shared<Config>;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ layout shared;
  __shared__ union {
    typename row_threads<first_rows>::slots first;
    typename row_threads<before>::slots later;
  } slots;
  if (threadIdx.x == 0) shared.open();
  arrive_at_cluster();
  wait_for_cluster();
  const tile_order<Config> tiles(a);
  const int64 first = tiles.rows_before(1);
  if constexpr (before::kAny) {
    make_first_rows<first_rows, Before>(a, first, slots.first);
    __syncthreads();
  }
  // What registers the groups take makes the 65536 of an SM.
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == 0) {
    take_registers<152>();
    const auto finish = [&](int turn, int row, int column, const auto& between) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wait_for_mail(&shared.product_full[half], turn & 1);
        finish_rows<typename Config::behind, Behind>(a.behind, layout::products(dynamic, half), row + 64 * half, column,
                                                     between);
        arrive(&shared.product_empty[Config::kBuffers == 2 ? half : 1 - half]);
      }
    };
    int row, column;
    if constexpr (Config::kDefers) {
      deferred_norms<Config, Before> norms(a, shared, dynamic);
      for (int turn = 0; tiles.at(turn, row, column); ++turn) {
        norms.give(turn, row, column);
        finish(turn, row, column, [&] { norms.go_on(); });
      }
    } else {
      later_rows<before, Before> input(a.before, first, shared.made, shared.told, slots.later);
      for (int turn = 0; turn < tiles.turns(); ++turn) {
        if constexpr (before::kAny) input.make_until(tiles.rows_before(turn + 2));
        if (tiles.at(turn, row, column)) finish(turn, row, column, [] {});
      }
    }
  } else if (group == 3) {
    give_registers<24>();
    if (threadIdx.x == 3 * kGroupThreads) bring_tiles<Config>(a, shared, dynamic);
    if (before::kAny && threadIdx.x == 3 * kGroupThreads + 32) tell_of_later_rows<before, Before>(a, first, shared);
    __syncwarp();
  } else {
    take_registers<168>();
    multiply_tiles<Config>(a, shared, dynamic);
  }
  arrive_at_cluster();  // no block ends while another brings or tells it something
  wait_for_cluster();
}

ONEPASS_END
