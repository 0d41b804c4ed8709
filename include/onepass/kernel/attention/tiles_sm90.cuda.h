// What the attention kernels share on sm_90a, forward and backward: TMA loads of tiles of queries and keys, the
// warpgroups that consume them, and a thread's fragments of the accumulators.
//
// A warpgroup has 64 rows. Keys of a tile are permuted so that each thread has eight neighbouring columns of a row: in
// row 2 p + 8 c j + i of a tile, c = p's count and i < 2, the key is 8 p + 2 j + i. Config:
//   kX                     storage type throughout: bf16 or f16
//   kGroups, kTile         warpgroups; keys of a tile, 64 or 128
//   kSteps, kAtoms        16s and 64s of head_dim, begun ones too
//   kValueAtoms           64s of the values' head_dim; 0: there are none
//   kStages                tiles in shared memory
//   kCausal                softmax of row i ignores columns > i
//   behind                 kernel/configuration.h, of the scores; kStreams: tensors whose next tile each thread
//                          loads ahead, for itself
#pragma once

#include "onepass/kernel/attention/arguments.h"
#include "onepass/kernel/common/cursor.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"
#include "onepass/kernel/common/warpgroups.cuda.h"

ONEPASS_BEGIN

// A batch, and which of the groups of rows that share its keys.
struct batch_place {
  int outer, inner, group;
};

// The matrix of queries with that number.
ONEPASS_FUNCTION batch_place batch_of_matrix(const attention_arguments& a, int number) {
  const int batch = number / a.group;
  return {batch / a.inner, batch % a.inner, number % a.group};
}

// The rows of a block, and the tiles of keys that they need.
template <class Config>
struct block_rows {
  batch_place batch;
  int number, first;  // of the group; row of the block among those of its group
  int64 row;          // and among all
  int tiles;

  explicit ONEPASS_FUNCTION block_rows(const attention_arguments& a) {
    constexpr int kRows = Config::kGroups * kWarpgroupRows;
    number = static_cast<int>(blockIdx.x) / a.blocks, row = int64{number} * a.rows;
    batch = batch_of_matrix(a, number);
    first = (a.blocks - 1 - static_cast<int>(blockIdx.x) % a.blocks) * kRows;  // those that need most keys come first
    row += first;
    tiles = static_cast<int>((a.behind.columns + Config::kTile - 1) / Config::kTile);
    if constexpr (Config::kCausal) {
      const int needed = (first + kRows + Config::kTile - 1) / Config::kTile;
      if (needed < tiles) tiles = needed;
    }
  }
};

// kAtoms atoms of a warpgroup's rows from `row` on.
template <int kAtoms>
ONEPASS_FUNCTION void tma_load_rows(uint32 to, const tensor_map& map, batch_steps step, batch_place of, int row,
                                    uint32 mbarrier) {
  for (int atom = 0; atom < kAtoms; ++atom)
    tma_load_tile(to + atom * kAtomBytes, map, atom * 64, row, of.group * step.group, of.inner * step.inner,
                  of.outer * step.outer, mbarrier);
}
// Of kTile keys from `key` on, a multiple of 8.
template <int kAtoms, int kTile>
ONEPASS_FUNCTION void tma_load_keys(uint32 to, const tensor_map& map, batch_steps step, batch_place of, int key,
                                    uint32 mbarrier) {
  constexpr int kPart = kTile / 4;
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      tma_load_tile(to + (atom * kTile + j * kPart) * 128, map, atom * 64, 2 * j, key / 8, of.inner * step.inner,
                    of.outer * step.outer, mbarrier);
  }
}

// The key that stands in a row of the tile.
template <int kTile>
ONEPASS_FUNCTION int key_at(int row) {
  constexpr int kPart = kTile / 4;
  return row % kPart / 2 * 8 + row / kPart * 2 + row % 2;
}

// The consumer's end of a ring of tiles that the producer thread loads: takes them in order, and releases them.
template <int kStages>
class tiles_taken {
 public:
  ONEPASS_FUNCTION tiles_taken(uint64 (&full)[kStages], uint64 (&empty)[kStages]) : full_(full), empty_(empty) {}
  ONEPASS_FUNCTION int take() {
    const int stage = next_.stage;
    wait_for_mbarrier(&full_[stage], next_.phase);
    next_.next();
    return stage;
  }
  ONEPASS_FUNCTION void give_back() {
    if (threadIdx.x % kWarpgroupThreads == 0) arrive(&empty_[oldest_.stage]);
    oldest_.next();
  }

 private:
  uint64 (&full_)[kStages], (&empty_)[kStages];
  ring_position<kStages> next_, oldest_;
};

// Rows of a warpgroup times as many of a tile of kRows, both kSteps sixteens long.
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

// A thread's two rows, eight apart, of its warpgroup's 64, in tiles of kTile columns. Cursor: of the words.
template <class Config, class Line, class Cursor = cursor<typename Config::behind, Line>>
class thread_rows {
 public:
  using words = typename Config::behind;
  using index = typename words::index;
  using cursor_type = Cursor;
  using L = pack<float, 8>;
  static constexpr int kVectors = Config::kTile / 32;
  static_assert(cursor_of<Cursor, L>);

  ONEPASS_FUNCTION thread_rows(const arguments& a, char* streams) : a_(a), at_{cursor_type(a), cursor_type(a)} {
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
  // Rows of the same matrix, so many further.
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

  // body(i, vector, count), where the words are at each vector of the tile that begins at `first`.
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
  // A vector of row i of the tile's products.
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

  // change(i, vector, count): what takes the place of each vector of products of the tile that begins at `first`.
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

  // Of the tile's products, in a thread's part of row i.
  static ONEPASS_FUNCTION float largest(const float (&d)[Config::kTile / 2], int i) {
    float most = d[2 * i];
#pragma unroll
    for (int k = 2 * i; k < Config::kTile / 2; k += 4) most = max_number(most, max_number(d[k], d[k + 1]));
    return most;
  }

  // Starts the copies of the streams' part of the tile that begins at `first`, to `stage`.
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
// which row_of(row) is below `rows`, and the first `depth` elements of each.
template <int kNumbers, class RowOf>
ONEPASS_FUNCTION void store_staged_rows(const char* products, void* to, int rows, int64 depth, const RowOf& row_of) {
  constexpr int kPieces = kNumbers / 8, kAtOnce = kWarpgroupThreads / kPieces;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, piece = thread % kPieces;
  if (thread >= kAtOnce * kPieces || piece * 8 >= depth) return;
#pragma unroll 4
  for (int r = thread / kPieces; r < kWarpgroupRows; r += kAtOnce) {
    if (row_of(r) < rows)
      *reinterpret_cast<uint4*>(static_cast<uint16*>(to) + row_of(r) * depth + piece * 8) =
          *reinterpret_cast<const uint4*>(products + r * (kNumbers * 2) + swizzled_piece(piece, r) * 16);
  }
}

// 64 rows of P·V: accumulators over tiles, with the left factor from registers.
template <class Config, int kAtoms>
class weighted_sum {
 public:
  static constexpr int kNumbers = kAtoms * 64;

  // Converts accumulators of a tile to the left factor of the next wgmma.
  ONEPASS_FUNCTION void take_weights(const float (&d)[Config::kTile / 2]) {
#pragma unroll
    for (int step = 0; step < Config::kTile / 16; ++step) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        weights_[step][k] = pair_to_storage<Config::kX>(d[8 * step + 2 * k], d[8 * step + 2 * k + 1]);
    }
  }
  // Its products, which the caller begins and closes.
  ONEPASS_FUNCTION void add(uint32 tile) {
    const uint64 rows = transposed_tile_descriptor<Config::kTile>(tile);
#pragma unroll
    for (int step = 0; step < Config::kTile / 16; ++step)
      add_wgmma_of_registers<Config::kX, kNumbers, Config::kTile * 128>(sums_, weights_[step], rows + 128 * step);
  }
  ONEPASS_FUNCTION void scale(const float (&factors)[2]) {
#pragma unroll
    for (int k = 0; k < kNumbers / 2; ++k) sums_[k] *= factors[k / 2 % 2];
  }
  // `to`: 64 rows in memory, of which `rows` exist, by way of shared memory that is this warpgroup's own.
  ONEPASS_FUNCTION void store(char* shared, void* to, int rows, int64 depth) const {
    store(shared, to, rows, depth, [](int row) { return row; });
  }
  // row_of(row): which row of `to` a row is.
  template <class RowOf>
  ONEPASS_FUNCTION void store(char* shared, void* to, int rows, int64 depth, const RowOf& row_of) const {
    store_accumulators<Config::kX, kNumbers>(sums_, shared);
    sync_warpgroup(1 + static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    store_staged_rows<kNumbers>(shared, to, rows, depth, row_of);
  }

 private:
  float sums_[kNumbers / 2] = {};
  uint32 weights_[Config::kTile / 16][4];
};

// Warp specialisation: one thread loads tiles while warpgroups multiply.
template <class Config, class Shared, class Produce, class Multiply>
ONEPASS_FUNCTION void produce_and_consume(Shared& shared, const Produce& load_async, const Multiply& multiply) {
  if (threadIdx.x == 0) shared.open();
  __syncthreads();
  wait_for_kernel_before();
  // The registers of all warps make the 65536 of an SM.
  if (threadIdx.x >= Config::kGroups * kWarpgroupThreads) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == Config::kGroups * kWarpgroupThreads) load_async();
  } else {
    setmaxnreg_inc<Config::kGroups == 2 ? 240 : 160>();
    multiply();
  }
}

ONEPASS_END
