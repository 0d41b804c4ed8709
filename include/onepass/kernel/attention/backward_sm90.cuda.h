// Backward of lines with `scores`, softmax and `values` (sm_90a), in two kernels that write nothing of the scores'
// size. The first has rows of queries, loops over keys and values, and computes dQ and the gradients of the words'
// tensors. The second has keys and values, loops over rows of queries and of grad_output, and computes dK and dV. Each
// recomputes the scores with its own 64 rows as the rows of all its GEMMs, so that the left factors of the sums come
// from registers. No sum depends on the order of blocks. (Dao, "FlashAttention-2", 2023, has one kernel whose blocks
// add to the same rows.)
//
// Softmax's gradient needs delta = Σ P · dP of a row. It equals Σ output · grad_output, since the words behind softmax
// multiply. The first kernel stores delta and softmax's statistics for the second.
//
// Config beside kernel/attention/tiles_sm90.cuda.h:
//   kValueSteps   MMA steps of 16 of the values' head_dim, rounded up
//   kAhead        how far GEMMs overlap, as registers allow: 1, the next tile's scores with this tile's sums; 2, also
//                 with this tile's softmax
//   kStatistics   a stage has the softmax_statistics of its rows
//   kWholeRows    the rows are a multiple of the tile
//   kWantsQueries, kWantsKeys, kWantsValues   which gradients are wanted
//   behind        forward's, with the tensors whose gradients are wanted; in the second kernel a vector is two keys
#pragma once

#include "onepass/kernel/attention/row_softmax.cuda.h"
#include "onepass/kernel/attention/tiles_sm90.cuda.h"

ONEPASS_BEGIN

// S^T fragments: a thread has two neighbouring keys of the accumulators [keys, rows]. Row 16 w + 8 i + p of the tile of
// keys (w < 4, i < 2, p < 8) has key 16 w + 2 p + i.

// The key in a row of the tile.
ONEPASS_FUNCTION int pair_at(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }

// Loads kAtoms atoms of 64 keys from `key` on, in that order. The map is [outer, inner, keys / 2, 2, head_dim].
template <int kAtoms>
ONEPASS_FUNCTION void tma_load_key_pairs(uint32 to, const tensor_map& map, batch_steps step, batch_index of, int key,
                                         uint32 mbarrier) {
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      tma_load_tile(to + atom * kAtomBytes + i * 1024, map, atom * 64, i % 2, key / 2 + i / 2 * 8,
                    of.inner * step.inner, of.outer * step.outer, mbarrier);
  }
}

// A tile of rows of queries: it begins at `row` of its matrix, which has `rows` rows and begins at row `first` among
// all.
struct query_tile {
  int64 first;
  int row, rows;
  bool begins;  // the tile is the first of its matrix
};

// A cursor at two keys whose random words are drawn already: one word per dropout; its low half is the first key's.
template <class Words, class Line>
struct drawn_cursor : cursor<Words, Line, true> {
  uint32 drawn[larger(1, Line::dropouts)];

  explicit ONEPASS_FUNCTION drawn_cursor(const arguments& a) : cursor<Words, Line, true>(a) {}
  template <class L, int K>
  ONEPASS_FUNCTION pack_mask<2> keeps(int threshold) const {
    return random_at_least<2>({{drawn[K]}}, 0, threshold);
  }
};

// A thread's two keys in tiles of kTile rows: vector k is row 8 (k / 2) + 2 (thread % 4) + k % 2. A warpgroup's threads
// load the words' tensors together: 8 chunks of 8 elements of each row of a tile, swizzled so that rows which are read
// at once lie in different banks. Eight neighbours of a row share four random words. The four threads that have these
// neighbours draw them, each for every fourth vector. Tensors get no gradients.
template <class Config, class Line>
class transposed_fragments {
 public:
  using words = typename Config::behind;
  using index = typename words::index;
  using L = pack<float, 2>;
  static constexpr int kVectors = Config::kTile / 4;

  // The warpgroup's keys begin at `first`.
  ONEPASS_FUNCTION transposed_fragments(const arguments& a, char* streams, int first)
      : here_(a), loaded_(a), streams_(streams + warpgroup() * (Config::kTile * kRowBytes)) {
    here_.set_columns(first + warp() * 16 + pair() * 2, 2, a.columns);
    loaded_.set_columns(first + thread() % kChunks * 8, 8, a.columns);
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

  // Starts async copies of the streams' part of the next tile to `stage`.
  ONEPASS_FUNCTION void load_async(query_tile tile, int stage) {
    if constexpr (words::kStreams != 0) {
      loaded_.go_to(tile);
      if (loaded_.exists) {
        char* const to = streams_ + stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int row = thread() / kChunks + i * kRowsAtOnce;
          auto at = loaded_.at(row);
          at.set_copy(to + row * kRowBytes + piece_at(row, thread() % kChunks) * 16, 0);
          at.load_async();
        }
      }
      close_copy_group();
    }
  }
  // Moves to the next tile. All threads see its copies from here on, and no thread reads the previous tile any more.
  ONEPASS_FUNCTION void go_to(query_tile tile, int stage) {
    here_.go_to(tile);
    if constexpr (words::kStreams != 0) {
      stage_ = one_address(streams_ + stage * kStageBytes + row_of(0) * kRowBytes +
                           piece_at(row_of(0), 2 * warp() + pair() / 4) * 16);
      wait_for_copy_groups<0>();
      sync_warpgroup(1 + warpgroup());
    }
  }
  // Calls body(vector, at) with the words' cursor at each vector.
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
  // The words' configuration for loads, in vectors of 8.
  struct loaded : words {
    static constexpr int kVectorSize = 8, kAccess = 8;
  };
  static constexpr int kChunks = 8, kRowBytes = kChunks * 16, kRowsAtOnce = kWarpgroupThreads / kChunks,
                       kPasses = Config::kTile / kRowsAtOnce;
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
    ONEPASS_FUNCTION void go_to(query_tile tile) {
      if (tile.begins) first.set_row(static_cast<index>(tile.first + tile.row));
      else first.skip_rows(Config::kTile);
      last = tile.rows - tile.row - 1;
    }
    // A row that does not exist is replaced by the last row.
    ONEPASS_FUNCTION cursor_type at(int row) const {
      cursor_type there = first;
      there.skip_rows(static_cast<index>(Config::kWholeRows || row < last ? row : last));
      return there;
    }
  };

  static ONEPASS_FUNCTION int warpgroup() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads; }
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

  // Draws the words of each dropout from number K on, for the four vectors from `vector` on.
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

// Shared memory: each warpgroup's own 64 rows or keys, and the ring of tiles that it loops over. Both have two
// operands: the first ones give the scores (Q, K), the second ones dP (grad_output, V).
template <class Config>
struct backward_shared {
  static constexpr int kAllAtoms = Config::kAtoms + Config::kValueAtoms;
  static constexpr int kOwnBytes = kAllAtoms * kAtomBytes, kOwnFirstBytes = Config::kAtoms * kAtomBytes;
  static constexpr int kOperandBytes = kAllAtoms * Config::kTile * 128,
                       kTileFirstBytes = Config::kAtoms * Config::kTile * 128;
  static constexpr int kStatisticsBytes = Config::kStatistics ? Config::kTile * int{sizeof(softmax_statistics)} : 0;
  static constexpr int kTileBytes = kOperandBytes + kStatisticsBytes;

  uint64 mine[Config::kWarpgroups];
  uint64 full[Config::kStages], empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 own(char* dynamic, int warpgroup) {
    return first_tile(dynamic) + warpgroup * kOwnBytes;
  }
  static ONEPASS_FUNCTION uint32 tile(char* dynamic, int stage) {
    return own(dynamic, Config::kWarpgroups) + stage * kTileBytes;
  }
  static ONEPASS_FUNCTION const softmax_statistics* statistics(char* dynamic, uint32 tile) {
    return reinterpret_cast<const softmax_statistics*>(at_shared(dynamic, tile + kOperandBytes));
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, tile(dynamic, Config::kStages)); }
  ONEPASS_FUNCTION void open() {
    for (uint64& mbarrier : mine) init_mbarrier(&mbarrier, 1);
    for (int i = 0; i < Config::kStages; ++i) init_mbarrier(&full[i], 1), init_mbarrier(&empty[i], Config::kWarpgroups);
    fence_mbarrier_init();
  }
};

// Waits until the next stage of the ring is empty, and calls body(mbarrier, address) to load it.
template <class Config, class Body>
ONEPASS_FUNCTION void fill_stage(backward_shared<Config>& shared, char* dynamic, ring_position<Config::kStages>& at,
                                 const Body& body) {
  using layout = backward_shared<Config>;
  wait_for_mbarrier(&shared.empty[at.stage], at.phase ^ 1);
  arrive_and_expect(&shared.full[at.stage], layout::kTileBytes);
  body(shared_address(&shared.full[at.stage]), layout::tile(dynamic, at.stage));
  at.next();
}

// A thread's fragments of a tile: S and dP, both [own rows, the tile's rows].
template <class Config>
struct tile_accumulators {
  float scores[Config::kTile / 2], gradients[Config::kTile / 2];
};
// dV alone needs P, but not dP.
template <class Config>
inline constexpr bool kReadsGradients = !Config::kStatistics || Config::kWantsKeys;

// The mainloop over all tiles. For each, finish(products, tile, step) applies softmax's backward to the accumulators,
// take(products) converts them to left factors, and add(tile) issues the GEMMs with the tile's rows.
template <class Config>
class backward_mainloop {
 public:
  using layout = backward_shared<Config>;
  using products = tile_accumulators<Config>;

  ONEPASS_FUNCTION backward_mainloop(backward_shared<Config>& shared, char* dynamic, int warpgroup)
      : dynamic_(dynamic), own_(layout::own(dynamic, warpgroup)), ring_(shared.full, shared.empty) {
    wait_for_mbarrier(&shared.mine[warpgroup], 0);
  }
  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void each(int steps, const Finish& finish, const Take& take, const Add& add) {
    if (steps <= 0) return;
    if constexpr (Config::kAhead == 2) ahead(steps, finish, take, add);
    else in_order(steps, finish, take, add);
    wait_for_wgmma<0>();
  }

 private:
  // Starts the next tile's GEMMs.
  ONEPASS_FUNCTION uint32 begin(products& of) {
    const uint32 tile = layout::tile(dynamic_, ring_.wait());
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
  ONEPASS_FUNCTION void in_order(int steps, const Finish& finish, const Take& take, const Add& add) {
    products of;
    for (int step = 0; step < steps; ++step) {
      const uint32 tile = begin(of);
      wait_for_wgmma<0>();
      if (Config::kAhead > 0 && step > 0) ring_.release();
      finish(of, tile, step);
      take(of);
      sum(tile, add);
      if constexpr (Config::kAhead == 0) {  // the ring may have one stage only
        wait_for_wgmma<0>();
        ring_.release();
      }
    }
  }

  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void ahead(int steps, const Finish& finish, const Take& take, const Add& add) {
    products even, odd;
    uint32 tile = begin(even);
    wait_for_wgmma<0>();
    const auto step_over = [&](products& now, products& next, int step) {
      wait_for_wgmma<1>();  // the previous tile's sums may still be running
      const uint32 next_tile = begin(next);
      finish(now, tile, step);
      wait_for_wgmma<1>();
      if (step > 0) ring_.release();
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
      step_over(even, odd, step);
      step_over(odd, even, step + 1);
    }
    if (step + 1 < steps) {
      step_over(even, odd, step);
      end(odd, step + 1);
    } else {
      end(even, step);
    }
  }

  char* dynamic_;
  const uint32 own_;
  ring_consumer<Config::kStages> ring_;
};

// A thread's part of delta = Σ output · grad_output of a row; grad_output is in a tile in shared memory.
template <dtype D, int kAtoms>
ONEPASS_FUNCTION float partial_delta(const char* gradients, int row, const void* output, int64 head_dim) {
  using memory_of = memory<D, 8, 8>;
  float sum = 0.0f;
  for (int piece = static_cast<int>(threadIdx.x) % 4; piece * 8 < head_dim; piece += 4) {
    const char* at = gradients + piece / 8 * kAtomBytes + row * 128 + swizzled_piece(piece % 8, row) * 16;
    const auto gradient = memory_of::template numbers_of<float>(memory_of::load_written(at, 8)),
               value = memory_of::template numbers_of<float>(
                   memory_of::load(static_cast<const uint16*>(output) + piece * 8, 8));
    sum += sum_lanes(gradient * value);
  }
  return sum;
}

// The statistics of a matrix of queries, counted among all.
ONEPASS_FUNCTION softmax_statistics* statistics_of(const attention_backward_arguments& a, int64 matrix) {
  return a.statistics + matrix * ((a.forward.rows + kWarpgroupRows - 1) / kWarpgroupRows * kWarpgroupRows);
}

template <class Config>
ONEPASS_FUNCTION void load_for_dq(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                  char* dynamic) {
  using layout = backward_shared<Config>;
  const block_rows<Config> of(a.forward);
  for (int warpgroup = 0; warpgroup < Config::kWarpgroups; ++warpgroup) {
    const uint32 mbarrier = shared_address(&shared.mine[warpgroup]), to = layout::own(dynamic, warpgroup);
    const int row = of.first + warpgroup * kWarpgroupRows;
    arrive_and_expect(&shared.mine[warpgroup], layout::kOwnBytes);
    tma_load_rows<Config::kAtoms>(to, a.forward.queries, a.forward.step_queries, of.batch, row, mbarrier);
    tma_load_rows<Config::kValueAtoms>(to + layout::kOwnFirstBytes, a.grad_output, a.step_grad_output, of.batch, row,
                                       mbarrier);
  }
  ring_position<Config::kStages> at;
  for (int tile = 0; tile < of.tiles; ++tile) {
    fill_stage(shared, dynamic, at, [&](uint32 mbarrier, uint32 to) {
      const int key = tile * Config::kTile;
      tma_load_keys<Config::kAtoms, Config::kTile>(to, a.forward.keys, a.forward.step_keys, of.batch, key, mbarrier);
      tma_load_keys<Config::kValueAtoms, Config::kTile>(to + layout::kTileFirstBytes, a.forward.values,
                                                        a.forward.step_values, of.batch, key, mbarrier);
    });
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void compute_dq(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                 char* dynamic) {
  using layout = backward_shared<Config>;
  using vectors = row_fragments<Config, Behind>;
  using L = typename vectors::L;
  const block_rows<Config> of(a.forward);
  const int warpgroup = warpgroup_id(), left = a.forward.rows - of.first - warpgroup * kWarpgroupRows;
  const uint32 queries = layout::own(dynamic, warpgroup), gradients = queries + layout::kOwnFirstBytes;
  vectors rows(a.forward.behind, layout::streams(dynamic));
  rows.set_rows(of.row + warpgroup * kWarpgroupRows, left);
  rows.load_async(0, 0);
  backward_mainloop<Config> tiles(shared, dynamic, warpgroup);
  softmax_statistics statistics[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const void* output = row_of(a.output, of.batch, of.first + warpgroup * kWarpgroupRows + rows.own(i));
    const float part = rows.exists(i)
                           ? partial_delta<Config::kX, Config::kValueAtoms>(at_shared(dynamic, gradients), rows.own(i),
                                                                            output, a.forward.value_head_dim)
                           : 0.0f;
    const float product = sum_of_four(part);
    if (rows.exists(i)) statistics[i] = statistics_of(saved_of<Behind, float>(a.forward.behind, rows.row(i)), product);
    if (left > 0 && rows.is_row_leader())
      statistics_of(a, of.number)[of.first + warpgroup * kWarpgroupRows + rows.own(i)] = statistics[i];
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
          softmax_backward<Behind>(scores, gradient, statistics[i], rows.at(i));
          if constexpr (!Config::behind::kExact) scores = where(first_n<L>(count), scores, L(0.0f));
          vectors::set_vector(products.scores, i, vector, scores);
        });
      },
      [&](const tile_accumulators<Config>& products) {
        if constexpr (Config::kWantsQueries) sum.set_left_factor(products.scores);
      },
      [&](uint32 tile) {
        if constexpr (Config::kWantsQueries) sum.add(tile);
      });
  if constexpr (Config::kWantsQueries) {
    sync_warpgroup(1 + warpgroup);  // all have read the queries
    sum.store(at_shared(dynamic, queries), row_of(a.grad_queries, of.batch, of.first + warpgroup * kWarpgroupRows),
              a.grad_queries.row_stride, left, a.head_dim);
  }
}

// The keys of a block, and the tiles of rows that need them: those from `from` to `tiles` of each query head.
template <class Config>
struct block_keys {
  batch_index batch;
  int number, first;  // the batch; the block's first key in it
  int64 row;          // the batch's first row, among all
  int from, tiles;

  explicit ONEPASS_FUNCTION block_keys(const attention_arguments& a) {
    number = static_cast<int>(blockIdx.x) / a.blocks;
    first = static_cast<int>(blockIdx.x) % a.blocks * (Config::kWarpgroups * kWarpgroupRows);
    batch = {number / a.inner, number % a.inner, 0};
    row = int64{number} * a.query_heads * a.rows;
    tiles = (a.rows + kWarpgroupRows - 1) / kWarpgroupRows;
    from = Config::kCausal ? first / kWarpgroupRows : 0;
    if (from > tiles) from = tiles;
  }
  ONEPASS_FUNCTION int steps(const attention_arguments& a) const { return a.query_heads * (tiles - from); }
  ONEPASS_FUNCTION query_tile first_rows(const attention_arguments& a) const {
    return {row, from * kWarpgroupRows, a.rows, true};
  }
  ONEPASS_FUNCTION query_tile rows_after(query_tile tile) const {
    tile.row += kWarpgroupRows, tile.begins = tile.row >= tile.rows;
    if (tile.begins) tile.row = from * kWarpgroupRows, tile.first += tile.rows;
    return tile;
  }
};

template <class Config>
ONEPASS_FUNCTION void load_for_dk_dv(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                     char* dynamic) {
  using layout = backward_shared<Config>;
  const block_keys<Config> of(a.forward);
  for (int warpgroup = 0; warpgroup < Config::kWarpgroups; ++warpgroup) {
    const uint32 mbarrier = shared_address(&shared.mine[warpgroup]), to = layout::own(dynamic, warpgroup);
    const int key = of.first + warpgroup * Config::kTile;
    arrive_and_expect(&shared.mine[warpgroup], layout::kOwnBytes);
    tma_load_key_pairs<Config::kAtoms>(to, a.forward.keys, a.forward.step_keys, of.batch, key, mbarrier);
    tma_load_key_pairs<Config::kValueAtoms>(to + layout::kOwnFirstBytes, a.forward.values, a.forward.step_values,
                                            of.batch, key, mbarrier);
  }
  ring_position<Config::kStages> at;
  batch_index batch = of.batch;
  for (batch.query_head = 0; batch.query_head < a.forward.query_heads; ++batch.query_head) {
    for (int tile = of.from; tile < of.tiles; ++tile) {
      fill_stage(shared, dynamic, at, [&](uint32 mbarrier, uint32 to) {
        const int row = tile * kWarpgroupRows;
        tma_load_rows<Config::kAtoms>(to, a.forward.queries, a.forward.step_queries, batch, row, mbarrier);
        tma_load_rows<Config::kValueAtoms>(to + layout::kTileFirstBytes, a.grad_output, a.step_grad_output, batch, row,
                                           mbarrier);
        bulk_load(to + layout::kOperandBytes,
                  statistics_of(a, of.number * a.forward.query_heads + batch.query_head) + row,
                  layout::kStatisticsBytes, mbarrier);
      });
    }
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void compute_dk_dv(const attention_backward_arguments& a, backward_shared<Config>& shared,
                                    char* dynamic) {
  using layout = backward_shared<Config>;
  using columns_of = transposed_fragments<Config, Behind>;
  using L = typename columns_of::L;
  const block_keys<Config> of(a.forward);
  const int warpgroup = warpgroup_id(), first = of.first + warpgroup * kWarpgroupRows, steps = of.steps(a.forward);
  columns_of columns(a.forward.behind, layout::streams(dynamic), first);
  query_tile rows = of.first_rows(a.forward);
  if (steps > 0) columns.load_async(rows, 0);
  weighted_sum<Config, Config::kAtoms> of_keys;
  weighted_sum<Config, Config::kValueAtoms> of_values;
  backward_mainloop<Config>(shared, dynamic, warpgroup)
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
              softmax_backward<Behind>(scores, gradient, load_statistics(statistics + columns_of::row_of(vector)), at);
              columns_of::set_vector(products.scores, vector, scores);
              columns_of::set_vector(products.gradients, vector, gradient);
            });
            fence_proxy_async_shared();  // the statistics are overwritten by the next load
          },
          [&](const tile_accumulators<Config>& products) {
            if constexpr (Config::kWantsKeys) of_keys.set_left_factor(products.scores);
            if constexpr (Config::kWantsValues) of_values.set_left_factor(products.gradients);
          },
          [&](uint32 tile) {
            if constexpr (Config::kWantsKeys) of_keys.add(tile);
            if constexpr (Config::kWantsValues) of_values.add(tile + layout::kTileFirstBytes);
          });
  sync_warpgroup(1 + warpgroup);  // all have read the keys
  const uint32 keys = layout::own(dynamic, warpgroup), values = keys + layout::kOwnFirstBytes;
  const int left = static_cast<int>(a.forward.behind.columns) - first;
  if constexpr (Config::kWantsKeys)
    of_keys.store(at_shared(dynamic, keys), row_of(a.grad_keys, of.batch, first), a.grad_keys.row_stride, left,
                  a.head_dim, pair_at);
  if constexpr (Config::kWantsValues)
    of_values.store(at_shared(dynamic, values), row_of(a.grad_values, of.batch, first), a.grad_values.row_stride, left,
                    a.forward.value_head_dim, pair_at);
}

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_queries_sm90(const attention_backward_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ backward_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_for_dq<Config>(a, shared, dynamic); },
      [&] { compute_dq<Config, Behind>(a, shared, dynamic); });
}
template <class Config, class Behind>
ONEPASS_FUNCTION void attention_backward_keys_sm90(const attention_backward_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ backward_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_for_dk_dv<Config>(a, shared, dynamic); },
      [&] { compute_dk_dv<Config, Behind>(a, shared, dynamic); });
}

ONEPASS_END
