// Backward of lines that begin with `scores` and end in softmax, whose other words mask or scale (sm_90a): weights and
// their gradients cross memory once, and nothing of their size is written.
//
// A cluster has a batch's keys, kTile in each block, past which the rows of weights pass in strips of 64. Of a strip a
// block has its part of each row's Σ weight · gradient, which it tells the others; from all of them and what it still
// holds come the scores' gradients, in place of those of the weights in shared memory. One warpgroup has both products
// with them: of all strips for the keys, and of the block's keys for the strip's queries, whose parts blocks tell each
// other, and three warps of each add up for its own rows. Two warpgroups make the next strip's scores meanwhile. Strips
// are shared evenly among clusters, and what several have of a batch's keys a second kernel adds up. Few keys one block
// has alone, and its sums are all there is. No sum depends on the order of blocks.
//
// Config:
//   kX        storage type throughout: bf16 or f16
//   kPanels   64s of the queries' numbers, begun ones too: 1 or 2
//   kTile     keys of a block: 128, or 256 where there is one panel
//   kCluster  blocks that share a batch's keys, a power of 2
//   kStages   strips in shared memory, 2 where several blocks share keys
#pragma once

#include "onepass/kernel/attention/tiles_sm90.cuda.h"

ONEPASS_BEGIN

// How the blocks of a cluster tell each other what each has of a strip's queries' gradients (sm_90a): copies bring it
// to the blocks that have the rows, which add it up. What is a block's own its threads write to where the others'
// comes. There each thread says itself what it has written and read: compute-sanitizer knows no order through a warp's
// barrier.
//
// How many bytes pass between blocks is what backward takes from 128 numbers on (docs/measured-facts.md), so a number
// takes 16 bits: it is so many steps, of which the largest number of its row and block has 32766, and a step's size
// follows the row. At most 2^-16 of the largest is rounded away; rounding the scores' gradients to bfloat16 or float16
// costs every number of the row more.

// How strips of weights, of their gradients and of queries pass the keys that a cluster has, and what its blocks have
// in shared memory for that (sm_90a). Config: see the top.

// Strips of weights and of their gradients, with the queries beside, as they pass; stages are those of strips that
// follow each other, whatever a block has of them.
template <class Config>
struct score_gradient_shared {
  static constexpr probabilities_backward_shape kShape{Config::kPanels, Config::kTile, Config::kCluster,
                                                       Config::kStages};
  static constexpr int kParts = Config::kCluster, kTilePanels = Config::kTile / 64, kNumbers = kShape.head_dim();
  static constexpr bool kAlone = kShape.is_alone();  // nobody is told anything
  static constexpr int kStages = Config::kStages, kKeyStages = kShape.key_stages();
  static_assert(kAlone || kStages == 2, "blocks tell each other of a strip and the next");
  static constexpr int kWarps = 8;  // that make scores' gradients
  static constexpr int kStripBytes = kShape.strip_bytes(), kQueryBytes = kShape.query_bytes();
  static constexpr int kKeyBytes = kShape.key_bytes();
  static constexpr int kOwnRows = kWarpgroupRows / kParts;
  static constexpr int kSumPitch = kShape.sum_pitch(), kSumBytes = kShape.sum_bytes();
  static constexpr int kAddingWarps = 3;
  static constexpr int kToldRows = kOwnRows < 16 ? kOwnRows : 16;         // of a warp's 16, that a block is told
  static constexpr int kOwnThreads = (kOwnRows < 16 ? 4 : 2) * kOwnRows;  // that have one of the block's rows, or two
  static constexpr int kWarpRows = kWarpgroupRows / kWarps, kPartRows = kShape.kPartialRows;
  static constexpr int kProductBytes = kShape.delta_bytes();

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
      : of_group((a.rows + kWarpgroupRows - 1) / kWarpgroupRows),
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
    row_ = at_ % all_.of_group * kWarpgroupRows;
  }
  ONEPASS_FUNCTION bool is_done() const { return at_ == end_; }
  ONEPASS_FUNCTION void next() {
    ++at_, row_ += kWarpgroupRows;
    if (row_ < a_.rows) return;
    row_ = 0;
    if (++place_.group < a_.group) return;
    place_.group = 0, ++batch_;
    if (++place_.inner == a_.inner) place_.inner = 0, ++place_.outer;
  }
  ONEPASS_FUNCTION bool is_first() const { return at_ == first_; }
  ONEPASS_FUNCTION bool opens_batch() const { return is_first() || (row_ == 0 && place_.group == 0); }
  ONEPASS_FUNCTION bool closes_batch() const {
    return at_ + 1 == end_ || (row_ + kWarpgroupRows >= a_.rows && place_.group + 1 == a_.group);
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
      bring_tile(to + i * kAtomBytes, map, key + i * 64, row, at.group * step.group, at.inner * step.inner,
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

inline constexpr float kSteps = 32766.0f, kNoStep = 8421376.0f;  // 2^23 + 2^15, in whose low bits stands what is added

ONEPASS_FUNCTION uint32 pair_to_steps(float x, float y, float steps_of_one) {
  return __byte_perm(__float_as_uint(fmaf(x, steps_of_one, kNoStep)), __float_as_uint(fmaf(y, steps_of_one, kNoStep)),
                     0x5410);
}
template <int kUpper>
ONEPASS_FUNCTION float steps_of(uint32 pair) {
  return __uint_as_float(__byte_perm(pair, 0x4b000000, kUpper ? 0x7632 : 0x7610)) - kNoStep;
}

// A warp's 16 rows of products, to the blocks that have them.
template <class Config>
ONEPASS_FUNCTION void tell_rows(const float (&of)[score_gradient_shared<Config>::kNumbers / 2],
                                score_gradient_shared<Config>& shared, char* dynamic, int stage) {
  using layout = score_gradient_shared<Config>;
  const int lane = static_cast<int>(threadIdx.x) % 32, rank = cluster_rank();
  bool has_own = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_strip = row_of_products() + 8 * i;
    const bool is_own = of_strip / layout::kOwnRows == rank;
    has_own |= is_own;
    char* row = at_shared(dynamic, is_own ? layout::told(dynamic, stage, rank, of_strip % layout::kOwnRows)
                                          : layout::sum(dynamic, stage, of_strip));
    float largest = 1e-30f;  // a step's reciprocal is finite; infinity or a NaN makes the block's part of the row NaN
#pragma unroll
    for (int j = 2 * i; j < layout::kNumbers / 2; j += 4)
      largest = max_number(max_number(largest, fabsf(of[j])), fabsf(of[j + 1]));
    largest = largest_of_four(largest);
    const float step = largest * (1.0f / kSteps), steps_of_one = reciprocal_number(step);
#pragma unroll
    for (int j = 0; j < layout::kNumbers / 8; ++j)
      reinterpret_cast<uint32*>(row)[4 * j + lane % 4] =
          pair_to_steps(of[4 * j + 2 * i], of[4 * j + 2 * i + 1], steps_of_one);
    if (lane % 4 == 0) *reinterpret_cast<float*>(row + layout::kNumbers * 2) = step;
  }
  if (has_own) arrive(&shared.sums[stage]);
  hand_shared_to_copies();
  __syncwarp();
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane * layout::kToldRows, block = row / layout::kOwnRows;
  if (lane < 16 / layout::kToldRows && block != rank)
    tell_bytes(in_block(layout::told(dynamic, stage, rank, row % layout::kOwnRows), block),
               layout::sum(dynamic, stage, row), layout::kToldRows * layout::kSumPitch,
               in_block(shared_address(&shared.sums[stage]), block));
}

// The queries' gradients of this block's own rows of all strips: the sum of what all blocks tell, to memory.
template <class Config>
ONEPASS_FUNCTION void add_rows(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                               char* dynamic) {
  using layout = score_gradient_shared<Config>;
  constexpr int kEights = layout::kNumbers / 8, kThreads = layout::kAddingWarps * 32;
  static_assert(3 * kWarpgroupThreads % kThreads == 0, "the fourth warpgroup's first warps");
  const int thread = static_cast<int>(threadIdx.x) % kThreads, lane = thread % 32, column = thread % kEights * 8,
            rank = cluster_rank(), own = rank * layout::kOwnRows;
  ring_position<layout::kStages> ring;
#pragma unroll 1
  for (strip_walk<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    wait_for_mail(&shared.sums[ring.stage], ring.phase);
    if (thread == 0) shared.expect_sums(ring.stage);
#pragma unroll 1
    for (int row = thread / kEights; row < layout::kOwnRows; row += kThreads / kEights) {
      numbers<float, 8> sum = plus::none<float, 8>();
#pragma unroll 4
      for (int part = 0; part < layout::kParts; ++part) {
        const char* from = at_shared(dynamic, layout::told(dynamic, ring.stage, part, row));
        const float step = *reinterpret_cast<const float*>(from + layout::kNumbers * 2);
        const uint4 pairs = *reinterpret_cast<const uint4*>(from + column * 2);
        const uint32 of[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum.v[2 * c] = fmaf(steps_of<0>(of[c]), step, sum.v[2 * c]);
          sum.v[2 * c + 1] = fmaf(steps_of<1>(of[c]), step, sum.v[2 * c + 1]);
        }
      }
      if (own + row < a.rows - at.row() && column < a.depth) {
        const auto pair = [&](int c) {
          return pair_to_storage<Config::kX>(sum.v[2 * c] * a.factor, sum.v[2 * c + 1] * a.factor);
        };
        *reinterpret_cast<uint4*>(static_cast<uint16*>(a.rows_gradient) + (at.row_of_all() + own + row) * a.depth +
                                  column) = {pair(0), pair(1), pair(2), pair(3)};
      }
    }
    hand_shared_to_copies();
    arrive(&shared.read_sums[ring.stage]);
    __syncwarp();
    if (lane < Config::kCluster && lane != rank) arrive_in_block(&shared.read_sums[ring.stage], lane);
  }
}

// A warp's eight rows of the block's part of a strip; a thread has a lane of kOwn of them.
template <class Config>
class strip_rows {
 public:
  using layout = score_gradient_shared<Config>;
  using memory_of = memory<Config::kX, 8, 8>;
  static constexpr int kRowThreads = Config::kTile / 8, kAtOnce = 32 / kRowThreads, kOwn = layout::kWarpRows / kAtOnce;

  explicit ONEPASS_FUNCTION strip_rows(const score_gradient_arguments& a)
      : warp_(static_cast<int>(threadIdx.x) / 32 % layout::kWarps),
        lane_(static_cast<int>(threadIdx.x) % 32),
        nothing_(a.rows < 0 ? 1 : 0) {}

  ONEPASS_FUNCTION void load_weights(const char* strip) { load(weights_, strip); }
  ONEPASS_FUNCTION void load_gradients(const char* strip) { load(gradients_, strip); }
  // The row of the strip of which this thread, as three others, has a number below.
  ONEPASS_FUNCTION int shared_row() const {
    return warp_ * layout::kWarpRows + lane_ / 4 % kOwn * kAtOnce + lane_ / kRowThreads;
  }
  // Σ weight · gradient of shared_row.
  ONEPASS_FUNCTION float product() const {
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
      const bool upper = (lane_ & bit) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float kept = upper ? of[i + half] : of[i], given = upper ? of[i] : of[i + half];
        of[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
      }
    }
    return sum_of_four(of[0]);
  }
  // The same of four of the warp's rows: of the first in even threads, of the last in odd ones.
  ONEPASS_FUNCTION numbers<float, 4> products() const {
    const float own = product();
    numbers<float, 4> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = lane_ % 2 * 4 + j;
      four.v[j] = __shfl_sync(0xffffffffu, own, row / kAtOnce * 4 + row % kAtOnce * kRowThreads);
    }
    return four;
  }

  // product: of shared_row, of all parts. The scores' gradients take the place of those of the weights.
  ONEPASS_FUNCTION void store_scores(char* strip, float product) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float of_row = __shfl_sync(0xffffffffu, product, 4 * i + lane_ / kRowThreads * kRowThreads);
      const auto weights = unpacked_again(weights_[i]), gradients = unpacked_again(gradients_[i]);
      memory_of::store(strip + place(i), weights * (gradients - decltype(weights)(of_row)), 8);
    }
  }

 private:
  ONEPASS_FUNCTION int place(int i) const {
    const int row = warp_ * layout::kWarpRows + i * kAtOnce + lane_ / kRowThreads, piece = lane_ % kRowThreads;
    return piece / 8 * kAtomBytes + row * 128 + place_of_piece(piece % 8, row) * 16;
  }
  ONEPASS_FUNCTION void load(typename memory_of::buffer (&to)[kOwn], const char* strip) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i] = memory_of::load_written(strip + place(i), 8);
  }

  // The compiler would keep what products() unpacked, in twice the registers, if it knew that nothing has changed.
  ONEPASS_FUNCTION pack<float, 8> unpacked_again(typename memory_of::buffer of) const {
    typename memory_of::buffer again;
#pragma unroll
    for (int i = 0; i < 4; ++i) again.pairs[i] = of.pairs[i] >> nothing_;
    return memory_of::template numbers_of<float>(again);
  }

  const int warp_, lane_;
  const uint32 nothing_;
  typename memory_of::buffer weights_[kOwn], gradients_[kOwn];
};

// What the block's scores' gradients are multiplied with: the strip's queries for the keys, and these for those.
template <class Config>
class strip_products {
 public:
  using layout = score_gradient_shared<Config>;
  static constexpr int kNumbers = layout::kNumbers;

  ONEPASS_FUNCTION void begin_batch(uint32 keys) {
    keys_ = keys;
#pragma unroll
    for (auto& panel : of_keys_) {
#pragma unroll
      for (float& number : panel) number = 0.0f;
    }
  }
  // scores: their gradients; both strips. Products for the rows are the first of two.
  ONEPASS_FUNCTION void begin(uint32 scores, uint32 queries) {
    forget(of_rows_);
    begin_products();
#pragma unroll
    for (int panel = 0; panel < layout::kTilePanels; ++panel) {
      const uint64 rows = tile_descriptor(scores + panel * kAtomBytes),
                   keys = turned_tile_descriptor(keys_ + panel * layout::kQueryBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_product<Config::kX, kNumbers, 0, 1>(of_rows_, rows + 2 * step, keys + 128 * step, panel + step > 0);
    }
    close_products();
#pragma unroll
    for (int panel = 0; panel < layout::kTilePanels; ++panel) {
      const uint64 turned = turned_tile_descriptor(scores + panel * kAtomBytes),
                   of_queries = turned_tile_descriptor(queries);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_product<Config::kX, kNumbers, 1, 1>(of_keys_[panel], turned + 128 * step, of_queries + 128 * step, true);
    }
    close_products();
  }
  ONEPASS_FUNCTION const auto& of_rows() const { return of_rows_; }
  // The strip's, of which `rows` exist in its group, where this block has all of their keys; `first`: in memory.
  ONEPASS_FUNCTION void store_rows(const score_gradient_arguments& a, int64 first, int rows) const {
    store_scaled(static_cast<uint16*>(a.rows_gradient) + first * a.depth, a, of_rows_, rows);
  }
  // The block's keys, of the walk's batch.
  ONEPASS_FUNCTION void store_keys(const score_gradient_arguments& a, const strip_walk<Config>& at) const {
#pragma unroll
    for (int panel = 0; panel < layout::kTilePanels; ++panel) {
      const int64 key = strip_walk<Config>::key() + panel * 64;
      const int keys = static_cast<int>(a.columns - key);
      if (at.shares_batch()) {
        store_part(a.key_parts + (int64{at.part()} * a.columns + key) * a.depth, a, of_keys_[panel], keys);
      } else {
        store_scaled(static_cast<uint16*>(a.keys_gradient) + (int64{at.batch()} * a.columns + key) * a.depth, a,
                     of_keys_[panel], keys);
      }
    }
  }

 private:
  // 64 rows, of which `rows` exist; a thread stores eight numbers, where products give it pairs.
  static ONEPASS_FUNCTION void store_scaled(uint16* to, const score_gradient_arguments& a,
                                            const float (&of)[kNumbers / 2], int rows) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 8, left = static_cast<int>(a.depth) - first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_products() + 8 * i;
#pragma unroll
      for (int j = 0; j < kNumbers / 8; j += 4) {
        uint32 pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          pairs[k] =
              pair_to_storage<Config::kX>(of[4 * (j + k) + 2 * i] * a.factor, of[4 * (j + k) + 2 * i + 1] * a.factor);
        exchange_words<1>(pairs);
        if (row < rows && 8 * j < left)
          *reinterpret_cast<uint4*>(to + row * a.depth + first + 8 * j) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
  static ONEPASS_FUNCTION void store_part(float* to, const score_gradient_arguments& a, const float (&of)[kNumbers / 2],
                                          int rows) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2, left = static_cast<int>(a.depth) - first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_products() + 8 * i;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kNumbers / 8; ++j) {
        if (8 * j < left)
          *reinterpret_cast<float2*>(to + row * a.depth + first + 8 * j) = {of[4 * j + 2 * i], of[4 * j + 2 * i + 1]};
      }
    }
  }

  uint32 keys_ = 0;
  float of_keys_[layout::kTilePanels][kNumbers / 2];
  float of_rows_[kNumbers / 2];
};

// The scores' gradients of all strips, for multiply_strips.
template <class Config>
ONEPASS_FUNCTION void make_scores(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                                  char* dynamic) {
  using layout = score_gradient_shared<Config>;
  const int rank = cluster_rank(), lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % layout::kWarps;
  strip_rows<Config> rows(a);
  ring_position<layout::kStages> ring;
  // What this block has of the warp's rows goes to all blocks; two threads tell each.
  const auto tell_products = [&] {
    if constexpr (layout::kAlone) return;
    const numbers<float, 4> own = rows.products();
    const int block = lane / 2;
    const uint32 to = layout::product(dynamic, ring.stage, rank, warp * layout::kWarpRows + lane % 2 * 4),
                 box = shared_address(&shared.products[ring.stage][warp]);
    if (block < Config::kCluster) mail(in_block(to, block), in_block(box, block), own);
  };
  const auto product_of_all = [&] {
    if constexpr (layout::kAlone) return rows.product();
    wait_for_mail(&shared.products[ring.stage][warp], ring.phase);
    float of = 0.0f;
#pragma unroll
    for (int k = 0; k < Config::kCluster; k += 4) {
      const int part = k + lane % 4;
      if (part < Config::kCluster)
        of += *reinterpret_cast<const float*>(
            at_shared(dynamic, layout::product(dynamic, ring.stage, part, rows.shared_row())));
    }
    __syncwarp();
    if (lane == 0) shared.expect_products(ring.stage, warp);
    return sum_of_four(of);
  };

  // A block that tells of strip s + 2 has heard of s + 1 from those that have read what it told of s: two places
  // suffice.
#pragma unroll 1
  for (strip_walk<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    wait_for_mail(&shared.full_weights[ring.stage], ring.phase);
    rows.load_weights(at_shared(dynamic, layout::weights(dynamic, ring.stage)));
    hand_shared_to_copies();
    __syncwarp();
    if (lane == 0) arrive(&shared.empty_weights[ring.stage]);
    char* gradients = at_shared(dynamic, layout::gradients(dynamic, ring.stage));
    wait_for_mail(&shared.full_gradients[ring.stage], ring.phase);
    rows.load_gradients(gradients);
    tell_products();
    rows.store_scores(gradients, product_of_all());
    hand_shared_to_copies();
    __syncwarp();
    if (lane == 0) arrive(&shared.scores[ring.stage]);
  }
}

template <class Config>
ONEPASS_FUNCTION void multiply_strips(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                                      char* dynamic) {
  using layout = score_gradient_shared<Config>;
  strip_products<Config> products;
  ring_position<layout::kStages> ring;
  ring_position<layout::kKeyStages> keys;

#pragma unroll 1
  for (strip_walk<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    if (at.opens_batch()) {
      products.begin_batch(layout::own_keys(dynamic, keys.stage));
      wait_for_mail(&shared.full_keys[keys.stage], keys.phase);
    }
    wait_for_mail(&shared.full_gradients[ring.stage], ring.phase);  // the queries
    wait_for_mail(&shared.scores[ring.stage], ring.phase);
    products.begin(layout::gradients(dynamic, ring.stage), layout::queries(dynamic, ring.stage));
    wait_for_products<1>();
    if constexpr (layout::kAlone) {
      products.store_rows(a, at.row_of_all(), a.rows - at.row());
    } else {
      wait_for_mail(&shared.read_sums[ring.stage], ring.phase ^ 1);
      tell_rows<Config>(products.of_rows(), shared, dynamic, ring.stage);
    }
    wait_for_products<0>();
    if (threadIdx.x == 0) arrive(&shared.empty_gradients[ring.stage]);
    if (!at.closes_batch()) continue;
    if (threadIdx.x == 0) arrive(&shared.empty_keys[keys.stage]);
    keys.next();
    products.store_keys(a, at);
  }
  if constexpr (!layout::kAlone) {  // until others have read what this block shows
    for (int i = 0; i < layout::kStages; ++i, ring.next()) wait_for_mail(&shared.read_sums[ring.stage], ring.phase ^ 1);
  }
}

template <class Config>
ONEPASS_FUNCTION void gradients_of_scores(const score_gradient_arguments& a) {
  using layout = score_gradient_shared<Config>;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ layout shared;
  if (threadIdx.x == 0) shared.open();
  arrive_at_cluster();
  wait_for_cluster();
  __syncthreads();
  wait_for_kernel_before();
  const int group = group_number();
  if (group == 0) {
    take_registers<224>();
    multiply_strips<Config>(a, shared, dynamic);
  } else if (group < 3) {
    give_registers<120>();
    make_scores<Config>(a, shared, dynamic);
  } else {
    give_registers<48>();
    if (threadIdx.x == 4 * kWarpgroupThreads - 1) bring_strips<Config>(a, shared, dynamic);
    if (!layout::kAlone && threadIdx.x < 3 * kWarpgroupThreads + 32 * layout::kAddingWarps)
      add_rows<Config>(a, shared, dynamic);
  }
}

// What clusters have of a batch that they share, in their order. Grid: (batches, quads of a batch's numbers).
template <dtype D>
ONEPASS_FUNCTION void add_key_parts(const score_gradient_arguments& a) {
  const int64 numbers_of_batch = a.columns * a.depth, at = (int64{blockIdx.y} * blockDim.x + threadIdx.x) * 4;
  const int batch = static_cast<int>(blockIdx.x);
  const shared_strips all(a);
  const int first = all.cluster_of(batch * all.of_batch), last = all.cluster_of((batch + 1) * all.of_batch - 1);
  wait_for_kernel_before();
  if (at >= numbers_of_batch || first == last) return;
  numbers<float, 4> sum = plus::none<float, 4>();
  for (int cluster = first; cluster <= last; ++cluster)
    sum = plus()(sum, load_numbers<4>(a.key_parts + all.part_of(cluster, batch) * numbers_of_batch + at));
  *reinterpret_cast<uint2*>(static_cast<uint16*>(a.keys_gradient) + batch * numbers_of_batch + at) = {
      pair_to_storage<D>(sum.v[0] * a.factor, sum.v[1] * a.factor),
      pair_to_storage<D>(sum.v[2] * a.factor, sum.v[3] * a.factor)};
}

ONEPASS_END
