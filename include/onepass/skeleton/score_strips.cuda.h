// How strips of weights, of their gradients and of queries pass the keys that a cluster has, and what its blocks have
// in shared memory for that (sm_90a). Config: score_gradients.cuda.h.
#pragma once

#include "onepass/skeleton/score_tiles.cuda.h"

ONEPASS_BEGIN

struct score_gradient_arguments {
  tensor_map queries, keys, weights, gradients;  // [outer, inner, group, rows, numbers]
  batch_steps step_queries, step_keys, step_weights, step_gradients;
  int inner, group, rows, columns;      // sizes; columns: keys of a batch
  void *rows_gradient, *keys_gradient;  // [all rows, depth], [all keys, depth]
  int64 depth;
  float factor;  // that the words before softmax scale by
};

// Strips of weights and of their gradients, with the queries beside, as they pass.
template <class Config>
struct score_gradient_shared {
  static constexpr int kStages = 2, kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kParts = Config::kCluster, kTilePanels = Config::kTile / 64, kNumbers = Config::kPanels * 64;
  static constexpr int kStripBytes = kTilePanels * kPanelBytes, kQueryBytes = Config::kPanels * kPanelBytes;
  static constexpr int kKeyBytes = kTilePanels * kQueryBytes;
  static constexpr int kOwnRows = kGroupRows / kParts;
  static constexpr int kSumPitch = (kNumbers + 8) * 4, kSumBytes = kGroupRows * kSumPitch;  // rows differ in banks
  // Warps of a block that have products of another's own rows.
  static constexpr int kShowingWarps = kThreads / kGroupThreads * (kOwnRows > 16 ? kOwnRows / 16 : 1);
  static constexpr int kWarpRows = kGroupRows / kWarps, kPartRows = kGroupRows + 8;  // parts differ in banks
  static constexpr int kProductBytes = kParts * kPartRows * 4;

  uint64 keys;
  uint64 full_weights[kStages], empty_weights[kStages];
  uint64 full_gradients[kStages], empty_gradients[kStages];  // and queries
  uint64 products[2][kWarps], sums[2];

  static ONEPASS_FUNCTION uint32 weights(char* dynamic, int stage) { return first_tile(dynamic) + stage * kStripBytes; }
  static ONEPASS_FUNCTION uint32 gradients(char* dynamic, int stage) { return weights(dynamic, kStages + stage); }
  static ONEPASS_FUNCTION uint32 queries(char* dynamic, int stage) {
    return gradients(dynamic, kStages) + stage * kQueryBytes;
  }
  static ONEPASS_FUNCTION uint32 own_keys(char* dynamic) { return queries(dynamic, kStages); }
  // Of each second strip, what this block has of the queries' gradients.
  static ONEPASS_FUNCTION uint32 sum(char* dynamic, int which, int row) {
    return own_keys(dynamic) + kKeyBytes + which * kSumBytes + row * kSumPitch;
  }
  // Likewise what all blocks have of rows' Σ weight · gradient.
  static ONEPASS_FUNCTION uint32 product(char* dynamic, int which, int part, int row) {
    return sum(dynamic, 2, 0) + which * kProductBytes + (part * kPartRows + row) * 4;
  }

  ONEPASS_FUNCTION void expect_products(int which, int warp) {
    arrive_and_expect(&products[which][warp], kParts * kWarpRows * 4);
  }
  ONEPASS_FUNCTION void open() {
    open_mailbox(&keys, 1);
    for (int i = 0; i < kStages; ++i) {
      open_mailbox(&full_weights[i], 1), open_mailbox(&empty_weights[i], kWarps);
      open_mailbox(&full_gradients[i], 1), open_mailbox(&empty_gradients[i], kThreads / kGroupThreads);
    }
    for (int which = 0; which < 2; ++which) {
      for (int warp = 0; warp < kWarps; ++warp) open_mailbox(&products[which][warp], 1), expect_products(which, warp);
      open_mailbox(&sums[which], kParts * kShowingWarps);
    }
    let_cluster_see_mailboxes();
  }
};

// The batch that a cluster has, and its strips: those of one group of rows, then those of the next.
template <class Config>
struct batch_strips {
  batch_place batch;
  int number, key;  // of the batch; the block's first
  int of_group, count;

  explicit ONEPASS_FUNCTION batch_strips(const score_gradient_arguments& a) {
    number = static_cast<int>(blockIdx.x) / Config::kCluster;
    key = static_cast<int>(blockIdx.x) % Config::kCluster * Config::kTile;
    batch = {number / a.inner, number % a.inner, 0};
    of_group = (a.rows + kGroupRows - 1) / kGroupRows, count = a.group * of_group;
  }
  ONEPASS_FUNCTION batch_place group_of(int strip) const { return {batch.outer, batch.inner, strip / of_group}; }
  ONEPASS_FUNCTION int row(int strip) const { return strip % of_group * kGroupRows; }
};

// What one thread does: the keys, and all strips, where there is room.
template <class Config>
ONEPASS_FUNCTION void bring_strips(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                                   char* dynamic) {
  using layout = score_gradient_shared<Config>;
  const batch_strips<Config> of(a);
  arrive_and_expect(&shared.keys, layout::kKeyBytes);
  for (int i = 0; i < layout::kTilePanels; ++i)
    bring_rows<Config::kPanels>(layout::own_keys(dynamic) + i * layout::kQueryBytes, a.keys, a.step_keys, of.batch,
                                of.key + i * 64, shared_address(&shared.keys));
  const auto bring_strip = [&](uint32 to, const tensor_map& map, batch_steps step, batch_place group, int row,
                               uint64* box) {
    for (int i = 0; i < layout::kTilePanels; ++i)
      bring_tile(to + i * kPanelBytes, map, of.key + i * 64, row, group.group * step.group, group.inner * step.inner,
                 group.outer * step.outer, shared_address(box));
  };
  ring_position<layout::kStages> at;
  for (int strip = 0; strip < of.count; ++strip, at.next()) {
    const batch_place group = of.group_of(strip);
    const int row = of.row(strip), stage = at.stage;
    uint64* box = &shared.full_weights[stage];
    wait_for_mail(&shared.empty_weights[stage], at.phase ^ 1);
    arrive_and_expect(box, layout::kStripBytes);
    bring_strip(layout::weights(dynamic, stage), a.weights, a.step_weights, group, row, box);
    box = &shared.full_gradients[stage];
    wait_for_mail(&shared.empty_gradients[stage], at.phase ^ 1);
    arrive_and_expect(box, layout::kStripBytes + layout::kQueryBytes);
    bring_strip(layout::gradients(dynamic, stage), a.gradients, a.step_gradients, group, row, box);
    bring_rows<Config::kPanels>(layout::queries(dynamic, stage), a.queries, a.step_queries, group, row,
                                shared_address(box));
  }
}

ONEPASS_END
