// Backward of lines with `scores`, softmax and `values` (sm_90a), in two kernels that write nothing of the scores'
// size: one has rows of queries, past which keys and values pass, and gives their gradients and those of the words'
// tensors; one has keys and values, past which the rows pass and their results' gradients. Each recomputes the scores,
// so that its own 64 rows are the rows of all its products: what is summed goes from registers to the tensor cores. No
// sum depends on the order of blocks. (Dao, "FlashAttention-2", 2023, has one kernel whose blocks add to the same
// rows.)
//
// Σ weight · gradient of a row, which softmax's gradient needs, is Σ result · its gradient, since the words behind
// softmax multiply; the first kernel leaves it, and softmax's statistics as they are used, for the second.
//
// Config beside kernel/attention/tiles_sm90.cuda.h: kValueSteps, sixteens of the values' numbers; kAhead, as far as
// registers reach: 1, the next tile's products begin while this one's sums are under way, 2, while this one's are still
// taken; kStatistics, whether softmax_statistics of each row pass by; kWholeRows, whether tiles of rows are whole;
// kWantsRows, kWantsKeys, kWantsValues, what of all this is wanted. `behind` is forward's, with the tensors whose
// gradients are wanted; in the second kernel its vectors are two keys.
#pragma once

#include "onepass/kernel/attention/row_softmax.cuda.h"
#include "onepass/kernel/attention/tiles_sm90.cuda.h"

ONEPASS_BEGIN

// Backward of attention: 64 rows or keys that a warpgroup has, and tiles of the others that pass them, in shared memory
// and through the tensor cores. Config: see the top.

// S^T fragments: rows of queries pass a warpgroup's 64 keys; of accumulators [keys, rows] a thread has two neighbouring
// keys. Of row 16 w + 8 i + p of the keys' tile (w < 4, i < 2, p < 8) the key is 16 w + 2 p + i.

// The key that stands in a row of the tile.
ONEPASS_FUNCTION int pair_at(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }

// kAtoms atoms of 64 keys from `key` on, in that order; their map: [outer, inner, keys / 2, 2, depth].
template <int kAtoms>
ONEPASS_FUNCTION void tma_load_key_pairs(uint32 to, const tensor_map& map, batch_steps step, batch_place of, int key,
                                         uint32 mbarrier) {
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      tma_load_tile(to + atom * kAtomBytes + i * 1024, map, atom * 64, i % 2, key / 2 + i / 2 * 8,
                    of.inner * step.inner, of.outer * step.outer, mbarrier);
  }
}

// A tile of rows of queries: `row` is its first among those of its group, of which there are `rows`, the first of them
// `first` among all. Tiles of a group follow each other.
struct passing_rows {
  int64 first;
  int row, rows;
  bool begins;  // its group
};

// A place of two keys whose random words have been drawn: of each dropout one, the first key's bits its low half.
template <class Words, class Line>
struct drawn_cursor : cursor<Words, Line, true> {
  uint32 drawn[larger(1, Line::dropouts)];

  explicit ONEPASS_FUNCTION drawn_cursor(const arguments& a) : cursor<Words, Line, true>(a) {}
  template <class L, int K>
  ONEPASS_FUNCTION pack_mask<2> keeps(int threshold) const {
    return random_at_least<2>({{drawn[K]}}, 0, threshold);
  }
};

// A thread's two keys, past which tiles of kTile rows pass: vector k is row 8 (k / 2) + 2 (thread % 4) + k % 2. A
// warpgroup's threads load the words' tensors together: 8 pieces of 8 elements of each row of a tile, swizzled so that
// rows which are read at a time differ in their banks. Random words, of which a row's eight neighbours share four, are
// drawn by the four threads that have these, each for every fourth vector. Gives no gradients to tensors.
template <class Config, class Line>
class thread_columns {
 public:
  using words = typename Config::behind;
  using index = typename words::index;
  using L = pack<float, 2>;
  static constexpr int kVectors = Config::kTile / 4;

  // The warpgroup's keys begin at `first`.
  ONEPASS_FUNCTION thread_columns(const arguments& a, char* streams, int first)
      : here_(a), loaded_(a), streams_(streams + group() * (Config::kTile * kRowBytes)) {
    here_.set_columns(first + warp() * 16 + pair() * 2, 2, a.columns);
    loaded_.set_columns(first + thread() % kPieces * 8, 8, a.columns);
  }
  // The row of a tile that has vector k.
  static ONEPASS_FUNCTION int row_of(int vector) { return vector / 2 * 8 + thread() % 4 * 2 + vector % 2; }
  static ONEPASS_FUNCTION L vector_of(const float (&d)[Config::kTile / 2], int vector) {
    const int k = vector / 2 * 4 + vector % 2;
    L of;
    of.v[0] = d[k], of.v[1] = d[k + 2];
    return of;
  }
  static ONEPASS_FUNCTION void set_vector(float (&d)[Config::kTile / 2], int vector, L to) {
    const int k = vector / 2 * 4 + vector % 2;
    d[k] = to.v[0], d[k + 2] = to.v[1];
  }

  // Starts the copies of the streams' part of the next tile, to `stage`.
  ONEPASS_FUNCTION void load_async(passing_rows tile, int stage) {
    if constexpr (words::kStreams != 0) {
      loaded_.go_to(tile);
      if (loaded_.exists) {
        char* const to = streams_ + stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const int row = thread() / kPieces + i * kRowsAtOnce;
          auto at = loaded_.at(row);
          at.set_copy(to + row * kRowBytes + piece_at(row, thread() % kPieces) * 16, 0);
          at.load_async();
        }
      }
      close_copy_group();
    }
  }
  // Moves to the next tile, whose copies all threads see from here on. No thread reads the tile before any more.
  ONEPASS_FUNCTION void go_to(passing_rows tile, int stage) {
    here_.go_to(tile);
    if constexpr (words::kStreams != 0) {
      stage_ = one_address(streams_ + stage * kStageBytes + row_of(0) * kRowBytes +
                           piece_at(row_of(0), 2 * warp() + pair() / 4) * 16);
      wait_for_copy_groups<0>();
      sync_warpgroup(1 + group());
    }
  }
  // body(vector, at), where the words are at each of its vectors.
  template <class Body>
  ONEPASS_FUNCTION void each_vector(const Body& body) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; vector += 4) {
      uint32 drawn[larger(1, Line::dropouts)][4];
      draw<0>(vector, drawn);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_of(vector + i);
        auto at = here_.at(row);
        at.set_copy(stage_ + (row - row_of(0)) * kRowBytes, pair() % 4 * 2);
#pragma unroll
        for (int k = 0; k < Line::dropouts; ++k) at.drawn[k] = drawn[k][i];
        body(vector + i, at);
      }
    }
  }

 private:
  // Tensors' vectors as they are loaded.
  struct loaded : words {
    static constexpr int kVectorSize = 8, kAccess = 8;
  };
  static constexpr int kPieces = 8, kRowBytes = kPieces * 16, kRowsAtOnce = kWarpgroupThreads / kPieces,
                       kTurns = Config::kTile / kRowsAtOnce;
  static constexpr int kStageBytes = cursor<words, Line, true>::kStageBytes;

  template <class cursor_type>
  struct cursor_in_tile {
    cursor_type first;
    int last = 0;  // row of the tile
    bool exists = true;

    explicit ONEPASS_FUNCTION cursor_in_tile(const arguments& a) : first(a) {}
    ONEPASS_FUNCTION void set_columns(int column, int count, int64 columns) {
      exists = column < columns;
      first.set_column(static_cast<index>(column), exists ? count : 0);
    }
    ONEPASS_FUNCTION void go_to(passing_rows tile) {
      if (tile.begins) first.set_row(static_cast<index>(tile.first + tile.row));
      else first.skip_rows(Config::kTile);
      last = tile.rows - tile.row - 1;
    }
    // For rows that do not exist, the last row.
    ONEPASS_FUNCTION cursor_type at(int row) const {
      cursor_type there = first;
      there.skip_rows(static_cast<index>(Config::kWholeRows || row < last ? row : last));
      return there;
    }
  };

  static ONEPASS_FUNCTION int group() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads; }
  static ONEPASS_FUNCTION int thread() { return static_cast<int>(threadIdx.x) % kWarpgroupThreads; }
  static ONEPASS_FUNCTION int warp() { return thread() / 32; }
  static ONEPASS_FUNCTION int pair() { return thread() % 32 / 4; }  // of the warp's keys
  // Hides the address, so that the compiler computes offsets from it.
  static ONEPASS_FUNCTION char* one_address(char* in_shared) {
    uint32 address = shared_address(in_shared);
    asm volatile("" : "+r"(address));
    return static_cast<char*>(__cvta_shared_to_generic(address));
  }
  static ONEPASS_FUNCTION int piece_at(int row, int piece) { return piece ^ row / 2 % 4 * 2; }

  // Of the four vectors from `vector` on, the thread's keys' words of each dropout from number K on.
  template <int K, class Drawn>
  ONEPASS_FUNCTION void draw(int vector, Drawn& drawn) const {
    if constexpr (K < Line::dropouts) {
      const philox_words of = here_.at(row_of(vector + pair() % 4)).template random<K>();
#pragma unroll
      for (int i = 0; i < 4; ++i) drawn[K][i] = of.word[i];
      transpose_words<4>(drawn[K]);
      draw<K + 1>(vector, drawn);
    }
  }

  cursor_in_tile<drawn_cursor<words, Line>> here_;
  cursor_in_tile<cursor<loaded, Line, true>> loaded_;
  char *streams_, *stage_ = nullptr;
};

// A group's own 64 rows or keys, and those that pass by: the first of each two are multiplied with the first, the
// second with the second.
template <class Config>
struct backward_shared {
  static constexpr int kAllAtoms = Config::kAtoms + Config::kValueAtoms;
  static constexpr int kOwnBytes = kAllAtoms * kAtomBytes, kOwnFirstBytes = Config::kAtoms * kAtomBytes;
  static constexpr int kNumbersBytes = kAllAtoms * Config::kTile * 128,
                       kTileFirstBytes = Config::kAtoms * Config::kTile * 128;
  static constexpr int kStatisticsBytes = Config::kStatistics ? Config::kTile * int{sizeof(softmax_statistics)} : 0;
  static constexpr int kTileBytes = kNumbersBytes + kStatisticsBytes;

  uint64 mine[Config::kGroups];
  uint64 full[Config::kStages], empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 own(char* dynamic, int group) { return first_tile(dynamic) + group * kOwnBytes; }
  static ONEPASS_FUNCTION uint32 tile(char* dynamic, int stage) {
    return own(dynamic, Config::kGroups) + stage * kTileBytes;
  }
  static ONEPASS_FUNCTION const softmax_statistics* statistics(char* dynamic, uint32 tile) {
    return reinterpret_cast<const softmax_statistics*>(at_shared(dynamic, tile + kNumbersBytes));
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, tile(dynamic, Config::kStages)); }
  ONEPASS_FUNCTION void open() {
    for (uint64& mbarrier : mine) init_mbarrier(&mbarrier, 1);
    for (int i = 0; i < Config::kStages; ++i) init_mbarrier(&full[i], 1), init_mbarrier(&empty[i], Config::kGroups);
    fence_mbarrier_init();
  }
};

// body(mbarrier, address) for the next stage of the ring, when it is empty.
template <class Config, class Body>
ONEPASS_FUNCTION void fill_next(backward_shared<Config>& shared, char* dynamic, ring_position<Config::kStages>& at,
                                const Body& body) {
  using layout = backward_shared<Config>;
  wait_for_mbarrier(&shared.empty[at.stage], at.phase ^ 1);
  arrive_and_expect(&shared.full[at.stage], layout::kTileBytes);
  body(shared_address(&shared.full[at.stage]), layout::tile(dynamic, at.stage));
  at.next();
}

// Of a tile, in a thread: scores, and the gradients of weights; both [own rows, the tile's].
template <class Config>
struct tile_accumulators {
  float scores[Config::kTile / 2], gradients[Config::kTile / 2];
};
// Values' gradients need no more than the weights.
template <class Config>
inline constexpr bool kReadsGradients = !Config::kStatistics || Config::kWantsKeys;

// All tiles that pass a group's own rows: finish(products, tile, step) makes of a tile's products what take(products)
// keeps, and add(tile) begins to multiply with the tile's rows.
template <class Config>
class passing_tiles {
 public:
  using layout = backward_shared<Config>;
  using products = tile_accumulators<Config>;

  ONEPASS_FUNCTION passing_tiles(backward_shared<Config>& shared, char* dynamic, int group)
      : dynamic_(dynamic), own_(layout::own(dynamic, group)), ring_(shared.full, shared.empty) {
    wait_for_mbarrier(&shared.mine[group], 0);
  }
  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void each(int steps, const Finish& finish, const Take& take, const Add& add) {
    if (steps <= 0) return;
    if constexpr (Config::kAhead == 2) ahead(steps, finish, take, add);
    else one_by_one(steps, finish, take, add);
    wait_for_wgmma<0>();
  }

 private:
  // Starts the next tile's GEMMs.
  ONEPASS_FUNCTION uint32 begin(products& of) {
    const uint32 tile = layout::tile(dynamic_, ring_.take());
    begin_wgmma();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(of.scores, own_, tile);
    if constexpr (kReadsGradients<Config>)
      multiply_rows<Config::kX, Config::kValueSteps, Config::kTile>(of.gradients, own_ + layout::kOwnFirstBytes,
                                                                    tile + layout::kTileFirstBytes);
    commit_wgmma();
    return tile;
  }
  template <class Add>
  ONEPASS_FUNCTION void sum(uint32 tile, const Add& add) {
    begin_wgmma();
    add(tile);
    commit_wgmma();
  }

  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void one_by_one(int steps, const Finish& finish, const Take& take, const Add& add) {
    products of;
    for (int step = 0; step < steps; ++step) {
      const uint32 tile = begin(of);
      wait_for_wgmma<0>();
      if (Config::kAhead > 0 && step > 0) ring_.give_back();
      finish(of, tile, step);
      take(of);
      sum(tile, add);
      if constexpr (Config::kAhead == 0) {  // there may be no other place for the next tile
        wait_for_wgmma<0>();
        ring_.give_back();
      }
    }
  }

  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void ahead(int steps, const Finish& finish, const Take& take, const Add& add) {
    products even, odd;
    uint32 tile = begin(even);
    wait_for_wgmma<0>();
    const auto turn = [&](products& now, products& next, int step) {
      wait_for_wgmma<1>();  // the sums of the tile before may be under way
      const uint32 next_tile = begin(next);
      finish(now, tile, step);
      wait_for_wgmma<1>();
      if (step > 0) ring_.give_back();
      take(now);
      sum(tile, add);
      tile = next_tile;
    };
    const auto end = [&](products& now, int step) {
      wait_for_wgmma<0>();
      finish(now, tile, step);
      take(now);
      sum(tile, add);
    };
    int step = 0;
    for (; step + 2 < steps; step += 2) {
      turn(even, odd, step);
      turn(odd, even, step + 1);
    }
    if (step + 1 < steps) {
      turn(even, odd, step);
      end(odd, step + 1);
    } else {
      end(even, step);
    }
  }

  char* dynamic_;
  const uint32 own_;
  tiles_taken<Config::kStages> ring_;
};

// Of a row in a tile of the result's gradient and the result itself: a thread's part of the sum of their products.
template <dtype D, int kAtoms>
ONEPASS_FUNCTION float product_with_result(const char* gradients, int row, const void* result, int64 depth) {
  using memory_of = memory<D, 8, 8>;
  float sum = 0.0f;
  for (int piece = static_cast<int>(threadIdx.x) % 4; piece * 8 < depth; piece += 4) {
    const char* at = gradients + piece / 8 * kAtomBytes + row * 128 + swizzled_piece(piece % 8, row) * 16;
    const auto gradient = memory_of::template numbers_of<float>(memory_of::load_written(at, 8)),
               value = memory_of::template numbers_of<float>(
                   memory_of::load(static_cast<const uint16*>(result) + piece * 8, 8));
    sum += sum_lanes(gradient * value);
  }
  return sum;
}

// Of a group of rows, counted among all.
ONEPASS_FUNCTION softmax_statistics* statistics_of(const attention_backward_arguments& a, int64 group) {
  return a.statistics + group * ((a.of.rows + kWarpgroupRows - 1) / kWarpgroupRows * kWarpgroupRows);
}

template <class Config>
ONEPASS_FUNCTION void load_for_queries(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                       char* dynamic) {
  using layout = backward_shared<Config>;
  const block_rows<Config> of(a.of);
  for (int group = 0; group < Config::kGroups; ++group) {
    const uint32 mbarrier = shared_address(&shared.mine[group]), to = layout::own(dynamic, group);
    const int row = of.first + group * kWarpgroupRows;
    arrive_and_expect(&shared.mine[group], layout::kOwnBytes);
    tma_load_rows<Config::kAtoms>(to, a.of.queries, a.of.step_queries, of.batch, row, mbarrier);
    tma_load_rows<Config::kValueAtoms>(to + layout::kOwnFirstBytes, a.gradients, a.step_gradients, of.batch, row,
                                       mbarrier);
  }
  ring_position<Config::kStages> at;
  for (int tile = 0; tile < of.tiles; ++tile) {
    fill_next(shared, dynamic, at, [&](uint32 mbarrier, uint32 to) {
      const int key = tile * Config::kTile;
      tma_load_keys<Config::kAtoms, Config::kTile>(to, a.of.keys, a.of.step_keys, of.batch, key, mbarrier);
      tma_load_keys<Config::kValueAtoms, Config::kTile>(to + layout::kTileFirstBytes, a.of.values, a.of.step_values,
                                                        of.batch, key, mbarrier);
    });
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void sum_for_queries(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                      char* dynamic) {
  using layout = backward_shared<Config>;
  using vectors = thread_rows<Config, Behind>;
  using L = typename vectors::L;
  const block_rows<Config> of(a.of);
  const int group = warpgroup_id(), left = a.of.rows - of.first - group * kWarpgroupRows;
  const uint32 queries = layout::own(dynamic, group), gradients = queries + layout::kOwnFirstBytes;
  vectors rows(a.of.behind, layout::streams(dynamic));
  rows.set_rows(of.row + group * kWarpgroupRows, left);
  rows.load_async(0, 0);
  passing_tiles<Config> tiles(shared, dynamic, group);
  softmax_statistics statistics[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const void* result = static_cast<const uint16*>(a.result) + rows.row(i) * a.of.value_depth;
    const float part = rows.exists(i) ? product_with_result<Config::kX, Config::kValueAtoms>(
                                            at_shared(dynamic, gradients), rows.own(i), result, a.of.value_depth)
                                      : 0.0f;
    const float product = sum_of_four(part);
    if (rows.exists(i)) statistics[i] = statistics_of(saved_of<Behind, float>(a.of.behind, rows.row(i)), product);
    if (left > 0 && rows.is_row_leader())
      statistics_of(a, of.number)[of.first + group * kWarpgroupRows + rows.own(i)] = statistics[i];
  }
  let_next_kernel_begin();
  weighted_sum<Config, Config::kAtoms> sum;
  tiles.each(
      of.tiles,
      [&](tile_accumulators<Config>& products, uint32, int tile) {
        rows.load_async((tile + 1) * Config::kTile, (tile + 1) % 2);
        rows.template wait_for_streams<1>(tile % 2);
        rows.each_vector(tile * Config::kTile, [&](int i, int vector, int count) {
          L scores = vectors::vector_of(products.scores, i, vector),
            gradient = vectors::vector_of(products.gradients, i, vector);
          finish_gradients<Behind>(scores, gradient, statistics[i], rows.at(i));
          if constexpr (!Config::behind::kExact) scores = where(first_n<L>(count), scores, L(0.0f));
          vectors::set_vector(products.scores, i, vector, scores);
        });
      },
      [&](const tile_accumulators<Config>& products) {
        if constexpr (Config::kWantsRows) sum.take_weights(products.scores);
      },
      [&](uint32 tile) {
        if constexpr (Config::kWantsRows) sum.add(tile);
      });
  if constexpr (Config::kWantsRows) {
    sync_warpgroup(1 + group);  // all have read the queries
    sum.store(at_shared(dynamic, queries),
              static_cast<uint16*>(a.rows_gradient) + (of.row + group * kWarpgroupRows) * a.depth, left, a.depth);
  }
}

// Which keys a block has, and which rows need them: `tiles` of each group, from tile `from` on.
template <class Config>
struct block_keys {
  batch_place batch;
  int number, first;  // of the batch; key
  int64 row;          // first of the batch, among all
  int64 key;          // first of the batch's, among all
  int from, tiles;

  explicit ONEPASS_FUNCTION block_keys(const attention_arguments& a) {
    number = static_cast<int>(blockIdx.x) / a.blocks;
    first = static_cast<int>(blockIdx.x) % a.blocks * (Config::kGroups * kWarpgroupRows);
    batch = {number / a.inner, number % a.inner, 0};
    row = int64{number} * a.group * a.rows;
    key = int64{number} * a.behind.columns;
    tiles = (a.rows + kWarpgroupRows - 1) / kWarpgroupRows;
    from = Config::kCausal ? first / kWarpgroupRows : 0;
    if (from > tiles) from = tiles;
  }
  ONEPASS_FUNCTION int steps(const attention_arguments& a) const { return a.group * (tiles - from); }
  ONEPASS_FUNCTION passing_rows first_rows(const attention_arguments& a) const {
    return {row, from * kWarpgroupRows, a.rows, true};
  }
  ONEPASS_FUNCTION passing_rows rows_after(passing_rows tile) const {
    tile.row += kWarpgroupRows, tile.begins = tile.row >= tile.rows;
    if (tile.begins) tile.row = from * kWarpgroupRows, tile.first += tile.rows;
    return tile;
  }
};

template <class Config>
ONEPASS_FUNCTION void load_for_keys(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                    char* dynamic) {
  using layout = backward_shared<Config>;
  const block_keys<Config> of(a.of);
  for (int group = 0; group < Config::kGroups; ++group) {
    const uint32 mbarrier = shared_address(&shared.mine[group]), to = layout::own(dynamic, group);
    const int key = of.first + group * Config::kTile;
    arrive_and_expect(&shared.mine[group], layout::kOwnBytes);
    tma_load_key_pairs<Config::kAtoms>(to, a.of.keys, a.of.step_keys, of.batch, key, mbarrier);
    tma_load_key_pairs<Config::kValueAtoms>(to + layout::kOwnFirstBytes, a.of.values, a.of.step_values, of.batch, key,
                                            mbarrier);
  }
  ring_position<Config::kStages> at;
  batch_place batch = of.batch;
  for (batch.group = 0; batch.group < a.of.group; ++batch.group) {
    for (int tile = of.from; tile < of.tiles; ++tile) {
      fill_next(shared, dynamic, at, [&](uint32 mbarrier, uint32 to) {
        const int row = tile * kWarpgroupRows;
        tma_load_rows<Config::kAtoms>(to, a.of.queries, a.of.step_queries, batch, row, mbarrier);
        tma_load_rows<Config::kValueAtoms>(to + layout::kTileFirstBytes, a.gradients, a.step_gradients, batch, row,
                                           mbarrier);
        bulk_load(to + layout::kNumbersBytes, statistics_of(a, of.number * a.of.group + batch.group) + row,
                  layout::kStatisticsBytes, mbarrier);
      });
    }
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void sum_for_keys(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                   char* dynamic) {
  using layout = backward_shared<Config>;
  using columns_of = thread_columns<Config, Behind>;
  using L = typename columns_of::L;
  const block_keys<Config> of(a.of);
  const int group = warpgroup_id(), first = of.first + group * kWarpgroupRows, steps = of.steps(a.of);
  columns_of columns(a.of.behind, layout::streams(dynamic), first);
  passing_rows rows = of.first_rows(a.of);
  if (steps > 0) columns.load_async(rows, 0);
  weighted_sum<Config, Config::kAtoms> of_keys;
  weighted_sum<Config, Config::kValueAtoms> of_values;
  passing_tiles<Config>(shared, dynamic, group)
      .each(
          steps,
          [&](tile_accumulators<Config>& products, uint32 tile, int step) {
            columns.go_to(rows, step % 2);
            rows = of.rows_after(rows);
            if (step + 1 < steps) columns.load_async(rows, (step + 1) % 2);
            const softmax_statistics* statistics = layout::statistics(dynamic, tile);
            columns.each_vector([&](int vector, auto& at) {
              L scores = columns_of::vector_of(products.scores, vector), gradient{};
              if constexpr (kReadsGradients<Config>) gradient = columns_of::vector_of(products.gradients, vector);
              finish_gradients<Behind>(scores, gradient, load_statistics(statistics + columns_of::row_of(vector)), at);
              columns_of::set_vector(products.scores, vector, scores);
              columns_of::set_vector(products.gradients, vector, gradient);
            });
            fence_proxy_async_shared();  // the statistics' place
          },
          [&](const tile_accumulators<Config>& products) {
            if constexpr (Config::kWantsKeys) of_keys.take_weights(products.scores);
            if constexpr (Config::kWantsValues) of_values.take_weights(products.gradients);
          },
          [&](uint32 tile) {
            if constexpr (Config::kWantsKeys) of_keys.add(tile);
            if constexpr (Config::kWantsValues) of_values.add(tile + layout::kTileFirstBytes);
          });
  sync_warpgroup(1 + group);  // all have read the keys
  const uint32 keys = layout::own(dynamic, group), values = keys + layout::kOwnFirstBytes;
  const int left = static_cast<int>(a.of.behind.columns) - first;
  const int64 to = of.key + first;
  if constexpr (Config::kWantsKeys)
    of_keys.store(at_shared(dynamic, keys), static_cast<uint16*>(a.keys_gradient) + to * a.depth, left, a.depth,
                  pair_at);
  if constexpr (Config::kWantsValues)
    of_values.store(at_shared(dynamic, values), static_cast<uint16*>(a.values_gradient) + to * a.of.value_depth, left,
                    a.of.value_depth, pair_at);
}

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_queries_sm90(const attention_backward_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ backward_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_for_queries<Config>(a, shared, dynamic); },
      [&] { sum_for_queries<Config, Behind>(a, shared, dynamic); });
}
template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_keys_sm90(const attention_backward_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ backward_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_for_keys<Config>(a, shared, dynamic); },
      [&] { sum_for_keys<Config, Behind>(a, shared, dynamic); });
}

ONEPASS_END
