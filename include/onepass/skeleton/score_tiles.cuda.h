// Scores of 64 rows of queries in a warpgroup, a tile of keys at a time (sm_90a): where tiles are in shared memory, the
// thread that brings them, and what stands before softmax.
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

ONEPASS_END
