// Lines that begin with `scores` and have softmax, in one kernel (sm_90a): with `values` behind, scores never leave the
// chip, and keys and values pass by once; without, the keys pass by twice, and what the line makes of the scores is
// written. (Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024.)
//
// A warpgroup has 64 rows of queries. Of the last, one thread brings tiles of keys and values into a ring; Config:
// kernel/attention/tiles_sm90.cuda.h.
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"
#include "onepass/kernel/common/online_softmax.cuda.h"

ONEPASS_BEGIN

template <class Config>
struct attention_shared {
  static constexpr int kQueryBytes = Config::kAtoms * kAtomBytes;
  static constexpr int kRowsBytes =  // of them, and then of what is made of the values
      (Config::kAtoms > Config::kValueAtoms ? Config::kAtoms : Config::kValueAtoms) * kAtomBytes;
  static constexpr int kKeyBytes = Config::kAtoms * Config::kTile * 128,
                       kValueBytes = Config::kValueAtoms * Config::kTile * 128;

  uint64 queries[Config::kGroups];
  uint64 keys_full[Config::kStages], keys_empty[Config::kStages];
  uint64 values_full[Config::kStages], values_empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 rows(char* dynamic, int group) { return first_tile(dynamic) + group * kRowsBytes; }
  static ONEPASS_FUNCTION char* own_rows(char* dynamic, int group) { return at_shared(dynamic, rows(dynamic, group)); }
  static ONEPASS_FUNCTION uint32 keys(char* dynamic, int stage) {
    return rows(dynamic, Config::kGroups) + stage * kKeyBytes;
  }
  static ONEPASS_FUNCTION uint32 values(char* dynamic, int stage) {
    return keys(dynamic, Config::kStages) + stage * kValueBytes;
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, values(dynamic, Config::kStages)); }
  ONEPASS_FUNCTION void open() {
    for (uint64& mbarrier : queries) init_mbarrier(&mbarrier, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      init_mbarrier(&keys_full[i], 1), init_mbarrier(&keys_empty[i], Config::kGroups);
      init_mbarrier(&values_full[i], 1), init_mbarrier(&values_empty[i], Config::kGroups);
    }
    fence_mbarrier_init();
  }
};

template <class Config>
ONEPASS_FUNCTION void load_attention(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  using layout = attention_shared<Config>;
  constexpr int kPasses = Config::kValueAtoms > 0 ? 1 : 2;
  const block_rows<Config> of(a);
  for (int group = 0; group < Config::kGroups; ++group) {
    arrive_and_expect(&shared.queries[group], layout::kQueryBytes);
    tma_load_rows<Config::kAtoms>(layout::rows(dynamic, group), a.queries, a.step_queries, of.batch,
                                  of.first + group * kWarpgroupRows, shared_address(&shared.queries[group]));
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

// A thread's part of a tile of scores.
template <class Config>
struct tile_scores {
  float d[Config::kTile / 2];
};

// The scores of a warpgroup's rows, tile by tile.
template <class Config, class Behind>
class score_rows {
 public:
  using layout = attention_shared<Config>;
  using behind = typename Config::behind;
  using vectors = thread_rows<Config, Behind>;
  using L = typename vectors::L;

  using scores = tile_scores<Config>;

  ONEPASS_FUNCTION score_rows(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic)
      : of_(a),
        group_(warpgroup_id()),
        left_(a.rows - of_.first - group_ * kWarpgroupRows),
        rows_(a.behind, layout::streams(dynamic)),
        queries_(layout::rows(dynamic, group_)),
        keys_(layout::keys(dynamic, 0)),
        ring_(shared.keys_full, shared.keys_empty) {
    rows_.set_rows(first_row(), left_);
    rows_.load_async(0, 0);
    wait_for_mbarrier(&shared.queries[group_], 0);
  }

  ONEPASS_FUNCTION int tiles() const { return of_.tiles; }
  ONEPASS_FUNCTION int group() const { return group_; }
  ONEPASS_FUNCTION int64 first_row() const { return of_.row + group_ * kWarpgroupRows; }
  ONEPASS_FUNCTION int rows_left() const { return left_; }
  ONEPASS_FUNCTION const vectors& rows() const { return rows_; }
  ONEPASS_FUNCTION auto& at(int i) { return rows_.at(i); }

  // The next tile's products begin.
  ONEPASS_FUNCTION void begin_tile(scores& of) {
    const int stage = ring_.take();
    begin_wgmma();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(of.d, queries_, keys_ + stage * layout::kKeyBytes);
    commit_wgmma();
  }
  // They are there, and the keys are not needed any more.
  template <int kPending>
  ONEPASS_FUNCTION void end_tile() {
    wait_for_wgmma<kPending>();
    ring_.give_back();
  }

  // What stands before softmax takes the scores' place. Of all tiles that pass by this is number `step`; `next` is the
  // tile behind it.
  ONEPASS_FUNCTION void finish_tile(scores& of, int tile, int step, int next) {
    constexpr int kStages = behind::kStages;
    if constexpr (kStages > 1) rows_.load_async(next * Config::kTile, (step + 1) % kStages);
    rows_.template wait_for_streams<kStages - 1>(step % kStages);
    rows_.finish(of.d, tile * Config::kTile);
    if constexpr (kStages == 1) rows_.load_async(next * Config::kTile, 0);
  }
  // change(i, vector, count): what takes the place of each vector of the thread's rows.
  template <class Change>
  ONEPASS_FUNCTION void each_vector(scores& of, int tile, const Change& change) {
    rows_.change_vectors(of.d, tile * Config::kTile, change);
  }

 private:
  const block_rows<Config> of_;
  const int group_, left_;
  vectors rows_;
  const uint32 queries_, keys_;
  tiles_taken<Config::kStages> ring_;
};

// A tile's scores become their exponentials; the factors of each row.
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

// Two warpgroups multiply in turn: one's scores become weights while the other's products are under way.
template <class Config>
class turns {
 public:
  ONEPASS_FUNCTION turns() {
    if (kAny && group() == 1) pass();
  }
  ONEPASS_FUNCTION void wait() const {
    if constexpr (kAny) asm volatile("bar.sync %0, %1;" ::"r"(kFirst + group()), "n"(2 * kWarpgroupThreads) : "memory");
  }
  ONEPASS_FUNCTION void pass() const {
    if constexpr (kAny)
      asm volatile("bar.arrive %0, %1;" ::"r"(kFirst + 1 - group()), "n"(2 * kWarpgroupThreads) : "memory");
  }

 private:
  static constexpr bool kAny = Config::kGroups == 2;
  static constexpr int kFirst = 1 + Config::kGroups;  // of the barriers, behind those of each group
  static ONEPASS_FUNCTION int group() { return warpgroup_id(); }
};

// One tile's products are under way while the next one's scores become weights.
template <class Config, class Behind>
ONEPASS_FUNCTION void attend(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  score_rows<Config, Behind> rows(a, shared, dynamic);
  tile_scores<Config> scores;
  weighted_sum<Config, Config::kValueAtoms> values;
  tiles_taken<Config::kStages> ring(shared.values_full, shared.values_empty);
  online_softmax sums[2];
  float factors[2];
  const auto weigh = [&](int tile) {
    rows.each_vector(scores, tile, [&](int i, auto vector, int) { return Behind::post::forward(vector, rows.at(i)); });
    values.take_weights(scores.d);
  };
  const auto add_values = [&] {
    const uint32 tile = attention_shared<Config>::values(dynamic, ring.take());
    begin_wgmma();
    values.add(tile);
    commit_wgmma();
  };
  const auto end_values = [&] {
    wait_for_wgmma<0>();
    ring.give_back();
  };
  const turns<Config> turn;
  turn.wait();
  rows.begin_tile(scores);
  turn.pass();
  rows.template end_tile<0>();
  rows.finish_tile(scores, 0, 0, 1);
  take_exponentials(rows, scores, sums, factors, 0);
  weigh(0);
  for (int tile = 1; tile < rows.tiles(); ++tile) {
    turn.wait();
    rows.begin_tile(scores);
    add_values();
    turn.pass();
    rows.template end_tile<1>();
    rows.finish_tile(scores, tile, tile, tile + 1);
    take_exponentials(rows, scores, sums, factors, tile);
    end_values();
    if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) values.scale(factors);
    weigh(tile);
  }
  turn.wait();
  add_values();
  turn.pass();
  end_values();
  word::row_numbers<float> saved[2];
  save_statistics<Config, Behind>(a, rows, sums, saved);
  const float inverses[2] = {saved[0].second, saved[1].second};
  values.scale(inverses);
  auto* to = static_cast<uint16*>(a.y) + rows.first_row() * a.value_depth;
  values.store(attention_shared<Config>::own_rows(dynamic, rows.group()), to, rows.rows_left(), a.value_depth);
}

template <class Config, class Behind>
ONEPASS_FUNCTION void write_weights(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  score_rows<Config, Behind> rows(a, shared, dynamic);
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
ONEPASS_FUNCTION void attention_forward(const attention_arguments& a) {
  static_assert(same_type<typename Behind::row, word::softmax>);
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ attention_shared<Config> shared;
  produce_and_consume<Config>(
      shared, [&] { load_attention<Config>(a, shared, dynamic); },
      [&] {
        if constexpr (Config::kValueAtoms > 0) attend<Config, Behind>(a, shared, dynamic);
        else write_weights<Config, Behind>(a, shared, dynamic);
      });
}

ONEPASS_END
