// Backward of attention: 64 rows or keys that a warpgroup has, and tiles of the others that pass them, in shared memory
// and through the matrix unit. Config: attention_gradients.cuda.h.
#pragma once

#include "onepass/skeleton/score_columns.cuda.h"
#include "onepass/skeleton/score_tiles.cuda.h"

ONEPASS_BEGIN

// A group's own 64 rows or keys, and those that pass by: the first of each two are multiplied with the first, the
// second with the second.
template <class Config>
struct gradient_shared {
  static constexpr int kAllPanels = Config::kPanels + Config::kValuePanels;
  static constexpr int kOwnBytes = kAllPanels * kPanelBytes, kOwnFirstBytes = Config::kPanels * kPanelBytes;
  static constexpr int kNumbersBytes = kAllPanels * Config::kTile * 128,
                       kTileFirstBytes = Config::kPanels * Config::kTile * 128;
  static constexpr int kFactsBytes = Config::kFacts ? Config::kTile * int{sizeof(row_facts)} : 0;
  static constexpr int kTileBytes = kNumbersBytes + kFactsBytes;

  uint64 mine[Config::kGroups];
  uint64 full[Config::kStages], empty[Config::kStages];

  static ONEPASS_FUNCTION uint32 own(char* dynamic, int group) { return first_tile(dynamic) + group * kOwnBytes; }
  static ONEPASS_FUNCTION uint32 tile(char* dynamic, int stage) {
    return own(dynamic, Config::kGroups) + stage * kTileBytes;
  }
  static ONEPASS_FUNCTION const row_facts* facts(char* dynamic, uint32 tile) {
    return reinterpret_cast<const row_facts*>(at_shared(dynamic, tile + kNumbersBytes));
  }
  static ONEPASS_FUNCTION char* streams(char* dynamic) { return at_shared(dynamic, tile(dynamic, Config::kStages)); }
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

// Of a tile, in a thread: scores, and the gradients of weights; both [own rows, the tile's].
template <class Config>
struct tile_products {
  float scores[Config::kTile / 2], gradients[Config::kTile / 2];
};
// Values' gradients need no more than the weights.
template <class Config>
inline constexpr bool kReadsGradients = !Config::kFacts || Config::kWantsKeys;

// All tiles that pass a group's own rows: finish(products, tile, step) makes of a tile's products what take(products)
// keeps, and add(tile) begins to multiply with the tile's rows.
template <class Config>
class passing_tiles {
 public:
  using layout = gradient_shared<Config>;
  using products = tile_products<Config>;

  ONEPASS_FUNCTION passing_tiles(gradient_shared<Config>& shared, char* dynamic, int group)
      : dynamic_(dynamic), own_(layout::own(dynamic, group)), ring_(shared.full, shared.empty) {
    wait_for_mail(&shared.mine[group], 0);
  }
  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void each(int steps, const Finish& finish, const Take& take, const Add& add) {
    if (steps <= 0) return;
    if constexpr (Config::kAhead == 2) ahead(steps, finish, take, add);
    else one_by_one(steps, finish, take, add);
    wait_for_products<0>();
  }

 private:
  // The next tile's products are under way.
  ONEPASS_FUNCTION uint32 begin(products& of) {
    const uint32 tile = layout::tile(dynamic_, ring_.take());
    begin_products();
    multiply_rows<Config::kX, Config::kSteps, Config::kTile>(of.scores, own_, tile);
    if constexpr (kReadsGradients<Config>)
      multiply_rows<Config::kX, Config::kValueSteps, Config::kTile>(of.gradients, own_ + layout::kOwnFirstBytes,
                                                                    tile + layout::kTileFirstBytes);
    close_products();
    return tile;
  }
  template <class Add>
  ONEPASS_FUNCTION void sum(uint32 tile, const Add& add) {
    begin_products();
    add(tile);
    close_products();
  }

  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void one_by_one(int steps, const Finish& finish, const Take& take, const Add& add) {
    products of;
    for (int step = 0; step < steps; ++step) {
      const uint32 tile = begin(of);
      wait_for_products<0>();
      if (Config::kAhead > 0 && step > 0) ring_.give_back();
      finish(of, tile, step);
      take(of);
      sum(tile, add);
      if constexpr (Config::kAhead == 0) {  // there may be no other place for the next tile
        wait_for_products<0>();
        ring_.give_back();
      }
    }
  }

  template <class Finish, class Take, class Add>
  ONEPASS_FUNCTION void ahead(int steps, const Finish& finish, const Take& take, const Add& add) {
    products even, odd;
    uint32 tile = begin(even);
    wait_for_products<0>();
    const auto turn = [&](products& now, products& next, int step) {
      wait_for_products<1>();  // the sums of the tile before may be under way
      const uint32 next_tile = begin(next);
      finish(now, tile, step);
      wait_for_products<1>();
      if (step > 0) ring_.give_back();
      take(now);
      sum(tile, add);
      tile = next_tile;
    };
    const auto end = [&](products& now, int step) {
      wait_for_products<0>();
      finish(now, tile, step);
      take(now);
      sum(tile, add);
    };
    int step = 0;
    for (; step + 2 < steps; step += 2) {
      turn(even, odd, step);
      turn(odd, even, step + 1);
    }
    if (step + 1 < steps) {
      turn(even, odd, step);
      end(odd, step + 1);
    } else {
      end(even, step);
    }
  }

  char* dynamic_;
  const uint32 own_;
  tiles_taken<Config::kStages> ring_;
};

ONEPASS_END
