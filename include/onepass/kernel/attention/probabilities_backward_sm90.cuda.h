// Backward of lines that begin with `scores` and end in softmax, whose other words mask or scale (sm_90a): the
// probabilities and their gradients are read once, and nothing of their size is written.
//
// A cluster has a batch's keys, kTile in each block, and loops over row tiles: 64 rows of the probabilities P. Each
// block computes its partial sum of delta = Σ P · dP of a row and sends it to the other blocks. From all partial sums
// of delta a block computes the scores' gradients dS, which replace dP in shared memory. One warpgroup issues the
// GEMMs: dK, over all row tiles, and dQ of the row tile, which is reduced across the cluster. Three warps of each block
// add up dQ of its own rows. Two warpgroups compute dS of the next row tile meanwhile. The tile scheduler shares row
// tiles evenly among clusters; a second kernel adds up dK where several clusters share a batch. A cluster of one block
// has few keys, and its sums are final. No sum depends on the order of blocks.
//
// Config:
//   kX        storage type throughout: bf16 or f16
//   kAtoms    atoms of 64 of head_dim, rounded up: 1 or 2
//   kTile     keys of a block: 128, or 256 where there is one atom
//   kCluster  blocks that share a batch's keys, a power of 2
//   kStages   row tiles in shared memory, 2 where several blocks share keys
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"

ONEPASS_BEGIN

// DSMEM reduction of dQ: each block bulk-copies its partial sums to the block that owns the rows, which adds them up. A
// block's threads write its own partial sums to the same buffer. Each thread fences its own writes and reads there:
// compute-sanitizer sees no order through a warp's barrier.
//
// From head_dim 128 on, backward is bound by the bytes between blocks (docs/measured-facts.md), so an element of a
// partial sum is sent as a 16-bit multiple of a step. The step is the largest element of the row and block, over 32766.
// At most 2^-16 of the largest is rounded away; rounding dS to bfloat16 or float16 costs every element of the row more.

// Stages are row tiles of P, dP and the queries. Successive row tiles have successive stages, in every block alike.
template <class Config>
struct probabilities_backward_shared {
  static constexpr probabilities_backward_shape kShape{Config::kAtoms, Config::kTile, Config::kCluster,
                                                       Config::kStages};
  static constexpr int kParts = Config::kCluster, kTileAtoms = Config::kTile / 64, kHeadDim = kShape.head_dim();
  static constexpr bool kAlone = kShape.is_alone();  // nothing is sent
  static constexpr int kStages = Config::kStages, kKeyStages = kShape.key_stages();
  static_assert(kAlone || kStages == 2, "blocks send partial sums of a row tile and the next");
  static constexpr int kWarps = 8;  // that compute dS
  static constexpr int kRowTileBytes = kShape.row_tile_bytes(), kQueryBytes = kShape.query_bytes();
  static constexpr int kKeyBytes = kShape.key_bytes();
  static constexpr int kOwnRows = kWarpgroupRows / kParts;
  static constexpr int kSumPitch = kShape.sum_pitch(), kSumBytes = kShape.sum_bytes();
  static constexpr int kAddingWarps = 3;
  static constexpr int kReceivedRows = kOwnRows < 16 ? kOwnRows : 16;     // of a warp's 16 rows, those of one block
  static constexpr int kOwnThreads = (kOwnRows < 16 ? 4 : 2) * kOwnRows;  // threads that have rows of this block
  static constexpr int kWarpRows = kWarpgroupRows / kWarps, kPartRows = kShape.kPartialRows;
  static constexpr int kDeltaBytes = kShape.delta_bytes();

  uint64 full_keys[kKeyStages], empty_keys[kKeyStages];
  uint64 full_weights[kStages], empty_weights[kStages];
  uint64 full_gradients[kStages], empty_gradients[kStages];  // and queries
  uint64 deltas[kStages][kWarps], scores[kStages];
  uint64 sums[kStages], free_sums[kStages];

  static ONEPASS_FUNCTION uint32 weights(char* dynamic, int stage) {
    return first_tile(dynamic) + stage * kRowTileBytes;
  }
  static ONEPASS_FUNCTION uint32 gradients(char* dynamic, int stage) { return weights(dynamic, kStages + stage); }
  static ONEPASS_FUNCTION uint32 queries(char* dynamic, int stage) {
    return gradients(dynamic, kStages) + stage * kQueryBytes;
  }
  static ONEPASS_FUNCTION uint32 own_keys(char* dynamic, int stage) {
    return queries(dynamic, kStages) + stage * kKeyBytes;
  }
  // This block's partial sums of dQ, and all blocks' partial sums of its own rows.
  static ONEPASS_FUNCTION uint32 sum(char* dynamic, int stage, int row) {
    return own_keys(dynamic, kKeyStages) + stage * kSumBytes + row * kSumPitch;
  }
  static ONEPASS_FUNCTION uint32 received(char* dynamic, int stage, int part, int row) {
    return sum(dynamic, kStages + stage, part * kOwnRows + row);
  }
  // All blocks' parts of delta of a row.
  static ONEPASS_FUNCTION uint32 delta(char* dynamic, int stage, int part, int row) {
    return received(dynamic, kStages, 0, 0) + stage * kDeltaBytes + (part * kPartRows + row) * 4;
  }

  ONEPASS_FUNCTION void expect_deltas(int stage, int warp) {
    arrive_and_expect(&deltas[stage][warp], kParts * kWarpRows * 4);
  }
  ONEPASS_FUNCTION void expect_sums(int stage) { arrive_and_expect(&sums[stage], kSumBytes - kOwnRows * kSumPitch); }
  ONEPASS_FUNCTION void open() {
    for (int i = 0; i < kKeyStages; ++i) init_mbarrier(&full_keys[i], 1), init_mbarrier(&empty_keys[i], 1);
    for (int i = 0; i < kStages; ++i) {
      init_mbarrier(&full_weights[i], 1), init_mbarrier(&empty_weights[i], kWarps);
      init_mbarrier(&full_gradients[i], 1), init_mbarrier(&empty_gradients[i], 1);
      init_mbarrier(&scores[i], kWarps);
      if constexpr (kAlone) continue;
      for (int warp = 0; warp < kWarps; ++warp) init_mbarrier(&deltas[i][warp], 1), expect_deltas(i, warp);
      init_mbarrier(&sums[i], 1 + kOwnThreads), expect_sums(i);
      init_mbarrier(&free_sums[i], kAddingWarps * (32 + kParts - 1));
    }
    fence_mbarrier_init();
  }
};

// The clusters share the row tiles of all batches evenly and in order, across batch boundaries. A batch has the row
// tiles of one query head, then those of the next.
struct row_tile_split {
  int of_head, of_batch, each, more;  // the first `more` clusters have one more than `each`

  explicit ONEPASS_FUNCTION row_tile_split(const probabilities_backward_arguments& a)
      : of_head((a.rows + kWarpgroupRows - 1) / kWarpgroupRows),
        of_batch(a.query_heads * of_head),
        each(a.batches * of_batch / a.clusters),
        more(a.batches * of_batch % a.clusters) {}
  ONEPASS_FUNCTION int first_of(int cluster) const { return each * cluster + (cluster < more ? cluster : more); }
  ONEPASS_FUNCTION int cluster_of(int row_tile) const {
    const int of_more = more * (each + 1);
    return row_tile < of_more ? row_tile / (each + 1) : more + (row_tile - of_more) / each;
  }
  // The index of a cluster's partial sums of a shared batch: one for the batch that it begins with, one for any other.
  ONEPASS_FUNCTION int part_of(int cluster, int batch) const {
    return 2 * cluster + (first_of(cluster) / of_batch == batch ? 0 : 1);
  }
};

// Iterates over a cluster's row tiles.
template <class Config>
class tile_scheduler {
 public:
  explicit ONEPASS_FUNCTION tile_scheduler(const probabilities_backward_arguments& a) : a_(a), all_(a) {
    const int cluster = static_cast<int>(blockIdx.x) / Config::kCluster;
    first_ = at_ = all_.first_of(cluster), end_ = all_.first_of(cluster + 1);
    batch_ = at_ / all_.of_batch;
    index_ = {batch_ / a.inner, batch_ % a.inner, at_ % all_.of_batch / all_.of_head};
    row_ = at_ % all_.of_head * kWarpgroupRows;
  }
  ONEPASS_FUNCTION bool is_done() const { return at_ == end_; }
  ONEPASS_FUNCTION void next() {
    ++at_, row_ += kWarpgroupRows;
    if (row_ < a_.rows) return;
    row_ = 0;
    if (++index_.query_head < a_.query_heads) return;
    index_.query_head = 0, ++batch_;
    if (++index_.inner == a_.inner) index_.inner = 0, ++index_.outer;
  }
  ONEPASS_FUNCTION bool is_first() const { return at_ == first_; }
  ONEPASS_FUNCTION bool opens_batch() const { return is_first() || (row_ == 0 && index_.query_head == 0); }
  ONEPASS_FUNCTION bool closes_batch() const {
    return at_ + 1 == end_ || (row_ + kWarpgroupRows >= a_.rows && index_.query_head + 1 == a_.query_heads);
  }
  ONEPASS_FUNCTION bool shares_batch() const {
    return first_ > batch_ * all_.of_batch || end_ < (batch_ + 1) * all_.of_batch;
  }
  ONEPASS_FUNCTION batch_index index() const { return index_; }
  ONEPASS_FUNCTION int batch() const { return batch_; }
  ONEPASS_FUNCTION int row() const { return row_; }
  ONEPASS_FUNCTION int64 row_of_all() const {
    return (int64{batch_} * a_.query_heads + index_.query_head) * a_.rows + row_;
  }
  // The block's first key.
  static ONEPASS_FUNCTION int key() { return cluster_rank() * Config::kTile; }
  ONEPASS_FUNCTION int part() const { return all_.part_of(static_cast<int>(blockIdx.x) / Config::kCluster, batch_); }

 private:
  const probabilities_backward_arguments& a_;
  const row_tile_split all_;
  int first_, at_, end_, batch_, row_;
  batch_index index_;
};

// The producer thread loads all row tiles, each when its stage is empty, and each batch's keys.
template <class Config>
ONEPASS_FUNCTION void load_row_tiles(const probabilities_backward_arguments& a,
                                     probabilities_backward_shared<Config>& shared, char* dynamic) {
  using layout = probabilities_backward_shared<Config>;
  const int key = tile_scheduler<Config>::key();
  const auto load_row_tile = [&](uint32 to, const tensor_map& map, batch_steps step, batch_index at, int row,
                                 uint64* mbarrier) {
    for (int i = 0; i < layout::kTileAtoms; ++i)
      tma_load_tile(to + i * kAtomBytes, map, key + i * 64, row, at.query_head * step.query_head, at.inner * step.inner,
                    at.outer * step.outer, shared_address(mbarrier));
  };
  ring_position<layout::kStages> ring;
  ring_position<layout::kKeyStages> keys;
  for (tile_scheduler<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    const int stage = ring.stage;
    uint64* mbarrier = &shared.full_weights[stage];
    wait_for_mbarrier(&shared.empty_weights[stage], ring.phase ^ 1);
    arrive_and_expect(mbarrier, layout::kRowTileBytes);
    load_row_tile(layout::weights(dynamic, stage), a.probabilities, a.step_probabilities, at.index(), at.row(),
                  mbarrier);
    mbarrier = &shared.full_gradients[stage];
    wait_for_mbarrier(&shared.empty_gradients[stage], ring.phase ^ 1);
    arrive_and_expect(mbarrier, layout::kRowTileBytes + layout::kQueryBytes);
    load_row_tile(layout::gradients(dynamic, stage), a.grad_probabilities, a.step_grad_probabilities, at.index(),
                  at.row(), mbarrier);
    tma_load_rows<Config::kAtoms>(layout::queries(dynamic, stage), a.queries, a.step_queries, at.index(), at.row(),
                                  shared_address(mbarrier));
    if (!at.opens_batch()) continue;
    mbarrier = &shared.full_keys[keys.stage];
    wait_for_mbarrier(&shared.empty_keys[keys.stage], keys.phase ^ 1);
    arrive_and_expect(mbarrier, layout::kKeyBytes);
    for (int i = 0; i < layout::kTileAtoms; ++i)
      tma_load_rows<Config::kAtoms>(layout::own_keys(dynamic, keys.stage) + i * layout::kQueryBytes, a.keys,
                                    a.step_keys, {at.index().outer, at.index().inner, 0}, key + i * 64,
                                    shared_address(mbarrier));
    keys.next();
  }
}

inline constexpr float kSteps = 32766.0f,
                       kNoStep = 8421376.0f;  // 2^23 + 2^15: the low bits of a sum with it are the integer

ONEPASS_FUNCTION uint32 pair_to_steps(float x, float y, float steps_of_one) {
  return __byte_perm(__float_as_uint(fmaf(x, steps_of_one, kNoStep)), __float_as_uint(fmaf(y, steps_of_one, kNoStep)),
                     0x5410);
}
template <int kUpper>
ONEPASS_FUNCTION float steps_of(uint32 pair) {
  return __uint_as_float(__byte_perm(pair, 0x4b000000, kUpper ? 0x7632 : 0x7610)) - kNoStep;
}

// Sends a warp's 16 rows of partial sums to the blocks that own them.
template <class Config>
ONEPASS_FUNCTION void send_partial_dq(const float (&of)[probabilities_backward_shared<Config>::kHeadDim / 2],
                                      probabilities_backward_shared<Config>& shared, char* dynamic, int stage) {
  using layout = probabilities_backward_shared<Config>;
  const int lane_id = static_cast<int>(threadIdx.x) % 32, rank = cluster_rank();
  bool has_own = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_tile = row_of_accumulators() + 8 * i;
    const bool is_own = of_tile / layout::kOwnRows == rank;
    has_own |= is_own;
    char* row = at_shared(dynamic, is_own ? layout::received(dynamic, stage, rank, of_tile % layout::kOwnRows)
                                          : layout::sum(dynamic, stage, of_tile));
    float largest = 1e-30f;  // a step's reciprocal is finite; infinity or a NaN makes the block's part of the row NaN
#pragma unroll
    for (int j = 2 * i; j < layout::kHeadDim / 2; j += 4)
      largest = max_number(max_number(largest, fabsf(of[j])), fabsf(of[j + 1]));
    largest = largest_of_four(largest);
    const float step = largest * (1.0f / kSteps), steps_of_one = reciprocal_number(step);
#pragma unroll
    for (int j = 0; j < layout::kHeadDim / 8; ++j)
      reinterpret_cast<uint32*>(row)[4 * j + lane_id % 4] =
          pair_to_steps(of[4 * j + 2 * i], of[4 * j + 2 * i + 1], steps_of_one);
    if (lane_id % 4 == 0) *reinterpret_cast<float*>(row + layout::kHeadDim * 2) = step;
  }
  if (has_own) arrive(&shared.sums[stage]);
  fence_proxy_async_shared();
  __syncwarp();
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane_id * layout::kReceivedRows,
            block = row / layout::kOwnRows;
  if (lane_id < 16 / layout::kReceivedRows && block != rank)
    bulk_send(in_block(layout::received(dynamic, stage, rank, row % layout::kOwnRows), block),
              layout::sum(dynamic, stage, row), layout::kReceivedRows * layout::kSumPitch,
              in_block(shared_address(&shared.sums[stage]), block));
}

// Adds up all blocks' partial sums of dQ of this block's own rows, and stores them.
template <class Config>
ONEPASS_FUNCTION void reduce_dq(const probabilities_backward_arguments& a,
                                probabilities_backward_shared<Config>& shared, char* dynamic) {
  using layout = probabilities_backward_shared<Config>;
  constexpr int kEights = layout::kHeadDim / 8, kThreads = layout::kAddingWarps * 32;
  static_assert(3 * kWarpgroupThreads % kThreads == 0, "the fourth warpgroup's first warps");
  const int thread = static_cast<int>(threadIdx.x) % kThreads, lane_id = thread % 32, column = thread % kEights * 8,
            rank = cluster_rank(), own = rank * layout::kOwnRows;
  ring_position<layout::kStages> ring;
#pragma unroll 1
  for (tile_scheduler<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    wait_for_mbarrier(&shared.sums[ring.stage], ring.phase);
    if (thread == 0) shared.expect_sums(ring.stage);
#pragma unroll 1
    for (int row = thread / kEights; row < layout::kOwnRows; row += kThreads / kEights) {
      numbers<float, 8> sum = plus::none<float, 8>();
#pragma unroll 4
      for (int part = 0; part < layout::kParts; ++part) {
        const char* from = at_shared(dynamic, layout::received(dynamic, ring.stage, part, row));
        const float step = *reinterpret_cast<const float*>(from + layout::kHeadDim * 2);
        const uint4 pairs = *reinterpret_cast<const uint4*>(from + column * 2);
        const uint32 of[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum.v[2 * c] = fmaf(steps_of<0>(of[c]), step, sum.v[2 * c]);
          sum.v[2 * c + 1] = fmaf(steps_of<1>(of[c]), step, sum.v[2 * c + 1]);
        }
      }
      if (own + row < a.rows - at.row() && column < a.head_dim) {
        const auto pair = [&](int c) {
          return pair_to_storage<Config::kX>(sum.v[2 * c] * a.factor, sum.v[2 * c + 1] * a.factor);
        };
        *reinterpret_cast<uint4*>(static_cast<uint16*>(a.grad_queries) + (at.row_of_all() + own + row) * a.head_dim +
                                  column) = {pair(0), pair(1), pair(2), pair(3)};
      }
    }
    fence_proxy_async_shared();
    arrive(&shared.free_sums[ring.stage]);
    __syncwarp();
    if (lane_id < Config::kCluster && lane_id != rank) arrive_in_block(&shared.free_sums[ring.stage], lane_id);
  }
}

// A warp's eight rows of the block's part of P and dP; a thread has one vector of each of kOwn rows.
template <class Config>
class probability_rows {
 public:
  using layout = probabilities_backward_shared<Config>;
  using memory_of = memory<Config::kX, 8, 8>;
  static constexpr int kRowThreads = Config::kTile / 8, kAtOnce = 32 / kRowThreads, kOwn = layout::kWarpRows / kAtOnce;

  explicit ONEPASS_FUNCTION probability_rows(const probabilities_backward_arguments& a)
      : warp_(static_cast<int>(threadIdx.x) / 32 % layout::kWarps),
        lane_id_(static_cast<int>(threadIdx.x) % 32),
        zero_(a.rows < 0 ? 1 : 0) {}

  ONEPASS_FUNCTION void load_weights(const char* row_tile) { load(weights_, row_tile); }
  ONEPASS_FUNCTION void load_gradients(const char* row_tile) { load(gradients_, row_tile); }
  // The row of the tile whose delta this thread has, as three others do.
  ONEPASS_FUNCTION int shared_row() const {
    return warp_ * layout::kWarpRows + lane_id_ / 4 % kOwn * kAtOnce + lane_id_ / kRowThreads;
  }
  // The block's part of delta = Σ P · dP of shared_row.
  ONEPASS_FUNCTION float delta() const {
    float of[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const auto weights = memory_of::template numbers_of<float>(weights_[i]),
                 gradients = memory_of::template numbers_of<float>(gradients_[i]);
      of[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) of[i] = fmaf(weights.v[c], gradients.v[c], of[i]);
    }
#pragma unroll
    for (int half = kOwn / 2; half > 0; half /= 2) {  // threads that differ in this bit share their rows
      const int bit = 4 * half;
      const bool upper = (lane_id_ & bit) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float kept = upper ? of[i + half] : of[i], given = upper ? of[i] : of[i + half];
        of[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
      }
    }
    return sum_of_four(of[0]);
  }
  // The same for four of the warp's rows: the first four in even threads, the last four in odd ones.
  ONEPASS_FUNCTION numbers<float, 4> deltas() const {
    const float own = delta();
    numbers<float, 4> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = lane_id_ % 2 * 4 + j;
      four.v[j] = __shfl_sync(0xffffffffu, own, row / kAtOnce * 4 + row % kAtOnce * kRowThreads);
    }
    return four;
  }

  // delta: of shared_row. dS replaces dP.
  ONEPASS_FUNCTION void store_scores(char* row_tile, float delta) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float of_row = __shfl_sync(0xffffffffu, delta, 4 * i + lane_id_ / kRowThreads * kRowThreads);
      const auto weights = unpack_opaque(weights_[i]), gradients = unpack_opaque(gradients_[i]);
      memory_of::store(row_tile + offset(i), weights * (gradients - decltype(weights)(of_row)), 8);
    }
  }

 private:
  ONEPASS_FUNCTION int offset(int i) const {
    const int row = warp_ * layout::kWarpRows + i * kAtOnce + lane_id_ / kRowThreads, piece = lane_id_ % kRowThreads;
    return piece / 8 * kAtomBytes + row * 128 + swizzled_piece(piece % 8, row) * 16;
  }
  ONEPASS_FUNCTION void load(typename memory_of::buffer (&to)[kOwn], const char* row_tile) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i] = memory_of::load_written(row_tile + offset(i), 8);
  }

  // An opaque shift by zero bits. Without it the compiler keeps what delta() unpacked, in twice the registers.
  ONEPASS_FUNCTION pack<float, 8> unpack_opaque(typename memory_of::buffer of) const {
    typename memory_of::buffer unpacked;
#pragma unroll
    for (int i = 0; i < 4; ++i) unpacked.pairs[i] = of.pairs[i] >> zero_;
    return memory_of::template numbers_of<float>(unpacked);
  }

  const int warp_, lane_id_;
  const uint32 zero_;
  typename memory_of::buffer weights_[kOwn], gradients_[kOwn];
};

// The two GEMMs with the block's dS: dK with the row tile's queries, dQ with the block's keys.
template <class Config>
class backward_gemms {
 public:
  using layout = probabilities_backward_shared<Config>;
  static constexpr int kHeadDim = layout::kHeadDim;

  ONEPASS_FUNCTION void begin_batch(uint32 keys) {
    keys_ = keys;
#pragma unroll
    for (auto& atom : of_keys_) {
#pragma unroll
      for (float& number : atom) number = 0.0f;
    }
  }
  // scores: dS. dQ is the first wgmma group that is committed, dK the second.
  ONEPASS_FUNCTION void begin(uint32 scores, uint32 queries) {
    forget(of_rows_);
    begin_wgmma();
#pragma unroll
    for (int atom = 0; atom < layout::kTileAtoms; ++atom) {
      const uint64 rows = tile_descriptor(scores + atom * kAtomBytes),
                   keys = transposed_tile_descriptor(keys_ + atom * layout::kQueryBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_wgmma<Config::kX, kHeadDim, 0, 1>(of_rows_, rows + 2 * step, keys + 128 * step, atom + step > 0);
    }
    commit_wgmma();
#pragma unroll
    for (int atom = 0; atom < layout::kTileAtoms; ++atom) {
      const uint64 transposed = transposed_tile_descriptor(scores + atom * kAtomBytes),
                   of_queries = transposed_tile_descriptor(queries);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_wgmma<Config::kX, kHeadDim, 1, 1>(of_keys_[atom], transposed + 128 * step, of_queries + 128 * step, true);
    }
    commit_wgmma();
  }
  ONEPASS_FUNCTION const auto& of_rows() const { return of_rows_; }
  // Stores dQ of the row tile, where this block has all keys. `rows` of its rows exist; `first`: their row in memory.
  ONEPASS_FUNCTION void store_rows(const probabilities_backward_arguments& a, int64 first, int rows) const {
    store_scaled(static_cast<uint16*>(a.grad_queries) + first * a.head_dim, a, of_rows_, rows);
  }
  // Stores dK of the block's keys in the scheduler's batch.
  ONEPASS_FUNCTION void store_keys(const probabilities_backward_arguments& a, const tile_scheduler<Config>& at) const {
#pragma unroll
    for (int atom = 0; atom < layout::kTileAtoms; ++atom) {
      const int64 key = tile_scheduler<Config>::key() + atom * 64;
      const int keys = static_cast<int>(a.columns - key);
      if (at.shares_batch()) {
        store_part(a.partial_grad_keys + (int64{at.part()} * a.columns + key) * a.head_dim, a, of_keys_[atom], keys);
      } else {
        store_scaled(static_cast<uint16*>(a.grad_keys) + (int64{at.batch()} * a.columns + key) * a.head_dim, a,
                     of_keys_[atom], keys);
      }
    }
  }

 private:
  // Stores 64 rows, of which `rows` exist. A thread has pairs of elements, and exchanges them to store eight.
  static ONEPASS_FUNCTION void store_scaled(uint16* to, const probabilities_backward_arguments& a,
                                            const float (&of)[kHeadDim / 2], int rows) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 8, left = static_cast<int>(a.head_dim) - first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_accumulators() + 8 * i;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 4) {
        uint32 pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          pairs[k] =
              pair_to_storage<Config::kX>(of[4 * (j + k) + 2 * i] * a.factor, of[4 * (j + k) + 2 * i + 1] * a.factor);
        transpose_words<1>(pairs);
        if (row < rows && 8 * j < left)
          *reinterpret_cast<uint4*>(to + row * a.head_dim + first + 8 * j) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
  static ONEPASS_FUNCTION void store_part(float* to, const probabilities_backward_arguments& a,
                                          const float (&of)[kHeadDim / 2], int rows) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2, left = static_cast<int>(a.head_dim) - first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_accumulators() + 8 * i;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        if (8 * j < left)
          *reinterpret_cast<float2*>(to + row * a.head_dim + first + 8 * j) = {of[4 * j + 2 * i],
                                                                               of[4 * j + 2 * i + 1]};
      }
    }
  }

  uint32 keys_ = 0;
  float of_keys_[layout::kTileAtoms][kHeadDim / 2];
  float of_rows_[kHeadDim / 2];
};

// Computes dS of all row tiles, for accumulate_gradients.
template <class Config>
ONEPASS_FUNCTION void compute_score_gradients(const probabilities_backward_arguments& a,
                                              probabilities_backward_shared<Config>& shared, char* dynamic) {
  using layout = probabilities_backward_shared<Config>;
  const int rank = cluster_rank(), lane_id = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % layout::kWarps;
  probability_rows<Config> rows(a);
  ring_position<layout::kStages> ring;
  // Sends this block's part of delta of the warp's rows to all blocks; two threads send to each.
  const auto send_deltas = [&] {
    if constexpr (layout::kAlone) return;
    const numbers<float, 4> own = rows.deltas();
    const int block = lane_id / 2;
    const uint32 to = layout::delta(dynamic, ring.stage, rank, warp * layout::kWarpRows + lane_id % 2 * 4),
                 mbarrier = shared_address(&shared.deltas[ring.stage][warp]);
    if (block < Config::kCluster) store_async(in_block(to, block), in_block(mbarrier, block), own);
  };
  const auto delta_of_all = [&] {
    if constexpr (layout::kAlone) return rows.delta();
    wait_for_mbarrier(&shared.deltas[ring.stage][warp], ring.phase);
    float of = 0.0f;
#pragma unroll
    for (int k = 0; k < Config::kCluster; k += 4) {
      const int part = k + lane_id % 4;
      if (part < Config::kCluster)
        of += *reinterpret_cast<const float*>(
            at_shared(dynamic, layout::delta(dynamic, ring.stage, part, rows.shared_row())));
    }
    __syncwarp();
    if (lane_id == 0) shared.expect_deltas(ring.stage, warp);
    return sum_of_four(of);
  };

  // A block that sends for row tile s + 2 has received s + 1 from all blocks, which have read s before: two buffers
  // suffice.
#pragma unroll 1
  for (tile_scheduler<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    wait_for_mbarrier(&shared.full_weights[ring.stage], ring.phase);
    rows.load_weights(at_shared(dynamic, layout::weights(dynamic, ring.stage)));
    fence_proxy_async_shared();
    __syncwarp();
    if (lane_id == 0) arrive(&shared.empty_weights[ring.stage]);
    char* gradients = at_shared(dynamic, layout::gradients(dynamic, ring.stage));
    wait_for_mbarrier(&shared.full_gradients[ring.stage], ring.phase);
    rows.load_gradients(gradients);
    send_deltas();
    rows.store_scores(gradients, delta_of_all());
    fence_proxy_async_shared();
    __syncwarp();
    if (lane_id == 0) arrive(&shared.scores[ring.stage]);
  }
}

template <class Config>
ONEPASS_FUNCTION void accumulate_gradients(const probabilities_backward_arguments& a,
                                           probabilities_backward_shared<Config>& shared, char* dynamic) {
  using layout = probabilities_backward_shared<Config>;
  backward_gemms<Config> gemms;
  ring_position<layout::kStages> ring;
  ring_position<layout::kKeyStages> keys;

#pragma unroll 1
  for (tile_scheduler<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    if (at.opens_batch()) {
      gemms.begin_batch(layout::own_keys(dynamic, keys.stage));
      wait_for_mbarrier(&shared.full_keys[keys.stage], keys.phase);
    }
    wait_for_mbarrier(&shared.full_gradients[ring.stage], ring.phase);  // the queries
    wait_for_mbarrier(&shared.scores[ring.stage], ring.phase);
    gemms.begin(layout::gradients(dynamic, ring.stage), layout::queries(dynamic, ring.stage));
    wait_for_wgmma<1>();
    if constexpr (layout::kAlone) {
      gemms.store_rows(a, at.row_of_all(), a.rows - at.row());
    } else {
      wait_for_mbarrier(&shared.free_sums[ring.stage], ring.phase ^ 1);
      send_partial_dq<Config>(gemms.of_rows(), shared, dynamic, ring.stage);
    }
    wait_for_wgmma<0>();
    if (threadIdx.x == 0) arrive(&shared.empty_gradients[ring.stage]);
    if (!at.closes_batch()) continue;
    if (threadIdx.x == 0) arrive(&shared.empty_keys[keys.stage]);
    keys.next();
    gemms.store_keys(a, at);
  }
  if constexpr (!layout::kAlone) {  // until the other blocks have read this block's shared memory
    for (int i = 0; i < layout::kStages; ++i, ring.next())
      wait_for_mbarrier(&shared.free_sums[ring.stage], ring.phase ^ 1);
  }
}

template <class Config>
ONEPASS_FUNCTION void probabilities_backward_sm90(const probabilities_backward_arguments& a) {
  using layout = probabilities_backward_shared<Config>;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ layout shared;
  if (threadIdx.x == 0) shared.open();
  arrive_at_cluster();
  wait_for_cluster();
  __syncthreads();
  wait_for_kernel_before();
  const int warpgroup = warpgroup_id();
  if (warpgroup == 0) {
    setmaxnreg_inc<224>();
    accumulate_gradients<Config>(a, shared, dynamic);
  } else if (warpgroup < 3) {
    setmaxnreg_dec<120>();
    compute_score_gradients<Config>(a, shared, dynamic);
  } else {
    setmaxnreg_dec<48>();
    if (threadIdx.x == 4 * kWarpgroupThreads - 1) load_row_tiles<Config>(a, shared, dynamic);
    if (!layout::kAlone && threadIdx.x < 3 * kWarpgroupThreads + 32 * layout::kAddingWarps)
      reduce_dq<Config>(a, shared, dynamic);
  }
}

// Adds up the partial sums of dK of batches that several clusters share, in the order of the clusters. Grid: (batches,
// quads of a batch's elements).
template <dtype D>
ONEPASS_FUNCTION void probabilities_backward_reduce_dk(const probabilities_backward_arguments& a) {
  const int64 elements_of_batch = a.columns * a.head_dim, at = (int64{blockIdx.y} * blockDim.x + threadIdx.x) * 4;
  const int batch = static_cast<int>(blockIdx.x);
  const row_tile_split all(a);
  const int first = all.cluster_of(batch * all.of_batch), last = all.cluster_of((batch + 1) * all.of_batch - 1);
  wait_for_kernel_before();
  if (at >= elements_of_batch || first == last) return;
  numbers<float, 4> sum = plus::none<float, 4>();
  for (int cluster = first; cluster <= last; ++cluster)
    sum = plus()(sum, load_numbers<4>(a.partial_grad_keys + all.part_of(cluster, batch) * elements_of_batch + at));
  *reinterpret_cast<uint2*>(static_cast<uint16*>(a.grad_keys) + batch * elements_of_batch + at) = {
      pair_to_storage<D>(sum.v[0] * a.factor, sum.v[1] * a.factor),
      pair_to_storage<D>(sum.v[2] * a.factor, sum.v[3] * a.factor)};
}

ONEPASS_END
