// Backward of lines with `scores`, softmax and `values` (sm_90a), in two kernels that write nothing of the scores'
// size: one has rows of queries, past which keys and values pass, and gives their gradients and those of the words'
// tensors; one has keys and values, past which the rows pass and their results' gradients. Each makes the scores again.
// No sum depends on the order of blocks. (Dao, "FlashAttention-2", 2023, has one kernel whose blocks add to the same
// rows.)
//
// Σ weight · gradient of a row, which softmax's gradient needs, is Σ result · its gradient, since the words behind
// softmax multiply; the first kernel leaves it for the second.
//
// Config beside score_tiles.cuda.h: kValueSteps, sixteens of the values' numbers; kHanded, tiles that a warpgroup hands
// over to its own matrix unit; kWantsRows, kWantsKeys, kWantsValues, what of all this is wanted. `behind` is forward's,
// with the tensors whose gradients are wanted.
#pragma once

#include "onepass/skeleton/score_tiles.cuda.h"

ONEPASS_BEGIN

struct attention_gradient_arguments {
  tensor_map gradients;  // of the result, [outer, inner, group, rows, value_depth]
  batch_steps step_gradients;
  const void* result;  // [all rows, value_depth]
  float* products;     // Σ result · its gradient, of each row
  void *rows_gradient, *keys_gradient, *values_gradient;
  int64 depth;
  attention_arguments of;
};

// A group's own 64 rows or keys, and those that pass by: the first of each two are multiplied with the first, the
// second with the second.
template <class Config>
struct gradient_shared {
  static constexpr int kAllPanels = Config::kPanels + Config::kValuePanels;
  static constexpr int kOwnBytes = kAllPanels * kPanelBytes, kOwnFirstBytes = Config::kPanels * kPanelBytes;
  static constexpr int kTileBytes = kAllPanels * Config::kKeys * 128,
                       kTileFirstBytes = Config::kPanels * Config::kKeys * 128;
  static constexpr int kHandedBytes = Config::kHanded * kPanelBytes;

  uint64 mine[Config::kGroups];
  uint64 full[Config::kStages], empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 own(char* dynamic, int group) {
    return ((shared_address(dynamic) + 1023) & ~1023u) + group * kOwnBytes;
  }
  static ONEPASS_FUNCTION uint32 tile(char* dynamic, int stage) {
    return own(dynamic, Config::kGroups) + stage * kTileBytes;
  }
  static ONEPASS_FUNCTION uint32 handed(char* dynamic, int group) {
    return tile(dynamic, Config::kStages) + group * kHandedBytes;
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at(dynamic, handed(dynamic, Config::kGroups)); }
  static ONEPASS_FUNCTION char* at(char* dynamic, uint32 address) {
    return dynamic + (address - shared_address(dynamic));
  }
  ONEPASS_FUNCTION void open() {
    for (uint64& box : mine) open_mailbox(&box, 1);
    for (int i = 0; i < Config::kStages; ++i) open_mailbox(&full[i], 1), open_mailbox(&empty[i], Config::kGroups);
    let_cluster_see_mailboxes();
  }
};

// body(box, address) for the next place in the ring, when it is empty.
template <class Config, class Body>
ONEPASS_FUNCTION void fill_next(gradient_shared<Config>& shared, char* dynamic, ring_position<Config::kStages>& at,
                                const Body& body) {
  using layout = gradient_shared<Config>;
  wait_for_mail(&shared.empty[at.stage], at.phase ^ 1);
  arrive_and_expect(&shared.full[at.stage], layout::kTileBytes);
  body(shared_address(&shared.full[at.stage]), layout::tile(dynamic, at.stage));
  at.next();
}

// Two products of a tile with a group's own: scores, and the gradients of weights. Both are [rows, keys].
template <class Config>
ONEPASS_FUNCTION void multiply_both(float (&scores)[Config::kKeys / 2], float (&gradients)[Config::kKeys / 2],
                                    uint32 first_rows, uint32 second_rows, uint32 first_keys, uint32 second_keys) {
  begin_products();
  multiply_rows<Config::kX, Config::kSteps, Config::kKeys>(scores, first_rows, first_keys);
  multiply_rows<Config::kX, Config::kValueSteps, Config::kKeys>(gradients, second_rows, second_keys);
  close_products();
}

// What backward knows of a row: what forward saved, and Σ result · its gradient. A row that does not exist has no
// weights.
struct row_facts {
  stage::pair<float> saved{static_cast<float>(kInfinity), 0.0f};
  float product = 0.0f;
};

// A lane's scores become their gradients, and those of weights the weights.
template <class Behind, class L, class Place>
ONEPASS_FUNCTION void finish_gradients(L& scores, L& gradients, const row_facts& row, Place& at) {
  const L weights = stage::softmax::recompute(Behind::pre::recompute(scores, at), row.saved);
  const L before = Behind::post::backward(weights, gradients, at);
  const L of_scores = stage::softmax::backward(weights, before, row.saved, {row.product, 0.0f}, 0.0f);
  scores = Behind::pre::backward(scores, of_scores, at);
  gradients = Behind::post::recompute(weights, at);
}

// Of a row in a tile of the result's gradient and the result itself: a thread's part of the sum of their products.
template <dtype D, int kPanels>
ONEPASS_FUNCTION float product_with_result(const char* gradients, int row, const void* result, int64 depth) {
  using memory_of = memory<D, 8, 8>;
  float sum = 0.0f;
  for (int piece = static_cast<int>(threadIdx.x) % 4; piece * 8 < depth; piece += 4) {
    const char* at = gradients + piece / 8 * kPanelBytes + row * 128 + place_of_piece(piece % 8, row) * 16;
    const auto gradient = memory_of::template numbers_of<float>(memory_of::load_written(at, 8)),
               value = memory_of::template numbers_of<float>(
                   memory_of::load(static_cast<const uint16*>(result) + piece * 8, 8));
    sum += sum_lanes(gradient * value);
  }
  return sum;
}

template <class Config>
ONEPASS_FUNCTION void bring_past_queries(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                         char* dynamic) {
  using layout = gradient_shared<Config>;
  const block_rows<Config> of(a.of);
  for (int group = 0; group < Config::kGroups; ++group) {
    const uint32 box = shared_address(&shared.mine[group]), to = layout::own(dynamic, group);
    const int row = of.first + group * kGroupRows;
    arrive_and_expect(&shared.mine[group], layout::kOwnBytes);
    bring_rows<Config::kPanels>(to, a.of.queries, a.of.step_queries, of.batch, row, box);
    bring_rows<Config::kValuePanels>(to + layout::kOwnFirstBytes, a.gradients, a.step_gradients, of.batch, row, box);
  }
  ring_position<Config::kStages> at;
  for (int tile = 0; tile < of.tiles; ++tile) {
    fill_next(shared, dynamic, at, [&](uint32 box, uint32 to) {
      const int key = tile * Config::kKeys;
      bring_keys<Config::kPanels, Config::kKeys>(to, a.of.keys, a.of.step_keys, of.batch, key, box);
      bring_keys<Config::kValuePanels, Config::kKeys>(to + layout::kTileFirstBytes, a.of.values, a.of.step_values,
                                                      of.batch, key, box);
    });
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void sum_for_queries(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                      char* dynamic) {
  using layout = gradient_shared<Config>;
  using lanes = thread_rows<Config, Behind>;
  using L = typename lanes::L;
  const block_rows<Config> of(a.of);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads, left = a.of.rows - of.first - group * kGroupRows;
  const uint32 queries = layout::own(dynamic, group), gradients = queries + layout::kOwnFirstBytes;
  lanes rows(a.of.behind, layout::streams(dynamic));
  rows.set_rows(of.row + group * kGroupRows, left);
  rows.bring(0);
  wait_for_mail(&shared.mine[group], 0);
  row_facts facts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const void* result = static_cast<const uint16*>(a.result) + rows.row(i) * a.of.value_depth;
    const float part = rows.exists(i) ? product_with_result<Config::kX, Config::kValuePanels>(
                                            layout::at(dynamic, gradients), rows.own(i), result, a.of.value_depth)
                                      : 0.0f;
    facts[i].product = sum_of_four(part);
    if (!rows.exists(i)) continue;
    facts[i].saved = saved_of<Behind, float>(a.of.behind, rows.row(i));
    if (rows.speaks()) a.products[rows.row(i)] = facts[i].product;
  }
  let_next_kernel_begin();
  float scores[Config::kKeys / 2], weights[Config::kKeys / 2];
  weighted_sum<Config, Config::kPanels> sum;
  tiles_taken<Config::kStages> ring(shared.full, shared.empty);
  for (int tile = 0; tile < of.tiles; ++tile) {
    const uint32 keys = layout::tile(dynamic, ring.take());
    multiply_both<Config>(scores, weights, queries, gradients, keys, keys + layout::kTileFirstBytes);
    if (tile > 0) {
      wait_for_products<1>();
      ring.give_back();
    }
    wait_for_products<0>();
    rows.wait_for_streams();
    rows.each_lane(tile * Config::kKeys, [&](int i, int lane, int count) {
      L here = lanes::lane_of(scores, i, lane), gradient = lanes::lane_of(weights, i, lane);
      finish_gradients<Behind>(here, gradient, facts[i], rows.at(i));
      if constexpr (!Config::behind::kExact) here = where(first_n<L>(count), here, L(0.0f));
      lanes::set_lane(scores, i, lane, here);
    });
    rows.bring((tile + 1) * Config::kKeys);
    if constexpr (Config::kWantsRows) {
      sum.take_weights(scores);
      sum.add(keys);
    }
  }
  wait_for_products<0>();
  if constexpr (Config::kWantsRows) {
    meet_in_group(1 + group);  // all have read the queries
    sum.store(layout::at(dynamic, queries),
              static_cast<uint16*>(a.rows_gradient) + (of.row + group * kGroupRows) * a.depth, left, a.depth);
  }
}

// Which keys a block has, and which rows need them: `tiles` of each group, from tile `from` on.
template <class Config>
struct block_keys {
  batch_place batch;
  int first;  // key
  int64 row;  // first of the batch, among all
  int64 key;  // first of the batch's, among all
  int from, tiles;

  explicit ONEPASS_FUNCTION block_keys(const attention_arguments& a) {
    const int number = static_cast<int>(blockIdx.x) / a.blocks;
    first = static_cast<int>(blockIdx.x) % a.blocks * (Config::kGroups * Config::kKeys);
    batch = {number / a.inner, number % a.inner, 0};
    row = int64{number} * a.group * a.rows;
    key = int64{number} * a.behind.columns;
    tiles = (a.rows + kGroupRows - 1) / kGroupRows;
    from = Config::kCausal ? first / kGroupRows : 0;
    if (from > tiles) from = tiles;
  }
  ONEPASS_FUNCTION int steps(const attention_arguments& a) const { return a.group * (tiles - from); }
  ONEPASS_FUNCTION int group_at(int step) const { return step / (tiles - from); }
  ONEPASS_FUNCTION int row_at(int step) const { return (from + step % (tiles - from)) * kGroupRows; }
};

template <class Config>
ONEPASS_FUNCTION void bring_past_keys(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                      char* dynamic) {
  using layout = gradient_shared<Config>;
  const block_keys<Config> of(a.of);
  for (int group = 0; group < Config::kGroups; ++group) {
    const uint32 box = shared_address(&shared.mine[group]), to = layout::own(dynamic, group);
    const int key = of.first + group * Config::kKeys;
    arrive_and_expect(&shared.mine[group], layout::kOwnBytes);
    bring_keys<Config::kPanels, Config::kKeys>(to, a.of.keys, a.of.step_keys, of.batch, key, box);
    bring_keys<Config::kValuePanels, Config::kKeys>(to + layout::kOwnFirstBytes, a.of.values, a.of.step_values,
                                                    of.batch, key, box);
  }
  ring_position<Config::kStages> at;
  batch_place batch = of.batch;
  for (batch.group = 0; batch.group < a.of.group; ++batch.group) {
    for (int tile = of.from; tile < of.tiles; ++tile) {
      fill_next(shared, dynamic, at, [&](uint32 box, uint32 to) {
        const int row = tile * kGroupRows;
        bring_rows<Config::kPanels>(to, a.of.queries, a.of.step_queries, batch, row, box);
        bring_rows<Config::kValuePanels>(to + layout::kTileFirstBytes, a.gradients, a.step_gradients, batch, row, box);
      });
    }
  }
}

// Sums over rows for 64 keys: a tile of [rows, keys] that this group handed over, turned, times the rows.
template <class Config, int kPanels>
class sum_over_rows {
 public:
  ONEPASS_FUNCTION void add(uint32 handed, uint32 rows) {
    const uint64 a = turned_tile_descriptor(handed), b = turned_tile_descriptor(rows);
#pragma unroll
    for (int step = 0; step < kGroupRows / 16; ++step)
      add_product<Config::kX, kNumbers, 1, 1>(sums_, a + 128 * step, b + 128 * step, true);
  }
  // `to`: that group's keys, of which `keys` exist.
  ONEPASS_FUNCTION void store(char* shared, void* to, int keys, int64 depth) const {
    hand_over<Config::kX, kNumbers>(sums_, shared);
    meet_in_group(1 + static_cast<int>(threadIdx.x) / kGroupThreads);
    store_handed<kNumbers>(shared, to, keys, depth, [](int row) { return row % 16 / 2 * 8 + row / 16 * 2 + row % 2; });
  }

 private:
  static constexpr int kNumbers = kPanels * 64;
  float sums_[kNumbers / 2] = {};
};

template <class Config, class Behind>
ONEPASS_FUNCTION void sum_for_keys(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                   char* dynamic) {
  static_assert(Config::kKeys == kGroupRows);
  using layout = gradient_shared<Config>;
  using lanes = thread_rows<Config, Behind, true>;
  using L = typename lanes::L;
  const block_keys<Config> of(a.of);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads, first = of.first + group * Config::kKeys,
            barrier = 1 + group, steps = of.steps(a.of);
  const uint32 keys = layout::own(dynamic, group), values = keys + layout::kOwnFirstBytes,
               handed = layout::handed(dynamic, group);
  lanes rows(a.of.behind, layout::streams(dynamic));
  row_facts facts[2];
  const auto go_to = [&](int step) {
    const int row = of.row_at(step);
    rows.set_rows(of.row + int64{of.group_at(step)} * a.of.rows + row, a.of.rows - row);
    rows.bring(first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      facts[i] = {};
      if (rows.exists(i)) facts[i] = {saved_of<Behind, float>(a.of.behind, rows.row(i)), a.products[rows.row(i)]};
    }
  };
  if (steps > 0) go_to(0);
  wait_for_mail(&shared.mine[group], 0);
  float scores[Config::kKeys / 2], weights[Config::kKeys / 2];
  sum_over_rows<Config, Config::kPanels> of_keys;
  sum_over_rows<Config, Config::kValuePanels> of_values;
  tiles_taken<Config::kStages> ring(shared.full, shared.empty);
  for (int step = 0; step < steps; ++step) {
    const uint32 queries = layout::tile(dynamic, ring.take()), gradients = queries + layout::kTileFirstBytes;
    multiply_both<Config>(scores, weights, queries, gradients, keys, values);
    wait_for_products<0>();
    if (step > 0) ring.give_back();
    rows.wait_for_streams();
    rows.each_lane(first, [&](int i, int lane, int) {
      L here = lanes::lane_of(scores, i, lane), gradient = lanes::lane_of(weights, i, lane);
      finish_gradients<Behind>(here, gradient, facts[i], rows.at(i));
      lanes::set_lane(scores, i, lane, here);
      lanes::set_lane(weights, i, lane, gradient);
    });
    if (step + 1 < steps) go_to(step + 1);
    meet_in_group(barrier);  // what was handed over before has been read
    if constexpr (Config::kWantsKeys) hand_over<Config::kX, Config::kKeys>(scores, layout::at(dynamic, handed));
    if constexpr (Config::kWantsValues)
      hand_over<Config::kX, Config::kKeys>(weights, layout::at(dynamic, handed + kPanelBytes));
    let_copies_see_writes();
    meet_in_group(barrier);
    begin_products();
    if constexpr (Config::kWantsKeys) of_keys.add(handed, queries);
    if constexpr (Config::kWantsValues) of_values.add(handed + kPanelBytes, gradients);
    close_products();
  }
  wait_for_products<0>();
  meet_in_group(barrier);  // all have read the keys
  const int left = static_cast<int>(a.of.behind.columns) - first;
  const int64 to = of.key + first;
  if constexpr (Config::kWantsKeys)
    of_keys.store(layout::at(dynamic, keys), static_cast<uint16*>(a.keys_gradient) + to * a.depth, left, a.depth);
  if constexpr (Config::kWantsValues)
    of_values.store(layout::at(dynamic, values), static_cast<uint16*>(a.values_gradient) + to * a.of.value_depth, left,
                    a.of.value_depth);
}

template <class Config, class Behind>
ONEPASS_FUNCTION void gradients_of_queries(const attention_gradient_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ gradient_shared<Config> shared;
  bring_and_multiply<Config>(
      shared, [&] { bring_past_queries<Config>(a, shared, dynamic); },
      [&] { sum_for_queries<Config, Behind>(a, shared, dynamic); });
}
template <class Config, class Behind>
ONEPASS_FUNCTION void gradients_of_keys(const attention_gradient_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ gradient_shared<Config> shared;
  bring_and_multiply<Config>(
      shared, [&] { bring_past_keys<Config>(a, shared, dynamic); },
      [&] { sum_for_keys<Config, Behind>(a, shared, dynamic); });
}

ONEPASS_END
