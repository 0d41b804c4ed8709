// Lines that begin with `scores` and have softmax, in one kernel (sm_90a): with `values` behind, scores never leave the
// chip, and keys and values pass by once; without, the keys pass by twice, and what the line makes of the scores is
// written. (Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024.)
//
// A warpgroup has 64 rows of queries. Of the last, one thread brings tiles of keys and values into a ring. Keys of a
// tile stand in an order in which each thread has eight neighbours of a row: of row 2 p + 8 c j + i of a tile, c = p's
// count and i < 2, the key is 8 p + 2 j + i.
//
// Config:
//   kX                  storage type throughout: bf16 or f16
//   kGroups, kKeys      warpgroups of rows; keys of a tile, 64 or 128
//   kSteps, kPanels     of the queries' numbers: sixteens, and 64s, begun ones too
//   kValuePanels        of the values'; 0: there are none
//   kStages             tiles of keys, and of values, in shared memory
//   kCausal             no row needs keys behind its own place
//   behind              what place.cuda.h asks for, of the scores; kStreams: tensors whose next tile is brought while
//                       this one is taken, each thread's part by itself
#pragma once

#include "onepass/skeleton/place.cuda.h"
#include "onepass/skeleton/thread_row.cuda.h"
#include "onepass/skeleton/warpgroups.cuda.h"

ONEPASS_BEGIN

// Of a tensor [outer, inner, ...] the dimensions along which it does not repeat itself.
struct batch_steps {
  int outer, inner, group;
};

struct attention_arguments {
  tensor_map queries, keys, values;  // [outer, inner, group, rows, depth]; [outer, inner, keys / 8, 8, depth] twice
  batch_steps step_queries, step_keys, step_values;
  int inner, group, rows, blocks;  // sizes; blocks: that share a group's rows
  void* y;                         // [all rows, value_depth]
  int64 value_depth;
  arguments behind;
};

inline constexpr int kGroupRows = 64;

template <class Config>
struct attention_shared {
  static constexpr int kPanelBytes = kGroupRows * 128;  // of 64 rows of queries
  static constexpr int kQueryBytes = Config::kPanels * kPanelBytes;
  static constexpr int kRowsBytes =  // of them, and then of what is made of the values
      (Config::kPanels > Config::kValuePanels ? Config::kPanels : Config::kValuePanels) * kPanelBytes;
  static constexpr int kKeyBytes = Config::kPanels * Config::kKeys * 128,
                       kValueBytes = Config::kValuePanels * Config::kKeys * 128;

  uint64 queries[Config::kGroups];
  uint64 keys_full[Config::kStages], keys_empty[Config::kStages];
  uint64 values_full[Config::kStages], values_empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 rows(char* dynamic, int group) {
    return ((shared_address(dynamic) + 1023) & ~1023u) + group * kRowsBytes;
  }
  static ONEPASS_FUNCTION char* own_rows(char* dynamic, int group) {
    return dynamic + (rows(dynamic, group) - shared_address(dynamic));
  }
  static ONEPASS_FUNCTION uint32 keys(char* dynamic, int stage) {
    return rows(dynamic, Config::kGroups) + stage * kKeyBytes;
  }
  static ONEPASS_FUNCTION uint32 values(char* dynamic, int stage) {
    return keys(dynamic, Config::kStages) + stage * kValueBytes;
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) {
    return dynamic + (values(dynamic, Config::kStages) - shared_address(dynamic));
  }
  ONEPASS_FUNCTION void open() {
    for (uint64& box : queries) open_mailbox(&box, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      open_mailbox(&keys_full[i], 1), open_mailbox(&keys_empty[i], Config::kGroups);
      open_mailbox(&values_full[i], 1), open_mailbox(&values_empty[i], Config::kGroups);
    }
    let_cluster_see_mailboxes();
  }
};

// Which rows a block has, and which keys they need.
template <class Config>
struct block_rows {
  int outer, inner, group, first;  // batch; first row of the block in it
  int64 row;                       // and among all
  int tiles;

  explicit ONEPASS_FUNCTION block_rows(const attention_arguments& a) {
    constexpr int kRows = Config::kGroups * kGroupRows;
    int rest = static_cast<int>(blockIdx.x) / a.blocks;
    row = int64{rest} * a.rows;
    group = rest % a.group, rest /= a.group;
    inner = rest % a.inner, outer = rest / a.inner;
    first = (a.blocks - 1 - static_cast<int>(blockIdx.x) % a.blocks) * kRows;  // those that need most keys come first
    row += first;
    tiles = static_cast<int>((a.behind.columns + Config::kKeys - 1) / Config::kKeys);
    if constexpr (Config::kCausal) {
      const int needed = (first + kRows + Config::kKeys - 1) / Config::kKeys;
      if (needed < tiles) tiles = needed;
    }
  }
};

template <class Config>
ONEPASS_FUNCTION void bring_tile_of_keys(uint32 to, const tensor_map& map, int panels, int tile, int inner, int outer,
                                         uint32 box) {
  constexpr int kPart = Config::kKeys / 4;
  for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      bring_tile(to + (panel * Config::kKeys + j * kPart) * 128, map, panel * 64, 2 * j, tile * (Config::kKeys / 8),
                 inner, outer, box);
  }
}

template <class Config>
ONEPASS_FUNCTION void bring_attention(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic) {
  using layout = attention_shared<Config>;
  constexpr int kPasses = Config::kValuePanels > 0 ? 1 : 2;
  const block_rows<Config> of(a);
  for (int group = 0; group < Config::kGroups; ++group) {
    arrive_and_expect(&shared.queries[group], layout::kQueryBytes);
    for (int panel = 0; panel < Config::kPanels; ++panel)
      bring_tile(layout::rows(dynamic, group) + panel * layout::kPanelBytes, a.queries, panel * 64,
                 of.first + group * kGroupRows, of.group * a.step_queries.group, of.inner * a.step_queries.inner,
                 of.outer * a.step_queries.outer, shared_address(&shared.queries[group]));
  }
  ring_position<Config::kStages> at;
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int tile = 0; tile < of.tiles; ++tile) {
      wait_for_mail(&shared.keys_empty[at.stage], at.phase ^ 1);
      arrive_and_expect(&shared.keys_full[at.stage], layout::kKeyBytes);
      bring_tile_of_keys<Config>(layout::keys(dynamic, at.stage), a.keys, Config::kPanels, tile,
                                 of.inner * a.step_keys.inner, of.outer * a.step_keys.outer,
                                 shared_address(&shared.keys_full[at.stage]));
      if constexpr (Config::kValuePanels > 0) {
        wait_for_mail(&shared.values_empty[at.stage], at.phase ^ 1);
        arrive_and_expect(&shared.values_full[at.stage], layout::kValueBytes);
        bring_tile_of_keys<Config>(layout::values(dynamic, at.stage), a.values, Config::kValuePanels, tile,
                                   of.inner * a.step_values.inner, of.outer * a.step_values.outer,
                                   shared_address(&shared.values_full[at.stage]));
      }
      at.next();
    }
  }
}

// A warpgroup's 64 rows: a thread has two, eight apart.
template <class Config, class Behind>
class score_rows {
 public:
  using layout = attention_shared<Config>;
  using behind = typename Config::behind;
  using index = typename behind::index;
  using L = pack<float, 8>;
  static constexpr int kLanes = Config::kKeys / 32;  // of a thread's row in a tile

  float d[Config::kKeys / 2];  // the scores

  ONEPASS_FUNCTION score_rows(const attention_arguments& a, attention_shared<Config>& shared, char* dynamic)
      : a_(a), shared_(shared), of_(a), at_{place<behind, Behind>(a.behind), place<behind, Behind>(a.behind)} {
    group_ = static_cast<int>(threadIdx.x) / kGroupThreads;
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    own_ = group_ * kGroupRows + thread / 32 * 16 + thread % 32 / 4;
    queries_ = layout::rows(dynamic, group_);
    keys_ = layout::keys(dynamic, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at_[i].set_row(static_cast<index>(row(i)), exists(i));
      at_[i].set_copies(layout::streams(dynamic), own_ + 8 * i);
      at_[i].set_stage(0);
    }
    bring(0);
    wait_for_mail(&shared.queries[group_], 0);
  }

  ONEPASS_FUNCTION int tiles() const { return of_.tiles; }
  ONEPASS_FUNCTION int group() const { return group_; }
  ONEPASS_FUNCTION int64 first_row() const { return of_.row + group_ * kGroupRows; }
  ONEPASS_FUNCTION int rows_left() const { return a_.rows - of_.first - group_ * kGroupRows; }
  ONEPASS_FUNCTION int64 row(int i) const { return of_.row + own_ + 8 * i; }
  ONEPASS_FUNCTION bool exists(int i) const { return of_.first + own_ + 8 * i < a_.rows; }

  // The next tile's products begin.
  ONEPASS_FUNCTION void begin_tile() {
    wait_for_mail(&shared_.keys_full[ring_.stage], ring_.phase);
    const uint64 rows = tile_descriptor(queries_), keys = tile_descriptor(keys_ + ring_.stage * layout::kKeyBytes);
    begin_products();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const int panel = step / 4, within = step % 4 * 2;
      add_product<Config::kX, Config::kKeys>(d, rows + (panel * layout::kPanelBytes >> 4) + within,
                                             keys + (panel * Config::kKeys * 128 >> 4) + within, step > 0);
    }
    close_products();
  }
  // They are there, and the keys are not needed any more.
  template <int kPending>
  ONEPASS_FUNCTION void end_tile() {
    wait_for_products<kPending>();
    if (threadIdx.x % kGroupThreads == 0) arrive(&shared_.keys_empty[ring_.stage]);
    ring_.next();
  }

  // What stands before softmax takes the scores' place; `next` is the tile behind this one.
  ONEPASS_FUNCTION void finish_tile(int tile, int next) {
    if constexpr (behind::kStreams != 0) wait_for_copy_groups<0>();
    each_lane(tile, [&](int i, L scores, int count) {
      scores = Behind::pre::forward(scores, at_[i]);
      if constexpr (!behind::kExact) scores = where(first_n<L>(count), scores, L(-kInfinity));
      return scores;
    });
    bring(next);
  }
  // change(i, lane, count): what takes the place of each lane of the thread's rows.
  template <class Change>
  ONEPASS_FUNCTION void each_lane(int tile, const Change& change) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto column = static_cast<index>(tile * Config::kKeys + lane * 32 + threadIdx.x % 4 * 8);
      const int count = behind::kExact ? 8 : count_at<8>(column, a_.behind.columns);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        at_[i].set_column(column, count);
        at_[i].set_lane(lane);
        L of;
#pragma unroll
        for (int c = 0; c < 8; ++c) of.v[c] = d[4 * (kLanes * (c / 2) + lane) + 2 * i + c % 2];
        of = change(i, of, count);
#pragma unroll
        for (int c = 0; c < 8; ++c) d[4 * (kLanes * (c / 2) + lane) + 2 * i + c % 2] = of.v[c];
      }
    }
  }
  ONEPASS_FUNCTION place<behind, Behind>& at(int i) { return at_[i]; }

  // Of the tile, in a thread's part of row i.
  ONEPASS_FUNCTION float largest(int i) const {
    float most = d[2 * i];
#pragma unroll
    for (int k = 2 * i; k < Config::kKeys / 2; k += 4) most = max_number(most, max_number(d[k], d[k + 1]));
    return most;
  }

 private:
  // The tile's part of the streams is on its way.
  ONEPASS_FUNCTION void bring(int tile) {
    if constexpr (behind::kStreams != 0) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto column = static_cast<index>(tile * Config::kKeys + lane * 32 + threadIdx.x % 4 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!exists(i) || column >= a_.behind.columns) continue;
          at_[i].set_column(column, 8);
          at_[i].set_lane(lane);
          at_[i].bring();
        }
      }
      close_copy_group();
    }
  }

  const attention_arguments& a_;
  attention_shared<Config>& shared_;
  const block_rows<Config> of_;
  place<behind, Behind> at_[2];
  int group_, own_;
  uint32 queries_, keys_;
  ring_position<Config::kStages> ring_;
};

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
