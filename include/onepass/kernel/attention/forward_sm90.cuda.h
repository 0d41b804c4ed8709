// Forward of lines with `scores` and softmax, in one kernel (sm_90a). With `values` it is flash attention: scores never
// leave the chip, and each block reads keys and values once. Without, each block reads the keys twice, once for the
// rows' statistics and once for the probabilities, which are stored. (Dao et al., "FlashAttention", 2022; Shah et al.,
// "FlashAttention-3", 2024.)
//
// A consumer warpgroup has 64 rows of queries. One thread of the producer warpgroup loads tiles of keys and values into
// a ring. Config: kernel/attention/tiles_sm90.cuda.h.
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"

ONEPASS_BEGIN

template <class Config>
struct attention_shared {
  static constexpr int kQueryBytes = Config::kAtoms * kAtomBytes;
  static constexpr int kRowsBytes =  // room for the queries, later reused for the output
      (Config::kAtoms > Config::kValueAtoms ? Config::kAtoms : Config::kValueAtoms) * kAtomBytes;
  static constexpr int kKeyBytes = Config::kAtoms * Config::kTile * 128,
                       kValueBytes = Config::kValueAtoms * Config::kTile * 128;

  uint64 queries[Config::kWarpgroups];
  uint64 keys_full[Config::kStages], keys_empty[Config::kStages];
  uint64 values_full[Config::kStages], values_empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 rows(char* dynamic, int warpgroup) {
    return first_tile(dynamic) + warpgroup * kRowsBytes;
  }
  static ONEPASS_FUNCTION char* own_rows(char* dynamic, int warpgroup) {
    return at_shared(dynamic, rows(dynamic, warpgroup));
  }
  static ONEPASS_FUNCTION uint32 keys(char* dynamic, int stage) {
    return rows(dynamic, Config::kWarpgroups) + stage * kKeyBytes;
  }
  static ONEPASS_FUNCTION uint32 values(char* dynamic, int stage) {
    return keys(dynamic, Config::kStages) + stage * kValueBytes;
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, values(dynamic, Config::kStages)); }
  ONEPASS_FUNCTION void open() {
    for (uint64& mbarrier : queries) init_mbarrier(&mbarrier, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      init_mbarrier(&keys_full[i], 1), init_mbarrier(&keys_empty[i], Config::kWarpgroups);
      init_mbarrier(&values_full[i], 1), init_mbarrier(&values_empty[i], Config::kWarpgroups);
    }
    fence_mbarrier_init();
  }
};

template <class Config>
ONEPASS_FUNCTION void load_attention(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  using layout = attention_shared<Config>;
  constexpr int kPasses = Config::kValueAtoms > 0 ? 1 : 2;
  const block_rows<Config> of(a);
  for (int warpgroup = 0; warpgroup < Config::kWarpgroups; ++warpgroup) {
    arrive_and_expect(&shared.queries[warpgroup], layout::kQueryBytes);
    tma_load_rows<Config::kAtoms>(layout::rows(dynamic, warpgroup), a.queries, a.step_queries, of.batch,
                                  of.first + warpgroup * kWarpgroupRows, shared_address(&shared.queries[warpgroup]));
  }
  ring_position<Config::kStages> at;
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int tile = 0; tile < of.tiles; ++tile) {
      wait_for_mbarrier(&shared.keys_empty[at.stage], at.phase ^ 1);
      arrive_and_expect(&shared.keys_full[at.stage], layout::kKeyBytes);
      tma_load_keys<Config::kAtoms, Config::kTile>(layout::keys(dynamic, at.stage), a.keys, a.step_keys, of.batch,
                                                   tile * Config::kTile, shared_address(&shared.keys_full[at.stage]));
      if constexpr (Config::kValueAtoms > 0) {
        wait_for_mbarrier(&shared.values_empty[at.stage], at.phase ^ 1);
        arrive_and_expect(&shared.values_full[at.stage], layout::kValueBytes);
        tma_load_keys<Config::kValueAtoms, Config::kTile>(layout::values(dynamic, at.stage), a.values, a.step_values,
                                                          of.batch, tile * Config::kTile,
                                                          shared_address(&shared.values_full[at.stage]));
      }
      at.next();
    }
  }
}

// A thread's fragment of a tile of scores.
template <class Config>
struct tile_scores {
  float d[Config::kTile / 2];
};

// The scores S = QK^T of a warpgroup's rows, tile by tile.
template <class Config, class Behind>
class score_tiles {
 public:
  using layout = attention_shared<Config>;
  using behind = typename Config::behind;
  using vectors = row_fragments<Config, Behind>;
  using L = typename vectors::L;

  using scores = tile_scores<Config>;

  ONEPASS_FUNCTION score_tiles(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic)
      : of_(a),
        warpgroup_(warpgroup_id()),
        left_(a.rows - of_.first - warpgroup_ * kWarpgroupRows),
        rows_(a.behind, layout::streams(dynamic)),
        y_(row_of(a.y, of_.batch, of_.first + warpgroup_ * kWarpgroupRows)),
        queries_(layout::rows(dynamic, warpgroup_)),
        keys_(layout::keys(dynamic, 0)),
        ring_(shared.keys_full, shared.keys_empty) {
    rows_.set_rows(of_.row + warpgroup_ * kWarpgroupRows, left_);
    rows_.load_async(0, 0);
    wait_for_mbarrier(&shared.queries[warpgroup_], 0);
  }

  ONEPASS_FUNCTION int tiles() const { return of_.tiles; }
  ONEPASS_FUNCTION int warpgroup() const { return warpgroup_; }
  ONEPASS_FUNCTION uint16* y() const { return y_; }  // the warpgroup's first row of the result
  ONEPASS_FUNCTION int rows_left() const { return left_; }
  ONEPASS_FUNCTION const vectors& rows() const { return rows_; }
  ONEPASS_FUNCTION auto& at(int i) { return rows_.at(i); }

  // Starts the next tile's GEMM.
  ONEPASS_FUNCTION void begin_tile(scores& of) {
    const int stage = ring_.wait();
    begin_wgmma();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(of.d, queries_, keys_ + stage * layout::kKeyBytes);
    commit_wgmma();
  }
  // Waits for that GEMM, and releases the keys.
  template <int kPending>
  ONEPASS_FUNCTION void end_tile() {
    wait_for_wgmma<kPending>();
    ring_.release();
  }

  // Applies the words before softmax to the scores. `step` counts the tiles of both passes; `next`: the tile after it,
  // whose streams are prefetched.
  ONEPASS_FUNCTION void finish_tile(scores& of, int tile, int step, int next) {
    constexpr int kStages = behind::kStages;
    if constexpr (kStages > 1) rows_.load_async(next * Config::kTile, (step + 1) % kStages);
    rows_.template wait_for_streams<kStages - 1>(step % kStages);
    rows_.finish(of.d, tile * Config::kTile);
    if constexpr (kStages == 1) rows_.load_async(next * Config::kTile, 0);
  }
  // Replaces each vector of the thread's rows by change(i, vector, count).
  template <class Change>
  ONEPASS_FUNCTION void each_vector(scores& of, int tile, const Change& change) {
    rows_.change_vectors(of.d, tile * Config::kTile, change);
  }

 private:
  const block_rows<Config> of_;
  const int warpgroup_, left_;
  vectors rows_;
  uint16* const y_;
  const uint32 queries_, keys_;
  ring_consumer<Config::kStages> ring_;
};

// Replaces a tile's scores by their exponentials; `factors` rescale each row's earlier sums (online softmax).
template <class Rows>
ONEPASS_FUNCTION void take_exponentials(Rows& rows, typename Rows::scores& of, online_softmax (&sums)[2],
                                        float (&factors)[2], int tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factors[i] = sums[i].raise(max_number(sums[i].largest, largest_of_four(Rows::vectors::largest(of.d, i))));
    sums[i].sum *= factors[i];
  }
  rows.each_vector(of, tile, [&](int i, auto scores, int) {
    const auto values = exp_minus(scores, sums[i].shift());
    sums[i].sum += sum_lanes(values);
    return values;
  });
}

template <class Config, class Behind, class Rows>
ONEPASS_FUNCTION void save_statistics(const attention_arguments& a, const Rows& rows, const online_softmax (&sums)[2],
                                      word::row_numbers<float> (&saved)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    saved[i] = statistics_of(sums[i].largest, sum_of_four(sums[i].sum));
    if (Config::behind::kSavesStatistics && rows.rows().exists(i) && rows.rows().is_row_leader())
      save<Behind>(a.behind, rows.rows().row(i), saved[i]);
  }
}

// Ping-pong scheduling: two warpgroups issue GEMMs in turn, so that one's softmax overlaps with the other's GEMMs.
template <class Config>
class pingpong {
 public:
  ONEPASS_FUNCTION pingpong() {
    if (kAny && warpgroup() == 1) pass();
  }
  ONEPASS_FUNCTION void wait() const {
    if constexpr (kAny)
      asm volatile("bar.sync %0, %1;" ::"r"(kFirst + warpgroup()), "n"(2 * kWarpgroupThreads) : "memory");
  }
  ONEPASS_FUNCTION void pass() const {
    if constexpr (kAny)
      asm volatile("bar.arrive %0, %1;" ::"r"(kFirst + 1 - warpgroup()), "n"(2 * kWarpgroupThreads) : "memory");
  }

 private:
  static constexpr bool kAny = Config::kWarpgroups == 2;
  static constexpr int kFirst = 1 + Config::kWarpgroups;  // named barriers after those of each warpgroup
  static ONEPASS_FUNCTION int warpgroup() { return warpgroup_id(); }
};

// The mainloop with values: a tile's P·V GEMM overlaps with the next tile's softmax.
template <class Config, class Behind>
ONEPASS_FUNCTION void flash_forward(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  score_tiles<Config, Behind> rows(a, shared, dynamic);
  tile_scores<Config> scores;
  weighted_sum<Config, Config::kValueAtoms> values;
  ring_consumer<Config::kStages> ring(shared.values_full, shared.values_empty);
  online_softmax sums[2];
  float factors[2];
  const auto convert = [&](int tile) {
    rows.each_vector(scores, tile, [&](int i, auto vector, int) { return Behind::post::forward(vector, rows.at(i)); });
    values.set_left_factor(scores.d);
  };
  const auto add_values = [&] {
    const uint32 tile = attention_shared<Config>::values(dynamic, ring.wait());
    begin_wgmma();
    values.add(tile);
    commit_wgmma();
  };
  const auto end_values = [&] {
    wait_for_wgmma<0>();
    ring.release();
  };
  const pingpong<Config> order;
  order.wait();
  rows.begin_tile(scores);
  order.pass();
  rows.template end_tile<0>();
  rows.finish_tile(scores, 0, 0, 1);
  take_exponentials(rows, scores, sums, factors, 0);
  convert(0);
  for (int tile = 1; tile < rows.tiles(); ++tile) {
    order.wait();
    rows.begin_tile(scores);
    add_values();
    order.pass();
    rows.template end_tile<1>();
    rows.finish_tile(scores, tile, tile, tile + 1);
    take_exponentials(rows, scores, sums, factors, tile);
    end_values();
    if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) values.scale(factors);
    convert(tile);
  }
  order.wait();
  add_values();
  order.pass();
  end_values();
  word::row_numbers<float> saved[2];
  save_statistics<Config, Behind>(a, rows, sums, saved);
  const float inverses[2] = {saved[0].second, saved[1].second};
  values.scale(inverses);
  values.store(attention_shared<Config>::own_rows(dynamic, rows.warpgroup()), rows.y(), a.y.row_stride,
               rows.rows_left(), a.value_head_dim);
}

// The mainloop without values: keys are read twice, and the probabilities are stored.
template <class Config, class Behind>
ONEPASS_FUNCTION void store_probabilities(const attention_arguments& a, attention_shared<Config>& shared,
                                          char* dynamic) {
  score_tiles<Config, Behind> rows(a, shared, dynamic);
  tile_scores<Config> scores;
  online_softmax sums[2];
  float factors[2];
  const auto next = [&](int tile, int step) {
    rows.begin_tile(scores);
    rows.template end_tile<0>();
    rows.finish_tile(scores, tile, step, tile + 1 < rows.tiles() ? tile + 1 : 0);
  };
  for (int tile = 0; tile < rows.tiles(); ++tile) {
    next(tile, tile);
    take_exponentials(rows, scores, sums, factors, tile);
  }
  word::row_numbers<float> saved[2];
  save_statistics<Config, Behind>(a, rows, sums, saved);
  for (int tile = 0; tile < rows.tiles(); ++tile) {
    next(tile, rows.tiles() + tile);
    rows.each_vector(scores, tile, [&](int i, auto of, int) {
      rows.at(i).store_y(Behind::post::forward(word::softmax::recompute(of, saved[i]), rows.at(i)));
      return of;
    });
  }
  const auto all = static_cast<int>((a.behind.columns + Config::kTile - 1) / Config::kTile);
  for (int tile = rows.tiles(); tile < all; ++tile) {
    rows.each_vector(scores, tile, [&](int i, auto of, int) {
      rows.at(i).store_y(Behind::post::forward(decltype(of)(0.0f), rows.at(i)));
      return of;
    });
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_forward_sm90(const attention_arguments& a) {
  static_assert(same_type<typename Behind::row, word::softmax>);
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ attention_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_attention<Config>(a, shared, dynamic); },
      [&] {
        if constexpr (Config::kValueAtoms > 0) flash_forward<Config, Behind>(a, shared, dynamic);
        else store_probabilities<Config, Behind>(a, shared, dynamic);
      });
}

ONEPASS_END
