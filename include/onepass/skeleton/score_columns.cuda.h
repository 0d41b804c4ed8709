// Scores the other way round: rows of queries pass a warpgroup's 64 keys, and of products [keys, rows] a thread has two
// keys that are neighbours. Of row 16 w + 8 i + p of the keys' tile (w < 4, i < 2, p < 8) the key is 16 w + 2 p + i.
#pragma once

#include "onepass/skeleton/row_facts.cuda.h"
#include "onepass/skeleton/score_tiles.cuda.h"

ONEPASS_BEGIN

// The key that stands in a row of the tile.
ONEPASS_FUNCTION int pair_at(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }

// kPanels panels of 64 keys from `key` on, in that order; their map: [outer, inner, keys / 2, 2, depth].
template <int kPanels>
ONEPASS_FUNCTION void bring_pairs(uint32 to, const tensor_map& map, batch_steps step, batch_place of, int key,
                                  uint32 box) {
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      bring_tile(to + panel * kPanelBytes + i * 1024, map, panel * 64, i % 2, key / 2 + i / 2 * 8,
                 of.inner * step.inner, of.outer * step.outer, box);
  }
}

// A tile of rows of queries: `row` is its first among those of its group, of which there are `rows`, the first of them
// `first` among all. Tiles of a group follow each other.
struct passing_rows {
  int64 first;
  int row, rows;
  bool begins;  // its group
};

// A place of two keys whose random words have been drawn: of each dropout one, the first key's bits its low half.
template <class Words, class Line>
struct drawn_place : place<Words, Line, true> {
  uint32 drawn[larger(1, Line::dropouts)];

  explicit ONEPASS_FUNCTION drawn_place(const arguments& a) : place<Words, Line, true>(a) {}
  template <class L, int K>
  ONEPASS_FUNCTION pack_mask<2> keeps(int threshold) const {
    return random_at_least<2>({{drawn[K]}}, 0, threshold);
  }
};

// Four threads of a warp, kApart from each other: what the i-th has as word j, the j-th gets as word i.
template <int kApart>
ONEPASS_FUNCTION void exchange_words(uint32 (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (threadIdx.x / kApart & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32 &low = words[i], &high = words[i + bit];
      const uint32 other = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit * kApart);
      if (upper) low = other;
      else high = other;
    }
  }
}

// A thread's two keys, past which tiles of kTile rows pass: lane k has them of row 8 (k / 2) + 2 (thread % 4) + k % 2.
// What is brought of the words' tensors, a warpgroup's threads bring together: of each row of a tile 8 pieces of 8
// numbers, exchanged so that rows which are read at a time differ in their banks. Random words, of which a row's eight
// neighbours share four, are drawn by the four threads that have these, each for every fourth lane. Gives no gradients
// to tensors.
template <class Config, class Line>
class thread_columns {
 public:
  using words = typename Config::behind;
  using index = typename words::index;
  using L = pack<float, 2>;
  static constexpr int kLanes = Config::kTile / 4;

  // The warpgroup's keys begin at `first`.
  ONEPASS_FUNCTION thread_columns(const arguments& a, char* streams, int first)
      : here_(a), brought_(a), streams_(streams + group() * (Config::kTile * kRowBytes)) {
    here_.set_columns(first + warp() * 16 + pair() * 2, 2, a.columns);
    brought_.set_columns(first + thread() % kPieces * 8, 8, a.columns);
  }
  // The row of a tile that has lane k.
  static ONEPASS_FUNCTION int row_of(int lane) { return lane / 2 * 8 + thread() % 4 * 2 + lane % 2; }
  static ONEPASS_FUNCTION L lane_of(const float (&d)[Config::kTile / 2], int lane) {
    const int k = lane / 2 * 4 + lane % 2;
    L of;
    of.v[0] = d[k], of.v[1] = d[k + 2];
    return of;
  }
  static ONEPASS_FUNCTION void set_lane(float (&d)[Config::kTile / 2], int lane, L to) {
    const int k = lane / 2 * 4 + lane % 2;
    d[k] = to.v[0], d[k + 2] = to.v[1];
  }

  // The streams' part of the next tile is on its way to `stage`.
  ONEPASS_FUNCTION void bring(passing_rows tile, int stage) {
    if constexpr (words::kStreams != 0) {
      brought_.go_to(tile);
      if (brought_.exists) {
        char* const to = streams_ + stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const int row = thread() / kPieces + i * kRowsAtOnce;
          auto at = brought_.at(row);
          at.set_copy(to + row * kRowBytes + piece_at(row, thread() % kPieces) * 16, 0);
          at.bring();
        }
      }
      close_copy_group();
    }
  }
  // The next tile, of which all threads see what was brought, is this one. None reads the one before any more.
  ONEPASS_FUNCTION void go_to(passing_rows tile, int stage) {
    here_.go_to(tile);
    if constexpr (words::kStreams != 0) {
      stage_ = one_address(streams_ + stage * kStageBytes + row_of(0) * kRowBytes +
                           piece_at(row_of(0), 2 * warp() + pair() / 4) * 16);
      wait_for_copy_groups<0>();
      meet_in_group(1 + group());
    }
  }
  // body(lane, at), where the words are at each of its lanes.
  template <class Body>
  ONEPASS_FUNCTION void each_lane(const Body& body) const {
#pragma unroll
    for (int lane = 0; lane < kLanes; lane += 4) {
      uint32 drawn[larger(1, Line::dropouts)][4];
      draw<0>(lane, drawn);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_of(lane + i);
        auto at = here_.at(row);
        at.set_copy(stage_ + (row - row_of(0)) * kRowBytes, pair() % 4 * 2);
#pragma unroll
        for (int k = 0; k < Line::dropouts; ++k) at.drawn[k] = drawn[k][i];
        body(lane + i, at);
      }
    }
  }

 private:
  // Tensors' lanes as they are brought.
  struct brought : words {
    static constexpr int kLanes = 8, kAccess = 8;
  };
  static constexpr int kPieces = 8, kRowBytes = kPieces * 16, kRowsAtOnce = kGroupThreads / kPieces,
                       kTurns = Config::kTile / kRowsAtOnce;
  static constexpr int kStageBytes = place<words, Line, true>::kStageBytes;

  template <class place_of>
  struct place_in_tile {
    place_of first;
    int last = 0;  // row of the tile
    bool exists = true;

    explicit ONEPASS_FUNCTION place_in_tile(const arguments& a) : first(a) {}
    ONEPASS_FUNCTION void set_columns(int column, int count, int64 columns) {
      exists = column < columns;
      first.set_column(static_cast<index>(column), exists ? count : 0);
    }
    ONEPASS_FUNCTION void go_to(passing_rows tile) {
      if (tile.begins) first.set_row(static_cast<index>(tile.first + tile.row));
      else first.skip_rows(Config::kTile);
      last = tile.rows - tile.row - 1;
    }
    // Of rows that do not exist the last stands in their place.
    ONEPASS_FUNCTION place_of at(int row) const {
      place_of there = first;
      there.skip_rows(static_cast<index>(Config::kWholeRows || row < last ? row : last));
      return there;
    }
  };

  static ONEPASS_FUNCTION int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
  static ONEPASS_FUNCTION int thread() { return static_cast<int>(threadIdx.x) % kGroupThreads; }
  static ONEPASS_FUNCTION int warp() { return thread() / 32; }
  static ONEPASS_FUNCTION int pair() { return thread() % 32 / 4; }  // of the warp's keys
  // Shared memory, from where the compiler shall count.
  static ONEPASS_FUNCTION char* one_address(char* in_shared) {
    uint32 address = shared_address(in_shared);
    asm volatile("" : "+r"(address));
    return static_cast<char*>(__cvta_shared_to_generic(address));
  }
  static ONEPASS_FUNCTION int piece_at(int row, int piece) { return piece ^ row / 2 % 4 * 2; }

  // Of the four lanes from `lane` on, the thread's keys' words of each dropout from number K on.
  template <int K, class Drawn>
  ONEPASS_FUNCTION void draw(int lane, Drawn& drawn) const {
    if constexpr (K < Line::dropouts) {
      const philox_words of = here_.at(row_of(lane + pair() % 4)).template random<K>();
#pragma unroll
      for (int i = 0; i < 4; ++i) drawn[K][i] = of.word[i];
      exchange_words<4>(drawn[K]);
      draw<K + 1>(lane, drawn);
    }
  }

  place_in_tile<drawn_place<words, Line>> here_;
  place_in_tile<place<brought, Line, true>> brought_;
  char *streams_, *stage_ = nullptr;
};

ONEPASS_END
