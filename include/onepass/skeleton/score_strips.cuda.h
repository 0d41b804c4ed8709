// How strips of weights, of their gradients and of queries pass the keys that a cluster has, and what its blocks have
// in shared memory for that (sm_90a). Config: score_gradients.cuda.h.
#pragma once

#include "onepass/skeleton/score_tiles.cuda.h"

ONEPASS_BEGIN

struct score_gradient_arguments {
  tensor_map queries, keys, weights, gradients;  // [outer, inner, group, rows, numbers]
  batch_steps step_queries, step_keys, step_weights, step_gradients;
  int batches, inner, group, rows, columns;  // sizes; columns: keys of a batch
  int clusters;
  void *rows_gradient, *keys_gradient;  // [all rows, depth], [all keys, depth]
  float* key_parts;                     // [clusters, 2, columns, depth]: of batches that clusters share
  int64 depth;
  float factor;  // that the words before softmax scale by
};

// Strips of weights and of their gradients, with the queries beside, as they pass; stages are those of strips that
// follow each other, whatever a block has of them.
template <class Config>
struct score_gradient_shared {
  static constexpr int kParts = Config::kCluster, kTilePanels = Config::kTile / 64, kNumbers = Config::kPanels * 64;
  static constexpr bool kAlone = kParts == 1;  // nobody is told anything
  static constexpr int kStages = Config::kStages, kKeyStages = kAlone ? 2 : 1;
  static_assert(kAlone || kStages == 2, "blocks tell each other of a strip and the next");
  static constexpr int kWarps = 8;  // that make scores' gradients
  static constexpr int kStripBytes = kTilePanels * kPanelBytes, kQueryBytes = Config::kPanels * kPanelBytes;
  static constexpr int kKeyBytes = kTilePanels * kQueryBytes;
  static constexpr int kOwnRows = kGroupRows / kParts;
  static constexpr int kSumPitch = kNumbers * 2 + 16;  // rows differ in banks
  static constexpr int kSumBytes = kAlone ? 0 : kGroupRows * kSumPitch;
  static constexpr int kAddingWarps = 3;
  static constexpr int kToldRows = kOwnRows < 16 ? kOwnRows : 16;         // of a warp's 16, that a block is told
  static constexpr int kOwnThreads = (kOwnRows < 16 ? 4 : 2) * kOwnRows;  // that have one of the block's rows, or two
  static constexpr int kWarpRows = kGroupRows / kWarps, kPartRows = kGroupRows + 8;  // parts differ in banks
  static constexpr int kProductBytes = kAlone ? 0 : kParts * kPartRows * 4;

  uint64 full_keys[kKeyStages], empty_keys[kKeyStages];
  uint64 full_weights[kStages], empty_weights[kStages];
  uint64 full_gradients[kStages], empty_gradients[kStages];  // and queries
  uint64 products[kStages][kWarps], scores[kStages];
  uint64 sums[kStages], read_sums[kStages];

  static ONEPASS_FUNCTION uint32 weights(char* dynamic, int stage) { return first_tile(dynamic) + stage * kStripBytes; }
  static ONEPASS_FUNCTION uint32 gradients(char* dynamic, int stage) { return weights(dynamic, kStages + stage); }
  static ONEPASS_FUNCTION uint32 queries(char* dynamic, int stage) {
    return gradients(dynamic, kStages) + stage * kQueryBytes;
  }
  static ONEPASS_FUNCTION uint32 own_keys(char* dynamic, int stage) {
    return queries(dynamic, kStages) + stage * kKeyBytes;
  }
  // What this block has of the queries' gradients, and what all have of those of its own rows.
  static ONEPASS_FUNCTION uint32 sum(char* dynamic, int stage, int row) {
    return own_keys(dynamic, kKeyStages) + stage * kSumBytes + row * kSumPitch;
  }
  static ONEPASS_FUNCTION uint32 told(char* dynamic, int stage, int part, int row) {
    return sum(dynamic, kStages + stage, part * kOwnRows + row);
  }
  // What all blocks have of rows' Σ weight · gradient.
  static ONEPASS_FUNCTION uint32 product(char* dynamic, int stage, int part, int row) {
    return told(dynamic, kStages, 0, 0) + stage * kProductBytes + (part * kPartRows + row) * 4;
  }

  ONEPASS_FUNCTION void expect_products(int stage, int warp) {
    arrive_and_expect(&products[stage][warp], kParts * kWarpRows * 4);
  }
  ONEPASS_FUNCTION void expect_sums(int stage) { arrive_and_expect(&sums[stage], kSumBytes - kOwnRows * kSumPitch); }
  ONEPASS_FUNCTION void open() {
    for (int i = 0; i < kKeyStages; ++i) open_mailbox(&full_keys[i], 1), open_mailbox(&empty_keys[i], 1);
    for (int i = 0; i < kStages; ++i) {
      open_mailbox(&full_weights[i], 1), open_mailbox(&empty_weights[i], kWarps);
      open_mailbox(&full_gradients[i], 1), open_mailbox(&empty_gradients[i], 1);
      open_mailbox(&scores[i], kWarps);
      if constexpr (kAlone) continue;
      for (int warp = 0; warp < kWarps; ++warp) open_mailbox(&products[i][warp], 1), expect_products(i, warp);
      open_mailbox(&sums[i], 1 + kOwnThreads), expect_sums(i);
      open_mailbox(&read_sums[i], kAddingWarps * (32 + kParts - 1));
    }
    let_cluster_see_mailboxes();
  }
};

// The strips of all batches are shared evenly, in order, wherever a batch begins; a batch has those of one group of
// rows, then those of the next.
struct shared_strips {
  int of_group, of_batch, each, more;  // the first `more` clusters have one more than `each`

  explicit ONEPASS_FUNCTION shared_strips(const score_gradient_arguments& a)
      : of_group((a.rows + kGroupRows - 1) / kGroupRows),
        of_batch(a.group * of_group),
        each(a.batches * of_batch / a.clusters),
        more(a.batches * of_batch % a.clusters) {}
  ONEPASS_FUNCTION int first_of(int cluster) const { return each * cluster + (cluster < more ? cluster : more); }
  ONEPASS_FUNCTION int cluster_of(int strip) const {
    const int of_more = more * (each + 1);
    return strip < of_more ? strip / (each + 1) : more + (strip - of_more) / each;
  }
  // A cluster's part of a batch that it shares: of the one that it begins with, or of another.
  ONEPASS_FUNCTION int part_of(int cluster, int batch) const {
    return 2 * cluster + (first_of(cluster) / of_batch == batch ? 0 : 1);
  }
};

// A cluster's strips, one by one.
template <class Config>
class strip_walk {
 public:
  explicit ONEPASS_FUNCTION strip_walk(const score_gradient_arguments& a) : a_(a), all_(a) {
    const int cluster = static_cast<int>(blockIdx.x) / Config::kCluster;
    first_ = at_ = all_.first_of(cluster), end_ = all_.first_of(cluster + 1);
    batch_ = at_ / all_.of_batch;
    place_ = {batch_ / a.inner, batch_ % a.inner, at_ % all_.of_batch / all_.of_group};
    row_ = at_ % all_.of_group * kGroupRows;
  }
  ONEPASS_FUNCTION bool is_done() const { return at_ == end_; }
  ONEPASS_FUNCTION void next() {
    ++at_, row_ += kGroupRows;
    if (row_ < a_.rows) return;
    row_ = 0;
    if (++place_.group < a_.group) return;
    place_.group = 0, ++batch_;
    if (++place_.inner == a_.inner) place_.inner = 0, ++place_.outer;
  }
  ONEPASS_FUNCTION bool is_first() const { return at_ == first_; }
  ONEPASS_FUNCTION bool opens_batch() const { return is_first() || (row_ == 0 && place_.group == 0); }
  ONEPASS_FUNCTION bool closes_batch() const {
    return at_ + 1 == end_ || (row_ + kGroupRows >= a_.rows && place_.group + 1 == a_.group);
  }
  ONEPASS_FUNCTION bool shares_batch() const {
    return first_ > batch_ * all_.of_batch || end_ < (batch_ + 1) * all_.of_batch;
  }
  ONEPASS_FUNCTION batch_place place() const { return place_; }
  ONEPASS_FUNCTION int batch() const { return batch_; }
  ONEPASS_FUNCTION int row() const { return row_; }
  ONEPASS_FUNCTION int64 row_of_all() const { return (int64{batch_} * a_.group + place_.group) * a_.rows + row_; }
  // The block's first.
  static ONEPASS_FUNCTION int key() { return cluster_rank() * Config::kTile; }
  ONEPASS_FUNCTION int part() const { return all_.part_of(static_cast<int>(blockIdx.x) / Config::kCluster, batch_); }

 private:
  const score_gradient_arguments& a_;
  const shared_strips all_;
  int first_, at_, end_, batch_, row_;
  batch_place place_;
};

// What one thread does: all strips, where there is room, and each batch's keys.
template <class Config>
ONEPASS_FUNCTION void bring_strips(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                                   char* dynamic) {
  using layout = score_gradient_shared<Config>;
  const int key = strip_walk<Config>::key();
  const auto bring_strip = [&](uint32 to, const tensor_map& map, batch_steps step, batch_place at, int row,
                               uint64* box) {
    for (int i = 0; i < layout::kTilePanels; ++i)
      bring_tile(to + i * kPanelBytes, map, key + i * 64, row, at.group * step.group, at.inner * step.inner,
                 at.outer * step.outer, shared_address(box));
  };
  ring_position<layout::kStages> ring;
  ring_position<layout::kKeyStages> keys;
  for (strip_walk<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    const int stage = ring.stage;
    uint64* box = &shared.full_weights[stage];
    wait_for_mail(&shared.empty_weights[stage], ring.phase ^ 1);
    arrive_and_expect(box, layout::kStripBytes);
    bring_strip(layout::weights(dynamic, stage), a.weights, a.step_weights, at.place(), at.row(), box);
    box = &shared.full_gradients[stage];
    wait_for_mail(&shared.empty_gradients[stage], ring.phase ^ 1);
    arrive_and_expect(box, layout::kStripBytes + layout::kQueryBytes);
    bring_strip(layout::gradients(dynamic, stage), a.gradients, a.step_gradients, at.place(), at.row(), box);
    bring_rows<Config::kPanels>(layout::queries(dynamic, stage), a.queries, a.step_queries, at.place(), at.row(),
                                shared_address(box));
    if (!at.opens_batch()) continue;
    box = &shared.full_keys[keys.stage];
    wait_for_mail(&shared.empty_keys[keys.stage], keys.phase ^ 1);
    arrive_and_expect(box, layout::kKeyBytes);
    for (int i = 0; i < layout::kTilePanels; ++i)
      bring_rows<Config::kPanels>(layout::own_keys(dynamic, keys.stage) + i * layout::kQueryBytes, a.keys, a.step_keys,
                                  {at.place().outer, at.place().inner, 0}, key + i * 64, shared_address(box));
    keys.next();
  }
}

ONEPASS_END
