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

#include "onepass/skeleton/told_rows.cuda.h"

ONEPASS_BEGIN

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
    return piece / 8 * kPanelBytes + row * 128 + place_of_piece(piece % 8, row) * 16;
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
      const uint64 rows = tile_descriptor(scores + panel * kPanelBytes),
                   keys = turned_tile_descriptor(keys_ + panel * layout::kQueryBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_product<Config::kX, kNumbers, 0, 1>(of_rows_, rows + 2 * step, keys + 128 * step, panel + step > 0);
    }
    close_products();
#pragma unroll
    for (int panel = 0; panel < layout::kTilePanels; ++panel) {
      const uint64 turned = turned_tile_descriptor(scores + panel * kPanelBytes),
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
        turn_in_four(pairs);
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
    if (threadIdx.x == 4 * kGroupThreads - 1) bring_strips<Config>(a, shared, dynamic);
    if (!layout::kAlone && threadIdx.x < 3 * kGroupThreads + 32 * layout::kAddingWarps)
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
