// Lines that begin with `scores` and have softmax, in one kernel (sm_90a): with `values` behind, scores never leave the
// chip, and keys and values pass by once; without, the keys pass by twice, and what the line makes of the scores is
// written. (Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024.)
//
// Config: score_tiles.cuda.h.
#pragma once

#include "onepass/skeleton/score_tiles.cuda.h"
#include "onepass/skeleton/thread_row.cuda.h"

ONEPASS_BEGIN

ONEPASS_FUNCTION float largest_of_four(float of) {
  of = max_number(of, __shfl_xor_sync(0xffffffffu, of, 1));
  return max_number(of, __shfl_xor_sync(0xffffffffu, of, 2));
}
ONEPASS_FUNCTION float sum_of_four(float of) {
  of += __shfl_xor_sync(0xffffffffu, of, 1);
  return of + __shfl_xor_sync(0xffffffffu, of, 2);
}

// Σ exp(score - largest) of a row, while tiles pass by: the largest of all its threads, and this thread's part.
struct passing_sum {
  float largest = -kInfinity, sum = 0.0f;

  // Takes a tile's largest score; gives what sums up to now are to be multiplied with.
  ONEPASS_FUNCTION float see(float of_tile) {
    const float before = largest;
    largest = max_number(before, of_tile);
    const float factor = exp_minus_number(before, shift());
    sum *= factor;
    return factor;
  }
  ONEPASS_FUNCTION float shift() const { return shift_of(largest); }
  ONEPASS_FUNCTION stage::pair<float> statistics() const {
    const float all = sum_of_four(sum);
    return {shift(), all == 0.0f ? 0.0f : reciprocal_number(all)};
  }
};

// A tile's scores become their exponentials; the factors of each row.
template <class Rows>
ONEPASS_FUNCTION void take_exponentials(Rows& rows, passing_sum (&sums)[2], float (&factors)[2], int tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) factors[i] = sums[i].see(largest_of_four(rows.largest(i)));
  rows.each_lane(tile, [&](int i, auto scores, int) {
    const auto values = exp_minus(scores, sums[i].shift());
    sums[i].sum += sum_lanes(values);
    return values;
  });
}

template <class Config, class Behind, class Rows>
ONEPASS_FUNCTION void save_statistics(const attention_arguments& a, const Rows& rows, const passing_sum (&sums)[2],
                                      stage::pair<float> (&saved)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    saved[i] = sums[i].statistics();
    if (Config::behind::kSavesStatistics && rows.exists(i) && threadIdx.x % 4 == 0)
      save<Behind>(a.behind, rows.row(i), saved[i]);
  }
}

// What `values` gives for 64 rows.
template <class Config>
class weighted_values {
 public:
  using layout = attention_shared<Config>;
  static constexpr int kNumbers = Config::kValuePanels * 64;

  ONEPASS_FUNCTION weighted_values(attention_shared<Config>& shared, char* dynamic)
      : shared_(shared), values_(layout::values(dynamic, 0)) {}

  // Weights of a tile, as the matrix unit takes them.
  ONEPASS_FUNCTION void take_weights(const float (&d)[Config::kKeys / 2]) {
#pragma unroll
    for (int step = 0; step < Config::kKeys / 16; ++step) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        weights_[step][k] = pair_to_storage<Config::kX>(d[8 * step + 2 * k], d[8 * step + 2 * k + 1]);
    }
  }
  ONEPASS_FUNCTION void begin_tile() {
    wait_for_mail(&shared_.values_full[ring_.stage], ring_.phase);
    const uint64 values = turned_tile_descriptor<Config::kKeys>(values_ + ring_.stage * layout::kValueBytes);
    begin_products();
#pragma unroll
    for (int step = 0; step < Config::kKeys / 16; ++step)
      add_product_of<Config::kX, kNumbers, Config::kKeys * 128>(sums_, weights_[step], values + 128 * step);
    close_products();
  }
  ONEPASS_FUNCTION void end_tile() {
    wait_for_products<0>();
    if (threadIdx.x % kGroupThreads == 0) arrive(&shared_.values_empty[ring_.stage]);
    ring_.next();
  }
  ONEPASS_FUNCTION void scale(const float (&factors)[2]) {
#pragma unroll
    for (int k = 0; k < kNumbers / 2; ++k) sums_[k] *= factors[k / 2 % 2];
  }

  // `to`: 64 rows in memory, of which `rows` exist, by way of shared memory that is this warpgroup's own.
  ONEPASS_FUNCTION void store(char* shared, void* to, int rows, int64 depth) const {
    hand_over<Config::kX, kNumbers>(sums_, shared);
    meet_in_group(1 + static_cast<int>(threadIdx.x) / kGroupThreads);
    constexpr int kPieces = kNumbers / 8, kAtOnce = kGroupThreads / kPieces;
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, piece = thread % kPieces;
    if (thread >= kAtOnce * kPieces || piece * 8 >= depth) return;
    for (int r = thread / kPieces; r < rows && r < kGroupRows; r += kAtOnce)
      *reinterpret_cast<uint4*>(static_cast<uint16*>(to) + r * depth + piece * 8) =
          *reinterpret_cast<const uint4*>(shared + r * (kNumbers * 2) + place_of_piece(piece, r) * 16);
  }

 private:
  attention_shared<Config>& shared_;
  const uint32 values_;
  float sums_[kNumbers / 2] = {};
  uint32 weights_[Config::kKeys / 16][4];
  ring_position<Config::kStages> ring_;
};

// Two warpgroups multiply in turn: one's scores become weights while the other's products are under way.
template <class Config>
class turns {
 public:
  ONEPASS_FUNCTION turns() {
    if (kAny && group() == 1) pass();
  }
  ONEPASS_FUNCTION void wait() const {
    if constexpr (kAny) asm volatile("bar.sync %0, %1;" ::"r"(kFirst + group()), "n"(2 * kGroupThreads) : "memory");
  }
  ONEPASS_FUNCTION void pass() const {
    if constexpr (kAny)
      asm volatile("bar.arrive %0, %1;" ::"r"(kFirst + 1 - group()), "n"(2 * kGroupThreads) : "memory");
  }

 private:
  static constexpr bool kAny = Config::kGroups == 2;
  static constexpr int kFirst = 1 + Config::kGroups;  // of the barriers, behind those of each group
  static ONEPASS_FUNCTION int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
};

// One tile's products are under way while the next one's scores become weights.
template <class Config, class Behind>
ONEPASS_FUNCTION void attend(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  score_rows<Config, Behind> rows(a, shared, dynamic);
  weighted_values<Config> values(shared, dynamic);
  passing_sum sums[2];
  float factors[2];
  const auto weigh = [&](int tile) {
    rows.each_lane(tile, [&](int i, auto lane, int) { return Behind::post::forward(lane, rows.at(i)); });
    values.take_weights(rows.d);
  };
  const turns<Config> turn;
  turn.wait();
  rows.begin_tile();
  turn.pass();
  rows.template end_tile<0>();
  rows.finish_tile(0, 1);
  take_exponentials(rows, sums, factors, 0);
  weigh(0);
  for (int tile = 1; tile < rows.tiles(); ++tile) {
    turn.wait();
    rows.begin_tile();
    values.begin_tile();
    turn.pass();
    rows.template end_tile<1>();
    rows.finish_tile(tile, tile + 1);
    take_exponentials(rows, sums, factors, tile);
    values.end_tile();
    if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) values.scale(factors);
    weigh(tile);
  }
  turn.wait();
  values.begin_tile();
  turn.pass();
  values.end_tile();
  stage::pair<float> saved[2];
  save_statistics<Config, Behind>(a, rows, sums, saved);
  const float inverses[2] = {saved[0].second, saved[1].second};
  values.scale(inverses);
  auto* to = static_cast<uint16*>(a.y) + rows.first_row() * a.value_depth;
  values.store(attention_shared<Config>::own_rows(dynamic, rows.group()), to, rows.rows_left(), a.value_depth);
}

template <class Config, class Behind>
ONEPASS_FUNCTION void write_weights(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  score_rows<Config, Behind> rows(a, shared, dynamic);
  passing_sum sums[2];
  float factors[2];
  const auto next = [&](int tile) {
    rows.begin_tile();
    rows.template end_tile<0>();
    rows.finish_tile(tile, tile + 1 < rows.tiles() ? tile + 1 : 0);
  };
  for (int tile = 0; tile < rows.tiles(); ++tile) {
    next(tile);
    take_exponentials(rows, sums, factors, tile);
  }
  stage::pair<float> saved[2];
  save_statistics<Config, Behind>(a, rows, sums, saved);
  for (int tile = 0; tile < rows.tiles(); ++tile) {
    next(tile);
    rows.each_lane(tile, [&](int i, auto scores, int) {
      rows.at(i).store_y(Behind::post::forward(stage::softmax::recompute(scores, saved[i]), rows.at(i)));
      return scores;
    });
  }
  const auto all = static_cast<int>((a.behind.columns + Config::kKeys - 1) / Config::kKeys);
  for (int tile = rows.tiles(); tile < all; ++tile) {
    rows.each_lane(tile, [&](int i, auto scores, int) {
      rows.at(i).store_y(Behind::post::forward(decltype(scores)(0.0f), rows.at(i)));
      return scores;
    });
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void attention_forward(const attention_arguments& a) {
  static_assert(same_type<typename Behind::row, stage::softmax>);
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ attention_shared<Config> shared;
  if (threadIdx.x == 0) shared.open();
  __syncthreads();
  wait_for_kernel_before();
  // What registers the groups take makes the 65536 of an SM.
  if (threadIdx.x >= Config::kGroups * kGroupThreads) {
    give_registers<24>();
    if (threadIdx.x == Config::kGroups * kGroupThreads) bring_attention<Config>(a, shared, dynamic);
  } else {
    take_registers<Config::kGroups == 2 ? 240 : 160>();
    if constexpr (Config::kValuePanels > 0) attend<Config, Behind>(a, shared, dynamic);
    else write_weights<Config, Behind>(a, shared, dynamic);
  }
}

ONEPASS_END
