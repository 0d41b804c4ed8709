// Backward of lines that begin with `scores` and end in softmax, whose other words mask or scale (sm_90a): weights and
// their gradients cross memory once, and nothing of their size is written.
//
// A cluster has a batch's keys, kTile in each block, past which the rows of weights pass in strips of 64. Of a strip a
// block has its part of each row's Σ weight · gradient, which it tells the others; from all of them and what it still
// holds come the scores' gradients, in place of those of the weights in shared memory, and with them both products: of
// all strips for the keys, and of the block's keys for the strip's queries, of which each block adds up all parts for
// its own rows. The sums of the next strip are on their way while this one is multiplied. No sum depends on the order
// of blocks.
//
// Config:
//   kX        storage type throughout: bf16 or f16
//   kPanels   64s of the queries' numbers, begun ones too: 1 or 2
//   kTile     keys of a block: 256, or 128 where there are two panels
//   kCluster  blocks that share a batch's keys, a power of 2, at least 2: what they mail is a cluster's
#pragma once

#include "onepass/skeleton/score_strips.cuda.h"

ONEPASS_BEGIN

// A warp's eight rows of the block's part of a strip; a thread has a lane of kOwn of them.
template <class Config>
class strip_rows {
 public:
  using layout = score_gradient_shared<Config>;
  using memory_of = memory<Config::kX, 8, 8>;
  static constexpr int kRowThreads = Config::kTile / 8, kAtOnce = 32 / kRowThreads, kOwn = layout::kWarpRows / kAtOnce;

  ONEPASS_FUNCTION strip_rows()
      : warp_(static_cast<int>(threadIdx.x) / 32), lane_(static_cast<int>(threadIdx.x) % 32) {}

  ONEPASS_FUNCTION void load_weights(const char* strip) { load(weights_, strip); }
  ONEPASS_FUNCTION void load_gradients(const char* strip) { load(gradients_, strip); }
  // The row of the strip of which this thread, as three others, has a number below.
  ONEPASS_FUNCTION int shared_row() const {
    return warp_ * layout::kWarpRows + lane_ / 4 % kOwn * kAtOnce + lane_ / kRowThreads;
  }
  // Σ weight · gradient of four of the warp's rows: of the first in even threads, of the last in odd ones.
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
      const auto weights = memory_of::template numbers_of<float>(weights_[i]),
                 gradients = memory_of::template numbers_of<float>(gradients_[i]);
      memory_of::store(strip + place(i), weights * (gradients - decltype(weights)(of_row)), 8);
    }
  }

 private:
  // Of shared_row.
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
  ONEPASS_FUNCTION int place(int i) const {
    const int row = warp_ * layout::kWarpRows + i * kAtOnce + lane_ / kRowThreads, piece = lane_ % kRowThreads;
    return piece / 8 * kPanelBytes + row * 128 + place_of_piece(piece % 8, row) * 16;
  }
  ONEPASS_FUNCTION void load(typename memory_of::buffer (&to)[kOwn], const char* strip) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i] = memory_of::load_written(strip + place(i), 8);
  }

  const int warp_, lane_;
  typename memory_of::buffer weights_[kOwn], gradients_[kOwn];
};

// What a thread's warpgroup multiplies: half of the block's keys, and half of the numbers of a strip's queries.
template <class Config>
class strip_products {
 public:
  using layout = score_gradient_shared<Config>;
  static constexpr int kKeyPanels = layout::kTilePanels / 2, kHalf = layout::kNumbers / 2;

  ONEPASS_FUNCTION explicit strip_products(uint32 keys) : keys_(keys), group_(group_number()) {}

  // scores: their gradients; both strips.
  ONEPASS_FUNCTION void begin(uint32 scores, uint32 queries) {
    begin_products();
#pragma unroll
    for (int m = 0; m < kKeyPanels; ++m) {
      const uint64 turned = turned_tile_descriptor(scores + (group_ * kKeyPanels + m) * kPanelBytes),
                   of_queries = turned_tile_descriptor(queries);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_product<Config::kX, layout::kNumbers, 1, 1>(of_keys_[m], turned + 128 * step, of_queries + 128 * step,
                                                        true);
    }
    forget(of_rows_);
    const uint32 own = keys_ + (Config::kPanels == 2 ? group_ * kPanelBytes : group_ * 64);
#pragma unroll
    for (int panel = 0; panel < layout::kTilePanels; ++panel) {
      const uint64 rows = tile_descriptor(scores + panel * kPanelBytes),
                   keys = turned_tile_descriptor(own + panel * layout::kQueryBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        add_product<Config::kX, kHalf, 0, 1>(of_rows_, rows + 2 * step, keys + 128 * step, panel + step > 0);
    }
    close_products();
  }
  // Where the blocks that have the rows read them: those hear of it. `to`: the strip's first.
  ONEPASS_FUNCTION void show_rows(char* to, uint64* box) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* row = to + (row_of_products() + 8 * i) * layout::kSumPitch +
                  (group_ * kHalf + static_cast<int>(threadIdx.x) % 4 * 2) * 4;
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j)
        *reinterpret_cast<uint2*>(row + j * 32) = {__float_as_uint(of_rows_[4 * j + 2 * i]),
                                                   __float_as_uint(of_rows_[4 * j + 2 * i + 1])};
    }
    __syncwarp();
    constexpr int kBlocks = layout::kOwnRows < 16 ? 16 / layout::kOwnRows : 1;  // that have rows of this warp's 16
    const int lane = static_cast<int>(threadIdx.x) % 32,
              first = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16;
    if (lane < kBlocks) arrive_in_block(box, first / layout::kOwnRows + lane);
  }
  // From the batch's key number `first` on.
  ONEPASS_FUNCTION void store_keys(const score_gradient_arguments& a, int batch, int first) const {
#pragma unroll
    for (int m = 0; m < kKeyPanels; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first + (group_ * kKeyPanels + m) * 64 + row_of_products() + 8 * i;
        if (key >= a.columns) continue;
        auto* to = static_cast<uint16*>(a.keys_gradient) + (int64{batch} * a.columns + key) * a.depth;
#pragma unroll
        for (int j = 0; j < layout::kNumbers / 8; ++j) {
          const int column = 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
          if (column < a.depth)
            *reinterpret_cast<uint32*>(to + column) = pair_to_storage<Config::kX>(
                of_keys_[m][4 * j + 2 * i] * a.factor, of_keys_[m][4 * j + 2 * i + 1] * a.factor);
        }
      }
    }
  }

 private:
  const uint32 keys_;
  const int group_;
  float of_keys_[kKeyPanels][layout::kNumbers / 2] = {};
  float of_rows_[kHalf / 2];
};

// Of this block's own rows of a strip, of which `rows` exist in its group: the sum over all blocks, to memory.
// `own`: the first of them, in each.
template <class Config>
ONEPASS_FUNCTION void store_own_rows(const score_gradient_arguments& a, uint32 own, int64 first, int rows) {
  using layout = score_gradient_shared<Config>;
  constexpr int kPairs = layout::kNumbers / 2, kAll = layout::kOwnRows * kPairs;
#pragma unroll
  for (int first_at = 0; first_at < kAll; first_at += layout::kThreads) {
    const int at = first_at + static_cast<int>(threadIdx.x);
    if (kAll % layout::kThreads != 0 && at >= kAll) return;
    const int row = at / kPairs, column = at % kPairs * 2;
    numbers<float, 2> part[layout::kParts];
#pragma unroll
    for (int i = 0; i < layout::kParts; ++i)
      part[i] = load_from_block(in_block(own + row * layout::kSumPitch + column * 4, i));
#pragma unroll
    for (int i = 1; i < layout::kParts; ++i) part[0].v[0] += part[i].v[0], part[0].v[1] += part[i].v[1];
    if (row < rows && column < a.depth)
      *reinterpret_cast<uint32*>(static_cast<uint16*>(a.rows_gradient) + (first + row) * a.depth + column) =
          pair_to_storage<Config::kX>(part[0].v[0] * a.factor, part[0].v[1] * a.factor);
  }
}

template <class Config>
ONEPASS_FUNCTION void take_strips(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                                  char* dynamic) {
  using layout = score_gradient_shared<Config>;
  const batch_strips<Config> of(a);
  const int rank = cluster_rank(), warp = static_cast<int>(threadIdx.x) / 32;
  strip_rows<Config> rows;
  strip_products<Config> products(layout::own_keys(dynamic));
  ring_position<layout::kStages> at;

  // What this block has of a strip's products goes to all blocks; two threads tell each.
  const auto take = [&](int strip) {
    wait_for_mail(&shared.full_weights[at.stage], at.phase);
    rows.load_weights(at_shared(dynamic, layout::weights(dynamic, at.stage)));
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.empty_weights[at.stage]);
    wait_for_mail(&shared.full_gradients[at.stage], at.phase);
    rows.load_gradients(at_shared(dynamic, layout::gradients(dynamic, at.stage)));
    const numbers<float, 4> own = rows.products();
    const int lane = static_cast<int>(threadIdx.x) % 32, block = lane / 2;
    const uint32 to = layout::product(dynamic, strip % 2, rank, warp * layout::kWarpRows + lane % 2 * 4),
                 box = shared_address(&shared.products[strip % 2][warp]);
    if (block < Config::kCluster) mail(in_block(to, block), in_block(box, block), own);
  };
  const auto product_of_all = [&](int strip) {
    wait_for_mail(&shared.products[strip % 2][warp], strip / 2 % 2);
    float of = 0.0f;
#pragma unroll
    for (int k = 0; k < Config::kCluster; k += 4) {
      const int part = k + static_cast<int>(threadIdx.x) % 4;
      if (part < Config::kCluster)
        of += *reinterpret_cast<const float*>(
            at_shared(dynamic, layout::product(dynamic, strip % 2, part, rows.shared_row())));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.expect_products(strip % 2, warp);
    return sum_of_four(of);
  };
  const auto store_rows = [&](int strip) {
    wait_for_mail(&shared.sums[strip % 2], strip / 2 % 2);
    const int own = rank * layout::kOwnRows, row = of.row(strip) + own;
    const int64 first = (int64{of.number} * a.group + strip / of.of_group) * a.rows + row;
    store_own_rows<Config>(a, layout::sum(dynamic, strip % 2, own), first, a.rows - row);
  };

  wait_for_mail(&shared.keys, 0);
  if (of.count > 0) take(0);
#pragma unroll 1
  for (int strip = 0; strip < of.count; ++strip) {
    // A block that tells of strip s + 2 has read what others told and showed of strip s, and they wait for that before
    // they write there again: two places suffice.
    if (strip > 0) store_rows(strip - 1);
    const int stage = at.stage;
    const uint32 scores = layout::gradients(dynamic, stage);
    rows.store_scores(at_shared(dynamic, scores), product_of_all(strip));
    let_copies_see_shared_writes();
    meet_in_group<layout::kThreads>(1);
    products.begin(scores, layout::queries(dynamic, stage));
    at.next();
    if (strip + 1 < of.count) take(strip + 1);
    wait_for_products<0>();
    if (threadIdx.x % kGroupThreads == 0) arrive(&shared.empty_gradients[stage]);
    products.show_rows(at_shared(dynamic, layout::sum(dynamic, strip % 2, 0)), &shared.sums[strip % 2]);
  }
  if (of.count > 0) store_rows(of.count - 1);
  arrive_at_cluster();
  products.store_keys(a, of.number, of.key);
  wait_for_cluster();  // what this block shows may be read until here
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
  if (threadIdx.x < layout::kThreads) {
    take_registers<240>();
    take_strips<Config>(a, shared, dynamic);
  } else {
    give_registers<24>();
    if (threadIdx.x == layout::kThreads) bring_strips<Config>(a, shared, dynamic);
  }
}

ONEPASS_END
