// Backward of lines with `scores`, softmax and `values` (sm_90a), in two kernels that write nothing of the scores'
// size: one has rows of queries, past which keys and values pass, and gives their gradients and those of the words'
// tensors; one has keys and values, past which the rows pass and their results' gradients. Each makes the scores again,
// so that its own 64 rows are the rows of all its products: what is summed goes from registers to the matrix unit.
// No sum depends on the order of blocks. (Dao, "FlashAttention-2", 2023, has one kernel whose blocks add to the same
// rows.)
//
// Σ weight · gradient of a row, which softmax's gradient needs, is Σ result · its gradient, since the words behind
// softmax multiply; the first kernel leaves it, and softmax's statistics as they are used, for the second.
//
// Config beside score_tiles.cuda.h: kValueSteps, sixteens of the values' numbers; kAhead, as far as registers reach: 1,
// the next tile's products begin while this one's sums are under way, 2, while this one's are still taken; kFacts,
// whether a row_facts of each row passes by; kWholeRows, whether tiles of rows are whole; kWantsRows, kWantsKeys,
// kWantsValues, what of all this is wanted. `behind` is forward's, with the tensors whose gradients are wanted; in the
// second kernel its lanes are two keys.
#pragma once

#include "onepass/skeleton/passing_tiles.cuda.h"

ONEPASS_BEGIN

struct attention_gradient_arguments {
  tensor_map gradients;  // of the result, [outer, inner, group, rows, value_depth]
  batch_steps step_gradients;
  const void* result;  // [all rows, value_depth]
  row_facts* facts;    // of each group's rows, in whole tiles
  void *rows_gradient, *keys_gradient, *values_gradient;
  int64 depth;
  attention_arguments of;
};

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

// Of a group of rows, counted among all.
ONEPASS_FUNCTION row_facts* facts_of(const attention_gradient_arguments& a, int64 group) {
  return a.facts + group * ((a.of.rows + kGroupRows - 1) / kGroupRows * kGroupRows);
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
      const int key = tile * Config::kTile;
      bring_keys<Config::kPanels, Config::kTile>(to, a.of.keys, a.of.step_keys, of.batch, key, box);
      bring_keys<Config::kValuePanels, Config::kTile>(to + layout::kTileFirstBytes, a.of.values, a.of.step_values,
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
  const int group = group_number(), left = a.of.rows - of.first - group * kGroupRows;
  const uint32 queries = layout::own(dynamic, group), gradients = queries + layout::kOwnFirstBytes;
  lanes rows(a.of.behind, layout::streams(dynamic));
  rows.set_rows(of.row + group * kGroupRows, left);
  rows.bring(0, 0);
  passing_tiles<Config> tiles(shared, dynamic, group);
  row_facts facts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const void* result = static_cast<const uint16*>(a.result) + rows.row(i) * a.of.value_depth;
    const float part = rows.exists(i) ? product_with_result<Config::kX, Config::kValuePanels>(
                                            at_shared(dynamic, gradients), rows.own(i), result, a.of.value_depth)
                                      : 0.0f;
    const float product = sum_of_four(part);
    if (rows.exists(i)) facts[i] = {weight_of(saved_of<Behind, float>(a.of.behind, rows.row(i))), product};
    if (left > 0 && rows.speaks()) facts_of(a, of.number)[of.first + group * kGroupRows + rows.own(i)] = facts[i];
  }
  let_next_kernel_begin();
  weighted_sum<Config, Config::kPanels> sum;
  tiles.each(
      of.tiles,
      [&](tile_products<Config>& products, uint32, int tile) {
        rows.bring((tile + 1) * Config::kTile, (tile + 1) % 2);
        rows.template wait_for_streams<1>(tile % 2);
        rows.each_lane(tile * Config::kTile, [&](int i, int lane, int count) {
          L scores = lanes::lane_of(products.scores, i, lane), gradient = lanes::lane_of(products.gradients, i, lane);
          finish_gradients<Behind>(scores, gradient, facts[i], rows.at(i));
          if constexpr (!Config::behind::kExact) scores = where(first_n<L>(count), scores, L(0.0f));
          lanes::set_lane(products.scores, i, lane, scores);
        });
      },
      [&](const tile_products<Config>& products) {
        if constexpr (Config::kWantsRows) sum.take_weights(products.scores);
      },
      [&](uint32 tile) {
        if constexpr (Config::kWantsRows) sum.add(tile);
      });
  if constexpr (Config::kWantsRows) {
    meet_in_group(1 + group);  // all have read the queries
    sum.store(at_shared(dynamic, queries),
              static_cast<uint16*>(a.rows_gradient) + (of.row + group * kGroupRows) * a.depth, left, a.depth);
  }
}

// Which keys a block has, and which rows need them: `tiles` of each group, from tile `from` on.
template <class Config>
struct block_keys {
  batch_place batch;
  int number, first;  // of the batch; key
  int64 row;          // first of the batch, among all
  int64 key;          // first of the batch's, among all
  int from, tiles;

  explicit ONEPASS_FUNCTION block_keys(const attention_arguments& a) {
    number = static_cast<int>(blockIdx.x) / a.blocks;
    first = static_cast<int>(blockIdx.x) % a.blocks * (Config::kGroups * kGroupRows);
    batch = {number / a.inner, number % a.inner, 0};
    row = int64{number} * a.group * a.rows;
    key = int64{number} * a.behind.columns;
    tiles = (a.rows + kGroupRows - 1) / kGroupRows;
    from = Config::kCausal ? first / kGroupRows : 0;
    if (from > tiles) from = tiles;
  }
  ONEPASS_FUNCTION int steps(const attention_arguments& a) const { return a.group * (tiles - from); }
  ONEPASS_FUNCTION passing_rows first_rows(const attention_arguments& a) const {
    return {row, from * kGroupRows, a.rows, true};
  }
  ONEPASS_FUNCTION passing_rows rows_after(passing_rows tile) const {
    tile.row += kGroupRows, tile.begins = tile.row >= tile.rows;
    if (tile.begins) tile.row = from * kGroupRows, tile.first += tile.rows;
    return tile;
  }
};

template <class Config>
ONEPASS_FUNCTION void bring_past_keys(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                      char* dynamic) {
  using layout = gradient_shared<Config>;
  const block_keys<Config> of(a.of);
  for (int group = 0; group < Config::kGroups; ++group) {
    const uint32 box = shared_address(&shared.mine[group]), to = layout::own(dynamic, group);
    const int key = of.first + group * Config::kTile;
    arrive_and_expect(&shared.mine[group], layout::kOwnBytes);
    bring_pairs<Config::kPanels>(to, a.of.keys, a.of.step_keys, of.batch, key, box);
    bring_pairs<Config::kValuePanels>(to + layout::kOwnFirstBytes, a.of.values, a.of.step_values, of.batch, key, box);
  }
  ring_position<Config::kStages> at;
  batch_place batch = of.batch;
  for (batch.group = 0; batch.group < a.of.group; ++batch.group) {
    for (int tile = of.from; tile < of.tiles; ++tile) {
      fill_next(shared, dynamic, at, [&](uint32 box, uint32 to) {
        const int row = tile * kGroupRows;
        bring_rows<Config::kPanels>(to, a.of.queries, a.of.step_queries, batch, row, box);
        bring_rows<Config::kValuePanels>(to + layout::kTileFirstBytes, a.gradients, a.step_gradients, batch, row, box);
        bring_bytes(to + layout::kNumbersBytes, facts_of(a, of.number * a.of.group + batch.group) + row,
                    layout::kFactsBytes, box);
      });
    }
  }
}

template <class Config, class Behind>
ONEPASS_FUNCTION void sum_for_keys(const attention_gradient_arguments& a, gradient_shared<Config>& shared,
                                   char* dynamic) {
  using layout = gradient_shared<Config>;
  using columns_of = thread_columns<Config, Behind>;
  using L = typename columns_of::L;
  const block_keys<Config> of(a.of);
  const int group = group_number(), first = of.first + group * kGroupRows, steps = of.steps(a.of);
  columns_of columns(a.of.behind, layout::streams(dynamic), first);
  passing_rows rows = of.first_rows(a.of);
  if (steps > 0) columns.bring(rows, 0);
  weighted_sum<Config, Config::kPanels> of_keys;
  weighted_sum<Config, Config::kValuePanels> of_values;
  passing_tiles<Config>(shared, dynamic, group)
      .each(
          steps,
          [&](tile_products<Config>& products, uint32 tile, int step) {
            columns.go_to(rows, step % 2);
            rows = of.rows_after(rows);
            if (step + 1 < steps) columns.bring(rows, (step + 1) % 2);
            const row_facts* facts = layout::facts(dynamic, tile);
            columns.each_lane([&](int lane, auto& at) {
              L scores = columns_of::lane_of(products.scores, lane), gradient{};
              if constexpr (kReadsGradients<Config>) gradient = columns_of::lane_of(products.gradients, lane);
              finish_gradients<Behind>(scores, gradient, load_facts(facts + columns_of::row_of(lane)), at);
              columns_of::set_lane(products.scores, lane, scores);
              columns_of::set_lane(products.gradients, lane, gradient);
            });
            hand_shared_to_copies();  // the facts' place
          },
          [&](const tile_products<Config>& products) {
            if constexpr (Config::kWantsKeys) of_keys.take_weights(products.scores);
            if constexpr (Config::kWantsValues) of_values.take_weights(products.gradients);
          },
          [&](uint32 tile) {
            if constexpr (Config::kWantsKeys) of_keys.add(tile);
            if constexpr (Config::kWantsValues) of_values.add(tile + layout::kTileFirstBytes);
          });
  meet_in_group(1 + group);  // all have read the keys
  const uint32 keys = layout::own(dynamic, group), values = keys + layout::kOwnFirstBytes;
  const int left = static_cast<int>(a.of.behind.columns) - first;
  const int64 to = of.key + first;
  if constexpr (Config::kWantsKeys)
    of_keys.store(at_shared(dynamic, keys), static_cast<uint16*>(a.keys_gradient) + to * a.depth, left, a.depth,
                  pair_at);
  if constexpr (Config::kWantsValues)
    of_values.store(at_shared(dynamic, values), static_cast<uint16*>(a.values_gradient) + to * a.of.value_depth, left,
                    a.of.value_depth, pair_at);
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
