// Register-resident softmax (sm_90a): lines that begin with `scores` and end with what is made of the probabilities,
// without values. The registers of a cluster hold a strip of 64 rows of scores from the GEMM to the result: each
// warpgroup keeps kTile keys in shared memory, and the strips of queries pass them. Partial softmax statistics of a row
// are exchanged between all warpgroups of the cluster.
//
// Config beside kernel/attention/tiles_sm90.cuda.h:
//   kCluster    blocks that share a strip, one behind another as their keys are
//   kKeyMasks   boolean operands (bits) of which one row serves all rows of a matrix. They are folded into QK^T: masked
//               keys are zeroed in shared memory, and one extra MMA k-step adds -inf to their column
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"

ONEPASS_BEGIN

// A row's largest score and Σ exp(score - largest), of one warpgroup's keys.
using partial_softmax = numbers<float, 2>;

template <class Config>
struct resident_shared {
  static constexpr probabilities_shape kShape{Config::kAtoms, Config::kGroups, Config::kTile, Config::kCluster,
                                              Config::kKeyMasks != 0};
  static constexpr int kParts = kShape.partials();
  static constexpr int kWarps = kWarpgroupThreads / 32, kWarpRows = kWarpgroupRows / kWarps;
  static constexpr int kKeyBytes = kShape.key_bytes(), kQueryBytes = Config::kAtoms * kAtomBytes;
  // The mask of the extra k-step: sixteen rows, of which the first has -inf for each masked key, else 0.
  static constexpr int kMarkAtomBytes = kShape.kMarkAtomBytes, kMarkBytes = kShape.mark_bytes();
  static constexpr int kSumBytes = kShape.partial_bytes();
  static_assert(sizeof(partial_softmax) == kShape.kPartialBytes);

  uint64 keys;
  uint64 full[Config::kStages], empty[Config::kStages];
  uint64 sums[2][kWarps];

  static ONEPASS_FUNCTION uint32 own_keys(char* dynamic, int group) { return first_tile(dynamic) + group * kKeyBytes; }
  static ONEPASS_FUNCTION uint32 marks(char* dynamic, int group) {
    return own_keys(dynamic, Config::kGroups) + group * kMarkBytes;
  }
  static ONEPASS_FUNCTION uint32 queries(char* dynamic, int stage) {
    return marks(dynamic, Config::kGroups) + stage * kQueryBytes;
  }
  // Partial statistics of a row, double-buffered by strip.
  static ONEPASS_FUNCTION uint32 sum(char* dynamic, int which, int part, int row) {
    return queries(dynamic, Config::kStages) + which * kSumBytes +
           (part * kWarpgroupRows + row) * static_cast<int>(sizeof(partial_softmax));
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, sum(dynamic, 2, 0, 0)); }
  ONEPASS_FUNCTION void open() {
    init_mbarrier(&keys, 1);
    for (int i = 0; i < Config::kStages; ++i) init_mbarrier(&full[i], 1), init_mbarrier(&empty[i], Config::kGroups);
    for (auto& mbarriers : sums)
      for (uint64& mbarrier : mbarriers) init_mbarrier(&mbarrier, 1);
    fence_mbarrier_init();
  }
};

// Which strips of which matrix a cluster takes; their rows are counted in it.
template <class Config>
struct cluster_strips {
  batch_place batch;
  int64 row;  // the matrix's first, among all
  int from, count;

  explicit ONEPASS_FUNCTION cluster_strips(const attention_arguments& a) {
    const int all = (a.rows + kWarpgroupRows - 1) / kWarpgroupRows, each = (all + a.blocks - 1) / a.blocks;
    const int number = static_cast<int>(blockIdx.x) / Config::kCluster;
    from = number % a.blocks * each, count = all - from < each ? all - from : each;
    row = int64{number / a.blocks} * a.rows;
    batch = batch_of_matrix(a, number / a.blocks);
  }
  ONEPASS_FUNCTION int first_row(int strip) const { return (from + strip) * kWarpgroupRows; }
};

// The ring of the strips' queries, which one thread of the block loads.
template <class Config>
class passing_queries {
 public:
  using layout = resident_shared<Config>;

  ONEPASS_FUNCTION passing_queries(const attention_arguments& a, const cluster_strips<Config>& strips, layout& shared,
                                   char* dynamic)
      : a_(a), strips_(strips), shared_(shared), at_(layout::queries(dynamic, 0)), ring_(shared.full, shared.empty) {
    for (int i = 1; i < Config::kStages; ++i) load_async();
  }
  ONEPASS_FUNCTION uint32 next() { return at_ + ring_.take() * layout::kQueryBytes; }
  ONEPASS_FUNCTION void give_back() {
    ring_.give_back();
    load_async();
  }

 private:
  ONEPASS_FUNCTION void load_async() {
    if (threadIdx.x != 0 || loaded_ >= strips_.count) return;
    wait_for_mbarrier(&shared_.empty[to_.stage], to_.phase ^ 1);
    uint64* const mbarrier = &shared_.full[to_.stage];
    arrive_and_expect(mbarrier, layout::kQueryBytes);
    tma_load_rows<Config::kAtoms>(at_ + to_.stage * layout::kQueryBytes, a_.queries, a_.step_queries, strips_.batch,
                                  strips_.first_row(loaded_), shared_address(mbarrier));
    to_.next();
    ++loaded_;
  }
  const attention_arguments& a_;
  const cluster_strips<Config>& strips_;
  layout& shared_;
  const uint32 at_;
  tiles_taken<Config::kStages> ring_;
  ring_position<Config::kStages> to_;
  int loaded_ = 0;
};

// Exchanges partial statistics across the cluster. A warpgroup that sends for one strip has read all of the strip
// before, so two buffers suffice.
template <class Config>
class cluster_softmax {
 public:
  using layout = resident_shared<Config>;
  static constexpr bool kAny = layout::kParts > 1;

  ONEPASS_FUNCTION cluster_softmax(layout& shared, char* dynamic, int part)
      : mbarriers_(shared.sums), at_(layout::sum(dynamic, 0, 0, 0)), part_(part) {
    if constexpr (kAny) expect(0), expect(1);
  }
  // For one row of a strip; each of the row's four threads sends to a quarter of the blocks.
  ONEPASS_FUNCTION void send(int strip, int row, partial_softmax own) {
    if constexpr (kAny) {
      const uint32 at = place(strip, part_, row), mbarrier = shared_address(&mine(strip));
#pragma unroll
      for (int k = 0; k < Config::kCluster; k += 4) {
        const int to = k + static_cast<int>(threadIdx.x) % 4, exists = to < Config::kCluster ? to : 0;
        if (to == exists) store_async(in_block(at, exists), in_block(mbarrier, exists), own);
      }
    }
  }
  ONEPASS_FUNCTION void wait(int strip) {
    if constexpr (kAny) {
      wait_for_mbarrier(&mine(strip), strip / 2 % 2);
      expect(strip);
    }
  }
  ONEPASS_FUNCTION partial_softmax all(int strip, int row, partial_softmax own) const {
    if constexpr (!kAny) return own;
    constexpr int kOwn = (layout::kParts + 3) / 4;
    partial_softmax of[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int part = 4 * k + static_cast<int>(threadIdx.x) % 4;
      of[k] = part < layout::kParts ? load(place(strip, part, row)) : merge_exponentials::none<float, 2>();
    }
    return merge_exponentials::in_four(of);
  }

 private:
  ONEPASS_FUNCTION uint32 place(int strip, int part, int row) const {
    return at_ + strip % 2 * layout::kSumBytes +
           (part * kWarpgroupRows + row) * static_cast<int>(sizeof(partial_softmax));
  }
  ONEPASS_FUNCTION uint64& mine(int strip) { return mbarriers_[strip % 2][threadIdx.x % kWarpgroupThreads / 32]; }
  ONEPASS_FUNCTION void expect(int strip) {
    if (threadIdx.x < kWarpgroupThreads && threadIdx.x % 32 == 0)
      arrive_and_expect(&mine(strip), layout::kParts * layout::kWarpRows * static_cast<int>(sizeof(partial_softmax)));
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

// The cursor of the words, for which kKeyMasks are no operands: masked scores are -inf already.
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

// A warpgroup's part of a strip, from keys number `key` on.
template <class Config, class Behind>
class resident_scores {
 public:
  using vectors = thread_rows<Config, Behind, masked_cursor<Config, Behind>>;
  using L = typename vectors::L;

  ONEPASS_FUNCTION resident_scores(const arguments& a, char* streams, int key) : a_(a), rows_(a, streams), key_(key) {}
  ONEPASS_FUNCTION vectors& rows() { return rows_; }
  ONEPASS_FUNCTION void load_async() { rows_.load_async(key_); }

  // Zeroes masked keys in shared memory, and marks them for the extra k-step.
  ONEPASS_FUNCTION void leave_keys_out(char* keys, char* marks) {
    using layout = resident_shared<Config>;
    constexpr uint16 kOut = Config::kX == dtype::bf16 ? 0xff80 : 0xfc00;  // -inf
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    for (int at = thread * 16; at < layout::kMarkBytes; at += kWarpgroupThreads * 16)
      *reinterpret_cast<uint4*>(marks + at) = {};
    meet();
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
    meet();
  }
  ONEPASS_FUNCTION void multiply(uint32 queries, uint32 keys, uint32 marks) {
    uint32 takes[4] = {};
    if constexpr (Config::kKeyMasks != 0) {
      constexpr uint32 kOne = Config::kX == dtype::bf16 ? 0x3f80 : 0x3c00;
      takes[0] = takes[1] = threadIdx.x % 4 == 0 ? kOne : 0;  // 1 for the row of marks, 0 for the other fifteen
#pragma unroll
      for (uint32& of : takes) asm volatile("" : "+r"(of));  // opaque: else the assembler serializes the wgmmas
    }
    begin_wgmma();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(scores_, queries, keys);
    if constexpr (Config::kKeyMasks != 0)
      add_wgmma_of_registers<Config::kX, Config::kTile, resident_shared<Config>::kMarkAtomBytes>(
          scores_, takes, transposed_tile_descriptor<16>(marks));
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
  static ONEPASS_FUNCTION void meet() { sync_warpgroup(1 + static_cast<int>(threadIdx.x) / kWarpgroupThreads); }

  const arguments& a_;
  vectors rows_;
  const int key_;
  float scores_[Config::kTile / 2];
};

template <class Config, class Behind>
ONEPASS_FUNCTION void resident_softmax(const attention_arguments& a, resident_shared<Config>& shared, char* dynamic) {
  using layout = resident_shared<Config>;
  const int group = warpgroup_id(), rank = Config::kCluster > 1 ? cluster_rank() : 0,
            part = rank * Config::kGroups + group, key = part * Config::kTile;
  const cluster_strips<Config> strips(a);
  if (threadIdx.x == 0) {
    arrive_and_expect(&shared.keys, Config::kGroups * layout::kKeyBytes);
    for (int i = 0; i < Config::kGroups; ++i)
      tma_load_keys<Config::kAtoms, Config::kTile>(layout::own_keys(dynamic, i), a.keys, a.step_keys, strips.batch,
                                                   key + i * Config::kTile, shared_address(&shared.keys));
  }
  const uint32 keys = layout::own_keys(dynamic, group);
  passing_queries<Config> queries(a, strips, shared, dynamic);
  cluster_softmax<Config> sums(shared, dynamic, part);
  resident_scores<Config, Behind> scores(a.behind, layout::streams(dynamic), key);
  auto& rows = scores.rows();
  const auto rows_left = [&](int strip) { return a.rows - strips.first_row(strip); };
  rows.set_rows(strips.row + strips.first_row(0), rows_left(0));
  scores.load_async();
  if constexpr (Config::kCluster > 1) wait_for_cluster();  // all have initialised their mbarriers
  wait_for_mbarrier(&shared.keys, 0);
  const uint32 marks = layout::marks(dynamic, group);
  if constexpr (Config::kKeyMasks != 0) scores.leave_keys_out(at_shared(dynamic, keys), at_shared(dynamic, marks));

  uint32 tile = queries.next();
#pragma unroll 1
  for (int strip = 0; strip < strips.count; ++strip) {
    partial_softmax own[2];
    scores.multiply(tile, keys, marks);
    queries.give_back();
    scores.take_exponentials(own);
#pragma unroll
    for (int i = 0; i < 2; ++i) sums.send(strip, rows.own(i), own[i]);
    const bool more = strip + 1 < strips.count;
    if (more && Config::behind::kStreams != 0) {
      rows.skip_rows(kWarpgroupRows, rows_left(strip + 1));
      scores.load_async();
      rows.skip_rows(-kWarpgroupRows, rows_left(strip));
    }
    if (more) tile = queries.next();
    sums.wait(strip);
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const partial_softmax all = sums.all(strip, rows.own(i), own[i]);
      const word::row_numbers<float> saved = statistics_of(all.v[0], all.v[1]);
      factors[i] = exp_minus_number(own[i].v[0], saved.first) * saved.second;
      if (Config::behind::kSavesStatistics && part == 0 && rows.exists(i) && rows.is_row_leader())
        save<Behind>(a.behind, rows.row(i), saved);
    }
    scores.store(factors);
    if (more) rows.skip_rows(kWarpgroupRows, rows_left(strip + 1));
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void probabilities_forward_sm90(const attention_arguments& a) {
  static_assert(same_type<typename Behind::row, word::softmax>);
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ resident_shared<Config> shared;
  if (threadIdx.x == 0) shared.open();
  if constexpr (Config::kCluster > 1) arrive_at_cluster();
  __syncthreads();
  wait_for_kernel_before();
  resident_softmax<Config, Behind>(a, shared, dynamic);
}

ONEPASS_END
