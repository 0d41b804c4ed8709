// Register-resident softmax (sm_90a): forward of lines with `scores` and softmax, without values. The registers of a
// cluster hold a row tile, 64 rows of scores, from the GEMM to the result. Each warpgroup keeps kTile keys in shared
// memory and loops over the row tiles of queries. All warpgroups of the cluster exchange partial softmax statistics of
// the rows.
//
// Config beside kernel/attention/tiles_sm90.cuda.h:
//   kCluster    blocks that share a row tile; block rank r has the r-th part of the keys
//   kKeyMasks   boolean operands (bits) of which one row serves all rows of a matrix. They are folded into QK^T: masked
//               keys are zeroed in shared memory, and one extra MMA k-step adds -inf to their column
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"

ONEPASS_BEGIN

// A row's largest score and Σ exp(score - largest), of one warpgroup's keys.
using partial_softmax = numbers<float, 2>;

template <class Config>
struct probabilities_shared {
  static constexpr probabilities_shape kShape{Config::kAtoms, Config::kWarpgroups, Config::kTile, Config::kCluster,
                                              Config::kKeyMasks != 0};
  static constexpr int kParts = kShape.partials();
  static constexpr int kWarps = kWarpgroupThreads / 32, kWarpRows = kWarpgroupRows / kWarps;
  static constexpr int kKeyBytes = kShape.key_bytes(), kQueryBytes = Config::kAtoms * kAtomBytes;
  // The mask of the extra k-step: 16 rows; the first has -inf for each masked key, else 0.
  static constexpr int kMarkAtomBytes = kShape.kMarkAtomBytes, kMarkBytes = kShape.mark_bytes();
  static constexpr int kSumBytes = kShape.partial_bytes();
  static_assert(sizeof(partial_softmax) == kShape.kPartialBytes);

  uint64 keys;
  uint64 full[Config::kStages], empty[Config::kStages];
  uint64 sums[2][kWarps];

  static ONEPASS_FUNCTION uint32 own_keys(char* dynamic, int warpgroup) {
    return first_tile(dynamic) + warpgroup * kKeyBytes;
  }
  static ONEPASS_FUNCTION uint32 marks(char* dynamic, int warpgroup) {
    return own_keys(dynamic, Config::kWarpgroups) + warpgroup * kMarkBytes;
  }
  static ONEPASS_FUNCTION uint32 queries(char* dynamic, int stage) {
    return marks(dynamic, Config::kWarpgroups) + stage * kQueryBytes;
  }
  // Partial statistics of a row, double-buffered by row tile.
  static ONEPASS_FUNCTION uint32 sum(char* dynamic, int which, int part, int row) {
    return queries(dynamic, Config::kStages) + which * kSumBytes +
           (part * kWarpgroupRows + row) * static_cast<int>(sizeof(partial_softmax));
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, sum(dynamic, 2, 0, 0)); }
  ONEPASS_FUNCTION void open() {
    init_mbarrier(&keys, 1);
    for (int i = 0; i < Config::kStages; ++i) init_mbarrier(&full[i], 1), init_mbarrier(&empty[i], Config::kWarpgroups);
    for (auto& mbarriers : sums)
      for (uint64& mbarrier : mbarriers) init_mbarrier(&mbarrier, 1);
    fence_mbarrier_init();
  }
};

// The row tiles of a matrix of queries that a cluster computes; rows are counted within the matrix.
template <class Config>
struct cluster_row_tiles {
  batch_index batch;
  int64 row;  // the matrix's first row, among all
  int from, count;

  explicit ONEPASS_FUNCTION cluster_row_tiles(const attention_arguments& a) {
    const int all = (a.rows + kWarpgroupRows - 1) / kWarpgroupRows, each = (all + a.blocks - 1) / a.blocks;
    const int number = static_cast<int>(blockIdx.x) / Config::kCluster;
    from = number % a.blocks * each, count = all - from < each ? all - from : each;
    row = int64{number / a.blocks} * a.rows;
    batch = batch_of_matrix(a, number / a.blocks);
  }
  ONEPASS_FUNCTION int first_row(int row_tile) const { return (from + row_tile) * kWarpgroupRows; }
};

// The ring of the row tiles' queries. One thread of the block loads it.
template <class Config>
class query_ring {
 public:
  using layout = probabilities_shared<Config>;

  ONEPASS_FUNCTION query_ring(const attention_arguments& a, const cluster_row_tiles<Config>& row_tiles, layout& shared,
                              char* dynamic)
      : a_(a),
        row_tiles_(row_tiles),
        shared_(shared),
        at_(layout::queries(dynamic, 0)),
        ring_(shared.full, shared.empty) {
    for (int i = 1; i < Config::kStages; ++i) load_async();
  }
  ONEPASS_FUNCTION uint32 next() { return at_ + ring_.wait() * layout::kQueryBytes; }
  ONEPASS_FUNCTION void release() {
    ring_.release();
    load_async();
  }

 private:
  ONEPASS_FUNCTION void load_async() {
    if (threadIdx.x != 0 || loaded_ >= row_tiles_.count) return;
    wait_for_mbarrier(&shared_.empty[to_.stage], to_.phase ^ 1);
    uint64* const mbarrier = &shared_.full[to_.stage];
    arrive_and_expect(mbarrier, layout::kQueryBytes);
    tma_load_rows<Config::kAtoms>(at_ + to_.stage * layout::kQueryBytes, a_.queries, a_.step_queries, row_tiles_.batch,
                                  row_tiles_.first_row(loaded_), shared_address(mbarrier));
    to_.next();
    ++loaded_;
  }
  const attention_arguments& a_;
  const cluster_row_tiles<Config>& row_tiles_;
  layout& shared_;
  const uint32 at_;
  ring_consumer<Config::kStages> ring_;
  ring_position<Config::kStages> to_;
  int loaded_ = 0;
};

// Exchanges partial statistics across the cluster through distributed shared memory. A warpgroup that sends for one row
// tile has read the statistics of the row tile before, so two buffers suffice.
template <class Config>
class cluster_softmax {
 public:
  using layout = probabilities_shared<Config>;
  static constexpr bool kAny = layout::kParts > 1;

  ONEPASS_FUNCTION cluster_softmax(layout& shared, char* dynamic, int part)
      : mbarriers_(shared.sums), at_(layout::sum(dynamic, 0, 0, 0)), part_(part) {
    if constexpr (kAny) expect(0), expect(1);
  }
  // Sends those of one row; each of the row's four threads sends to a quarter of the blocks.
  ONEPASS_FUNCTION void send(int row_tile, int row, partial_softmax own) {
    if constexpr (kAny) {
      const uint32 at = partial_at(row_tile, part_, row), mbarrier = shared_address(&mine(row_tile));
#pragma unroll
      for (int k = 0; k < Config::kCluster; k += 4) {
        const int to = k + static_cast<int>(threadIdx.x) % 4, exists = to < Config::kCluster ? to : 0;
        if (to == exists) store_async(in_block(at, exists), in_block(mbarrier, exists), own);
      }
    }
  }
  ONEPASS_FUNCTION void wait(int row_tile) {
    if constexpr (kAny) {
      wait_for_mbarrier(&mine(row_tile), row_tile / 2 % 2);
      expect(row_tile);
    }
  }
  ONEPASS_FUNCTION partial_softmax all(int row_tile, int row, partial_softmax own) const {
    if constexpr (!kAny) return own;
    constexpr int kOwn = (layout::kParts + 3) / 4;
    partial_softmax of[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int part = 4 * k + static_cast<int>(threadIdx.x) % 4;
      of[k] = part < layout::kParts ? load(partial_at(row_tile, part, row)) : merge_exponentials::none<float, 2>();
    }
    return merge_exponentials::in_four(of);
  }

 private:
  ONEPASS_FUNCTION uint32 partial_at(int row_tile, int part, int row) const {
    return at_ + row_tile % 2 * layout::kSumBytes +
           (part * kWarpgroupRows + row) * static_cast<int>(sizeof(partial_softmax));
  }
  ONEPASS_FUNCTION uint64& mine(int row_tile) { return mbarriers_[row_tile % 2][threadIdx.x % kWarpgroupThreads / 32]; }
  ONEPASS_FUNCTION void expect(int row_tile) {
    if (threadIdx.x < kWarpgroupThreads && threadIdx.x % 32 == 0)
      arrive_and_expect(&mine(row_tile),
                        layout::kParts * layout::kWarpRows * static_cast<int>(sizeof(partial_softmax)));
  }
  ONEPASS_FUNCTION partial_softmax load(uint32 at) const {
    partial_softmax of;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(of.v[0]), "=f"(of.v[1]) : "r"(at) : "memory");
    return of;
  }
  uint64 (&mbarriers_)[2][layout::kWarps];
  const uint32 at_;
  const int part_;
};

// The words' cursor. It gives 1 for the operands in kKeyMasks, since masked scores are -inf already.
template <class Config, class Line>
class masked_cursor : public cursor<typename Config::behind, Line> {
 public:
  using base = cursor<typename Config::behind, Line>;

  explicit ONEPASS_FUNCTION masked_cursor(const arguments& a) : base(a) {}
  template <class L, int I>
  ONEPASS_FUNCTION L operand() const {
    if constexpr (is_of_keys<I>()) return L(1);
    else return base::template operand<L, I>();
  }
  // Whether all kKeyMasks keep a key.
  template <int I = 0>
  ONEPASS_FUNCTION bool keeps_key(int key) const {
    if constexpr (I == kMaxOperands) {
      return true;
    } else {
      bool is_kept = true;
      if constexpr (is_of_keys<I>()) {
        const view& mask = where::a_.operand[I];
        is_kept = static_cast<const uint8*>(mask.data)[where::template offset<1>(mask) + key] != 0;
      }
      return is_kept && keeps_key<I + 1>(key);
    }
  }

 private:
  using where = position<typename Config::behind>;

  template <int I>
  static constexpr __device__ bool is_of_keys() {
    return (Config::kKeyMasks >> I & 1) != 0;
  }
};

// A warpgroup's part of a row tile, from key `key` on: its scores in registers, up to the result.
template <class Config, class Behind>
class register_resident_softmax {
 public:
  using vectors = row_fragments<Config, Behind, masked_cursor<Config, Behind>>;
  using L = typename vectors::L;

  ONEPASS_FUNCTION register_resident_softmax(const arguments& a, char* streams, int key)
      : a_(a), rows_(a, streams), key_(key) {}
  ONEPASS_FUNCTION vectors& rows() { return rows_; }
  ONEPASS_FUNCTION void load_async() { rows_.load_async(key_); }

  // Zeroes masked keys in shared memory, and writes the mask of the extra k-step.
  ONEPASS_FUNCTION void mask_keys(char* keys, char* marks) {
    using layout = probabilities_shared<Config>;
    constexpr uint16 kOut = Config::kX == dtype::bf16 ? 0xff80 : 0xfc00;  // -inf
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    for (int at = thread * 16; at < layout::kMarkBytes; at += kWarpgroupThreads * 16)
      *reinterpret_cast<uint4*>(marks + at) = {};
    sync();
    for (int row = thread; row < Config::kTile; row += kWarpgroupThreads) {
      const int key = key_ + key_at<Config::kTile>(row);
      if (key >= a_.columns || rows_.at(0).keeps_key(key)) continue;
      *reinterpret_cast<uint16*>(marks + row / 64 * layout::kMarkAtomBytes + row % 64 * 2) = kOut;
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
#pragma unroll
        for (int piece = 0; piece < 8; ++piece)
          *reinterpret_cast<uint4*>(keys + (atom * Config::kTile + row) * 128 + piece * 16) = {};
      }
    }
    fence_proxy_async_shared();
    sync();
  }
  ONEPASS_FUNCTION void multiply(uint32 queries, uint32 keys, uint32 marks) {
    uint32 selects[4] = {};
    if constexpr (Config::kKeyMasks != 0) {
      constexpr uint32 kOne = Config::kX == dtype::bf16 ? 0x3f80 : 0x3c00;
      selects[0] = selects[1] = threadIdx.x % 4 == 0 ? kOne : 0;  // 1 for the row of marks, 0 for the other fifteen
#pragma unroll
      for (uint32& of : selects) asm volatile("" : "+r"(of));  // opaque: else the assembler serializes the wgmmas
    }
    begin_wgmma();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(scores_, queries, keys);
    if constexpr (Config::kKeyMasks != 0)
      add_wgmma_of_registers<Config::kX, Config::kTile, probabilities_shared<Config>::kMarkAtomBytes>(
          scores_, selects, transposed_tile_descriptor<16>(marks));
    commit_wgmma();
    wait_for_wgmma<0>();
  }
  // Applies the words before softmax, then the exponential; own: the partial statistics.
  ONEPASS_FUNCTION void take_exponentials(partial_softmax (&own)[2]) {
    rows_.wait_for_streams();
    rows_.finish(scores_, key_);
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = {{largest_of_four(vectors::largest(scores_, i)), 0.0f}};
    rows_.change_vectors(scores_, key_, [&](int i, L vector, int) {
      vector = exp_minus(vector, shift_of(own[i].v[0]));
      own[i].v[1] += sum_lanes(vector);
      return vector;
    });
#pragma unroll
    for (auto& of : own) of.v[1] = sum_of_four(of.v[1]);
  }
  ONEPASS_FUNCTION void store(const float (&factors)[2]) {
    rows_.change_vectors(scores_, key_, [&](int i, L vector, int) {
      rows_.at(i).store_y(Behind::post::forward(vector * L(factors[i]), rows_.at(i)));
      return vector;
    });
  }

 private:
  static ONEPASS_FUNCTION void sync() { sync_warpgroup(1 + static_cast<int>(threadIdx.x) / kWarpgroupThreads); }

  const arguments& a_;
  vectors rows_;
  const int key_;
  float scores_[Config::kTile / 2];
};

template <class Config, class Behind>
ONEPASS_FUNCTION void probabilities_mainloop(const attention_arguments& a, probabilities_shared<Config>& shared,
                                             char* dynamic) {
  using layout = probabilities_shared<Config>;
  const int warpgroup = warpgroup_id(), rank = Config::kCluster > 1 ? cluster_rank() : 0,
            part = rank * Config::kWarpgroups + warpgroup, key = part * Config::kTile;
  const cluster_row_tiles<Config> row_tiles(a);
  if (threadIdx.x == 0) {
    arrive_and_expect(&shared.keys, Config::kWarpgroups * layout::kKeyBytes);
    for (int i = 0; i < Config::kWarpgroups; ++i)
      tma_load_keys<Config::kAtoms, Config::kTile>(layout::own_keys(dynamic, i), a.keys, a.step_keys, row_tiles.batch,
                                                   key + i * Config::kTile, shared_address(&shared.keys));
  }
  const uint32 keys = layout::own_keys(dynamic, warpgroup);
  query_ring<Config> queries(a, row_tiles, shared, dynamic);
  cluster_softmax<Config> sums(shared, dynamic, part);
  register_resident_softmax<Config, Behind> scores(a.behind, layout::streams(dynamic), key);
  auto& rows = scores.rows();
  const auto rows_left = [&](int row_tile) { return a.rows - row_tiles.first_row(row_tile); };
  rows.set_rows(row_tiles.row + row_tiles.first_row(0), rows_left(0));
  scores.load_async();
  if constexpr (Config::kCluster > 1) wait_for_cluster();  // all have initialised their mbarriers
  wait_for_mbarrier(&shared.keys, 0);
  const uint32 marks = layout::marks(dynamic, warpgroup);
  if constexpr (Config::kKeyMasks != 0) scores.mask_keys(at_shared(dynamic, keys), at_shared(dynamic, marks));

  uint32 tile = queries.next();
#pragma unroll 1
  for (int row_tile = 0; row_tile < row_tiles.count; ++row_tile) {
    partial_softmax own[2];
    scores.multiply(tile, keys, marks);
    queries.release();
    scores.take_exponentials(own);
#pragma unroll
    for (int i = 0; i < 2; ++i) sums.send(row_tile, rows.own(i), own[i]);
    const bool more = row_tile + 1 < row_tiles.count;
    if (more && Config::behind::kStreams != 0) {
      rows.skip_rows(kWarpgroupRows, rows_left(row_tile + 1));
      scores.load_async();
      rows.skip_rows(-kWarpgroupRows, rows_left(row_tile));
    }
    if (more) tile = queries.next();
    sums.wait(row_tile);
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const partial_softmax all = sums.all(row_tile, rows.own(i), own[i]);
      const word::row_numbers<float> saved = statistics_of(all.v[0], all.v[1]);
      factors[i] = exp_minus_number(own[i].v[0], saved.first) * saved.second;
      if (Config::behind::kSavesStatistics && part == 0 && rows.exists(i) && rows.is_row_leader())
        save<Behind>(a.behind, rows.row(i), saved);
    }
    scores.store(factors);
    if (more) rows.skip_rows(kWarpgroupRows, rows_left(row_tile + 1));
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void probabilities_forward_sm90(const attention_arguments& a) {
  static_assert(same_type<typename Behind::row, word::softmax>);
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ probabilities_shared<Config> shared;
  if (threadIdx.x == 0) shared.open();
  if constexpr (Config::kCluster > 1) arrive_at_cluster();
  __syncthreads();
  wait_for_kernel_before();
  probabilities_mainloop<Config, Behind>(a, shared, dynamic);
}

ONEPASS_END
