// The attention kernels on sm_90a, forward and backward, share this: TMA loads of tiles of queries and keys, the
// warpgroups that consume them, and a thread's fragments of the accumulators.
//
// A warpgroup has 64 rows. The keys of a tile are permuted so that each thread has eight neighbouring columns of a row:
// row 2 p + 8 c j + i of a tile, c = p's count and i < 2, has key 8 p + 2 j + i. Config:
//   kX                     storage type throughout: bf16 or f16
//   kWarpgroups, kTile     warpgroups; keys of a tile, 64 or 128
//   kSteps, kAtoms         MMA steps of 16 and atoms of 64 of head_dim, rounded up
//   kValueAtoms            atoms of 64 of the values' head_dim; 0: there are no values
//   kStages                tiles in shared memory
//   kCausal                softmax of row i ignores columns > i
//   behind                 kernel/configuration.h, of the scores; kStreams: tensors whose next tile each thread
//                          prefetches for itself
#pragma once

#include "onepass/kernel/attention/matrices.cuda.h"
#include "onepass/kernel/common/cursor.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"
#include "onepass/kernel/common/warpgroups.cuda.h"

ONEPASS_BEGIN

// The batch and query head of matrix `number` of the queries.
ONEPASS_FUNCTION batch_index batch_of_matrix(const attention_arguments& a, int number) {
  const int batch = number / a.query_heads;
  return {batch / a.inner, batch % a.inner, number % a.query_heads};
}

// The rows of queries of a block, and the tiles of keys that they need.
template <class Config>
struct block_rows {
  batch_index batch;
  int number, first;  // the matrix of queries; the block's first row in it
  int64 row;          // the block's first row among all
  int tiles;

  explicit ONEPASS_FUNCTION block_rows(const attention_arguments& a) {
    constexpr int kRows = Config::kWarpgroups * kWarpgroupRows;
    number = static_cast<int>(blockIdx.x) / a.blocks, row = int64{number} * a.rows;
    batch = batch_of_matrix(a, number);
    first =
        (a.blocks - 1 - static_cast<int>(blockIdx.x) % a.blocks) * kRows;  // longest first: those that need most keys
    row += first;
    tiles = static_cast<int>((a.behind.columns + Config::kTile - 1) / Config::kTile);
    if constexpr (Config::kCausal) {
      const int needed = (first + kRows + Config::kTile - 1) / Config::kTile;
      if (needed < tiles) tiles = needed;
    }
  }
};

// Loads kAtoms atoms of a warpgroup's rows from `row` on.
template <int kAtoms>
ONEPASS_FUNCTION void tma_load_rows(uint32 to, const tensor_map& map, batch_steps step, batch_index of, int row,
                                    uint32 mbarrier) {
  for (int atom = 0; atom < kAtoms; ++atom)
    tma_load_tile(to + atom * kAtomBytes, map, atom * 64, row, of.query_head * step.query_head, of.inner * step.inner,
                  of.outer * step.outer, mbarrier);
}
// Loads kAtoms atoms of kTile keys from `key` on, a multiple of 8.
template <int kAtoms, int kTile>
ONEPASS_FUNCTION void tma_load_keys(uint32 to, const tensor_map& map, batch_steps step, batch_index of, int key,
                                    uint32 mbarrier) {
  constexpr int kPart = kTile / 4;
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      tma_load_tile(to + (atom * kTile + j * kPart) * 128, map, atom * 64, 2 * j, key / 8, of.inner * step.inner,
                    of.outer * step.outer, mbarrier);
  }
}

// The key in a row of the tile.
template <int kTile>
ONEPASS_FUNCTION int key_at(int row) {
  constexpr int kPart = kTile / 4;
  return row % kPart / 2 * 8 + row / kPart * 2 + row % 2;
}

// The consumer's end of a ring of tiles that the producer thread loads: waits for tiles and releases them, in order.
template <int kStages>
class ring_consumer {
 public:
  ONEPASS_FUNCTION ring_consumer(uint64 (&full)[kStages], uint64 (&empty)[kStages]) : full_(full), empty_(empty) {}
  ONEPASS_FUNCTION int wait() {
    const int stage = next_.stage;
    wait_for_mbarrier(&full_[stage], next_.phase);
    next_.next();
    return stage;
  }
  ONEPASS_FUNCTION void release() {
    if (threadIdx.x % kWarpgroupThreads == 0) arrive(&empty_[oldest_.stage]);
    oldest_.next();
  }

 private:
  uint64 (&full_)[kStages], (&empty_)[kStages];
  ring_position<kStages> next_, oldest_;
};

// GEMM of a warpgroup's 64 rows with a tile of kRows rows; K is kSteps steps of 16.
template <dtype D, int kSteps, int kRows>
ONEPASS_FUNCTION void multiply_rows(float (&d)[kRows / 2], uint32 rows, uint32 tile) {
  const uint64 a = tile_descriptor(rows), b = tile_descriptor(tile);
  forget(d);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int atom = step / 4, within = step % 4 * 2;
    add_wgmma<D, kRows>(d, a + (atom * kAtomBytes >> 4) + within, b + (atom * kRows * 128 >> 4) + within, step > 0);
  }
}

// A thread's fragment of 64 rows of accumulators: two rows, eight apart, in tiles of kTile columns. Cursor: the words'.
template <class Config, class Line, class Cursor = cursor<typename Config::behind, Line>>
class row_fragments {
 public:
  using words = typename Config::behind;
  using index = typename words::index;
  using cursor_type = Cursor;
  using L = pack<float, 8>;
  static constexpr int kVectors = Config::kTile / 32;
  static_assert(cursor_of<Cursor, L>);

  ONEPASS_FUNCTION row_fragments(const arguments& a, char* streams) : a_(a), at_{cursor_type(a), cursor_type(a)} {
    own_ = row_of_accumulators();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at_[i].set_copies(streams, static_cast<int>(threadIdx.x) / kWarpgroupThreads * kWarpgroupRows + own(i));
    }
    set_stage(0);
  }
  // The warpgroup's rows begin at `first` among all; `count` of them exist.
  ONEPASS_FUNCTION void set_rows(int64 first, int count) {
    first_ = first, count_ = count;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at_[i].set_row(static_cast<index>(first));
      at_[i].skip_rows(own(i));
      at_[i].set_exists(exists(i), count > 0);
    }
  }
  // Moves on by `rows` rows of the same matrix.
  ONEPASS_FUNCTION void skip_rows(int rows, int count) {
    first_ += rows, count_ = count;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at_[i].skip_rows(static_cast<index>(rows));
      at_[i].set_exists(exists(i), count > 0);
    }
  }
  ONEPASS_FUNCTION int own(int i) const { return own_ + 8 * i; }  // among the warpgroup's
  ONEPASS_FUNCTION int64 row(int i) const { return first_ + own(i); }
  ONEPASS_FUNCTION bool exists(int i) const { return own(i) < count_; }
  // The first thread of row i's four.
  ONEPASS_FUNCTION bool is_row_leader() const { return threadIdx.x % 4 == 0; }
  ONEPASS_FUNCTION cursor_type& at(int i) { return at_[i]; }

  // Calls body(i, vector, count) with the words' cursors at each vector of the tile that begins at `first`.
  template <class Body>
  ONEPASS_FUNCTION void each_vector(int first, const Body& body) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const index column = column_of_vector(first, vector);
      const int count = words::kExact ? 8 : count_at<8>(column, a_.columns);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        at_[i].set_column(column, count);
        at_[i].set_vector(vector);
        body(i, vector, count);
      }
    }
  }
  // A vector of row i of the tile's accumulators.
  static ONEPASS_FUNCTION L vector_of(const float (&d)[Config::kTile / 2], int i, int vector) {
    L of;
#pragma unroll
    for (int c = 0; c < 8; ++c) of.v[c] = d[index_of_accumulator(i, vector, c)];
    return of;
  }
  static ONEPASS_FUNCTION void set_vector(float (&d)[Config::kTile / 2], int i, int vector, L to) {
#pragma unroll
    for (int c = 0; c < 8; ++c) d[index_of_accumulator(i, vector, c)] = to.v[c];
  }

  // Replaces each vector of accumulators of the tile that begins at `first` by change(i, vector, count).
  template <class Change>
  ONEPASS_FUNCTION void change_vectors(float (&d)[Config::kTile / 2], int first, const Change& change) {
    each_vector(first, [&](int i, int vector, int count) {
      set_vector(d, i, vector, change(i, vector_of(d, i, vector), count));
    });
  }
  // Applies the words before softmax to the scores.
  ONEPASS_FUNCTION void finish(float (&d)[Config::kTile / 2], int first) {
    change_vectors(d, first, [&](int i, L scores, int count) {
      scores = Line::pre::forward(scores, at(i));
      if constexpr (!words::kExact) scores = where(first_n<L>(count), scores, L(-kInfinity));
      return scores;
    });
  }

  // The largest of the thread's accumulators in row i.
  static ONEPASS_FUNCTION float largest(const float (&d)[Config::kTile / 2], int i) {
    float most = d[2 * i];
#pragma unroll
    for (int k = 2 * i; k < Config::kTile / 2; k += 4) most = max_number(most, max_number(d[k], d[k + 1]));
    return most;
  }

  // Starts async copies of the streams' part of the tile that begins at `first` to `stage`.
  ONEPASS_FUNCTION void load_async(int first, int stage = 0) {
    if constexpr (words::kStreams != 0) {
      set_stage(stage);
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const index column = column_of_vector(first, vector);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!exists(i) || column >= a_.columns) continue;
          at_[i].set_column(column, 8);
          at_[i].set_vector(vector);
          at_[i].load_async();
        }
      }
      close_copy_group();
    }
  }
  // Waits for the copies of all but the last kPending tiles; those in `stage` are read next.
  template <int kPending = 0>
  ONEPASS_FUNCTION void wait_for_streams(int stage = 0) {
    if constexpr (words::kStreams != 0) {
      wait_for_copy_groups<kPending>();
      set_stage(stage);
    }
  }

 private:
  ONEPASS_FUNCTION void set_stage(int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) at_[i].set_stage(stage);
  }
  static ONEPASS_FUNCTION int index_of_accumulator(int i, int vector, int c) {
    return 4 * (kVectors * (c / 2) + vector) + 2 * i + c % 2;
  }
  static ONEPASS_FUNCTION index column_of_vector(int first, int vector) {
    return static_cast<index>(first + vector * 32 + threadIdx.x % 4 * 8);
  }

  const arguments& a_;
  cursor_type at_[2];
  int64 first_ = 0;
  int own_, count_ = 0;
};

// Copies 64 rows of accumulators from shared memory, where store_accumulators left them, to global memory: those of
// which row_of(row) is below `rows`, and the first `head_dim` elements of each.
template <int kHeadDim, class RowOf>
ONEPASS_FUNCTION void store_staged_rows(const char* staged, uint16* to, int64 stride, int rows, int64 head_dim,
                                        const RowOf& row_of) {
  constexpr int kChunks = kHeadDim / 8, kAtOnce = kWarpgroupThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, piece = thread % kChunks;
  if (thread >= kAtOnce * kChunks || piece * 8 >= head_dim) return;
#pragma unroll 4
  for (int r = thread / kChunks; r < kWarpgroupRows; r += kAtOnce) {
    if (row_of(r) < rows)
      *reinterpret_cast<uint4*>(to + row_of(r) * stride + piece * 8) =
          *reinterpret_cast<const uint4*>(staged + r * (kHeadDim * 2) + swizzled_piece(piece, r) * 16);
  }
}

// 64 rows of P·V, or of another GEMM whose left factor is in registers: accumulators over tiles.
template <class Config, int kAtoms>
class weighted_sum {
 public:
  static constexpr int kHeadDim = kAtoms * 64;

  // Converts a tile's accumulators to the left factor of the next wgmma, in registers.
  ONEPASS_FUNCTION void set_left_factor(const float (&d)[Config::kTile / 2]) {
#pragma unroll
    for (int step = 0; step < Config::kTile / 16; ++step) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        weights_[step][k] = pair_to_storage<Config::kX>(d[8 * step + 2 * k], d[8 * step + 2 * k + 1]);
    }
  }
  // Issues the wgmmas of a tile; the caller fences and commits them.
  ONEPASS_FUNCTION void add(uint32 tile) {
    const uint64 rows = transposed_tile_descriptor<Config::kTile>(tile);
#pragma unroll
    for (int step = 0; step < Config::kTile / 16; ++step)
      add_wgmma_of_registers<Config::kX, kHeadDim, Config::kTile * 128>(sums_, weights_[step], rows + 128 * step);
  }
  ONEPASS_FUNCTION void scale(const float (&factors)[2]) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 2; ++k) sums_[k] *= factors[k / 2 % 2];
  }
  // Stores 64 rows to `to`, of which `rows` exist, `stride` apart, through shared memory of this warpgroup.
  ONEPASS_FUNCTION void store(char* shared, uint16* to, int64 stride, int rows, int64 head_dim) const {
    store(shared, to, stride, rows, head_dim, [](int row) { return row; });
  }
  // row_of(row): the row of `to` for a row.
  template <class RowOf>
  ONEPASS_FUNCTION void store(char* shared, uint16* to, int64 stride, int rows, int64 head_dim,
                              const RowOf& row_of) const {
    store_accumulators<Config::kX, kHeadDim>(sums_, shared);
    sync_warpgroup(1 + static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    store_staged_rows<kHeadDim>(shared, to, stride, rows, head_dim, row_of);
  }

 private:
  float sums_[kHeadDim / 2] = {};
  uint32 weights_[Config::kTile / 16][4];
};

// Warp specialisation: one producer thread loads tiles while the consumer warpgroups multiply.
template <class Config, class Shared, class Produce, class Multiply>
ONEPASS_FUNCTION void produce_and_consume(Shared& shared, const Produce& load_async, const Multiply& multiply) {
  if (threadIdx.x == 0) shared.open();
  __syncthreads();
  wait_for_kernel_before();
  // setmaxnreg: the registers of all warps add up to the 65536 of an SM.
  if (threadIdx.x >= Config::kWarpgroups * kWarpgroupThreads) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == Config::kWarpgroups * kWarpgroupThreads) load_async();
  } else {
    setmaxnreg_inc<Config::kWarpgroups == 2 ? 240 : 160>();
    multiply();
  }
}

ONEPASS_END
