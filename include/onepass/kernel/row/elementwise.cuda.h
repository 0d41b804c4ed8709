// Elementwise lines on CUDA. A block is kAcross threads along the columns by kDown rows; every thread has kUnroll
// vectors in flight, down the rows (along the columns where the tensor is one long row).
//
// Config, besides kernel/common/cursor.cuda.h's: kAcross, kDown, kUnroll, kFlat.
#pragma once

#include "onepass/kernel/row/column_parts.cuda.h"

ONEPASS_BEGIN

// Calls body(row_of, column_of) for kUnroll vectors at a time until this thread's share is done. A block's threads make
// the same calls, past the last row and column too: they store together.
// ends_group(g) follows the last tile of group g.
struct no_groups {
  ONEPASS_FUNCTION void operator()(int64) const {}
};
template <class Config, class Body, class EndsGroup = no_groups>
ONEPASS_FUNCTION void for_tiles(const arguments& a, const Body& body, const EndsGroup& ends_group = {}) {
  constexpr int V = Config::kVectorSize, U = Config::kUnroll;
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  using index = typename Config::index;
  if constexpr (kGrouped<Config>) {
    const index column = (static_cast<index>(blockIdx.x) * Config::kAcross + across) * V;
    constexpr int kTile = Config::kDown * U;
    const group_walk<Config, kTile> walk(a, share_of<Config>(a, blockIdx.y, gridDim.y));
    for (unsigned turn = 0; turn < walk.turns(); ++turn) {
      const rows_of_group<Config, kTile> of_group = walk.rows_of_turn(turn);
      for (unsigned step = 0; step < walk.steps_a_group(); ++step) {
        index rows[U];
#pragma unroll
        for (int u = 0; u < U; ++u) rows[u] = of_group.row(step, down + u * Config::kDown);
        body([&](int u) { return rows[u]; }, [&](int) { return column; });
      }
      ends_group(walk.group_of_turn(turn));
    }
  } else if constexpr (Config::kFlat) {
    constexpr int kTile = U * Config::kAcross * V;
    const share_of_blocks share = share_of<Config>(a, blockIdx.x, gridDim.x);
    const auto columns = static_cast<index>(a.columns), step = static_cast<index>(share.blocks) * kTile;
    for (index first = static_cast<index>(share.block) * kTile; first < columns; first += step) {
      body([&](int) { return index{0}; }, [&](int u) { return first + (u * Config::kAcross + across) * V; });
    }
  } else {
    constexpr int kTile = Config::kDown * U;
    const index column = (static_cast<index>(blockIdx.x) * Config::kAcross + across) * V;
    const share_of_blocks share = share_of<Config>(a, blockIdx.y, gridDim.y);
    const auto rows = static_cast<index>(a.rows), step = static_cast<index>(share.blocks) * kTile;
    for (index first = static_cast<index>(share.block) * kTile; first < rows; first += step) {
      body([&](int u) { return first + down + u * Config::kDown; }, [&](int) { return column; });
    }
  }
}

// At vector u of a tile, which may reach past the last row: nothing exists there.
template <class Config, class Cursor, class RowOf, class ColumnOf>
ONEPASS_FUNCTION void move_to(const arguments& a, Cursor& at, int u, const RowOf& row_of, const ColumnOf& column_of) {
  const typename Config::index row = row_of(u), column = column_of(u);
  at.set_row(row, row < static_cast<typename Config::index>(a.rows));
  at.set_column(column, Config::kExact ? Config::kVectorSize : count_at<Config::kVectorSize>(column, a.columns));
  if constexpr (Config::kStaged != 0) {
    extern __shared__ __align__(128) double dynamic[];
    at.set_results(reinterpret_cast<char*>(dynamic),
                   u * Config::kDown + static_cast<int>(threadIdx.x) / Config::kAcross);
  }
}
// Results of the tile that went to shared memory leave from there.
template <class Config, class Cursor, class RowOf, class ColumnOf>
ONEPASS_FUNCTION void store_tile(const arguments& a, Cursor& at, const RowOf& row_of, const ColumnOf& column_of) {
  if constexpr (Config::kStaged != 0) {
    __syncthreads();
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      move_to<Config>(a, at, u, row_of, column_of);
      at.store_results(column_of(u) - static_cast<int>(threadIdx.x) % Config::kAcross * Config::kVectorSize);
    }
    __syncthreads();
  }
}

// y = body(at, row) everywhere.
template <class Config, class Line, class Body>
ONEPASS_FUNCTION void forward_in_tiles(const arguments& a, const Body& body) {
  using cursor_type = cursor<Config, Line>;
  static_assert(cursor_of<cursor_type, typename cursor_type::vector>);
  for_tiles<Config>(a, [&](auto row_of, auto column_of) {
    typename cursor_type::vector y[Config::kUnroll];
    cursor_type at(a);
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      move_to<Config>(a, at, u, row_of, column_of);
      y[u] = body(at, row_of(u));
    }
#pragma unroll
    for (int u = 0; u < (Line::gives_number ? 0 : Config::kUnroll); ++u) {
      move_to<Config>(a, at, u, row_of, column_of);
      at.store_y(y[u]);
    }
    store_tile<Config>(a, at, row_of, column_of);
  });
}

template <class Config, class Line>
ONEPASS_FUNCTION void elementwise_forward(const arguments& a) {
  forward_in_tiles<Config, Line>(a, [](auto& at, auto) { return Line::pre::forward(at.x(), at); });
}

// Sums over the rows of group g, from one vector of registers a thread, which begin at nothing again.
template <class Config, class Line>
ONEPASS_FUNCTION void write_group(const arguments& a, pack<typename Config::arithmetic, Config::kVectorSize>* sums,
                                  int64 g) {
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  const int64 first = static_cast<int64>(blockIdx.x) * Config::kAcross * Config::kVectorSize;
#pragma unroll
  for (int slot = 0; slot < kSlots<Config>; ++slot) {
    if (!is_grouped<Config>(slot)) continue;
    if constexpr (kWholeGroups<Config>) write_part<Config, Line, true>(a, sums[slot], slot, g, first, across, down);
    else write_part<Config, Line>(a, sums[slot], slot, blockIdx.y, first, across, down);
    sums[slot] = pack<typename Config::arithmetic, Config::kVectorSize>(0);
  }
}

// The block's part of the column sums, from one vector of registers a thread.
template <class Config, class Line>
ONEPASS_FUNCTION void write_parts(const arguments& a,
                                  const pack<typename Config::arithmetic, Config::kVectorSize>* sums) {
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  const int64 first = static_cast<int64>(blockIdx.x) * Config::kAcross * Config::kVectorSize;
  const unsigned part = share_of<Config>(a, blockIdx.y, gridDim.y).block;
  let_next_kernel_begin();
#pragma unroll
  for (int slot = 0; slot < kSlots<Config>; ++slot) {
    if (!is_grouped<Config>(slot)) write_part<Config, Line>(a, sums[slot], slot, part, first, across, down);
  }
}

template <class Config, class Line>
ONEPASS_FUNCTION void elementwise_backward(const arguments& a) {
  using cursor_type = cursor<Config, Line>;
  using L = typename cursor_type::vector;
  if constexpr (Config::kOneFactor != 0) {  // where it is 1, nothing is to be done
    using T = typename Config::arithmetic;
    constexpr dtype kFactor = Config::kOperand[0];
    if (from_storage<kFactor, T>(*static_cast<const typename stored<kFactor>::type*>(a.operand[0].data)) == T(1))
      return;
  }
  L sums[kSlots<Config> > 0 ? kSlots<Config> : 1];
#pragma unroll
  for (int slot = 0; slot < kSlots<Config>; ++slot) sums[slot] = L(0);
  const auto tile = [&](auto row_of, auto column_of) {
    L dx[Config::kUnroll], recomputed[Config::kWantsRecompute ? Config::kUnroll : 1];
    cursor_type at(a);
    at.set_sums(sums);
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      move_to<Config>(a, at, u, row_of, column_of);
      L x{};
      constexpr bool kNeedsInput = Line::pre::needs_input && Config::kOneFactor == 0;
      if constexpr (kNeedsInput || (Config::kWantsRecompute && !Line::pre::resumes)) x = at.x();
      dx[u] = Line::pre::backward(x, at.dy(), at);
      if constexpr (Config::kWantsRecompute) recomputed[u] = Line::pre::recompute(x, at);
    }
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      move_to<Config>(a, at, u, row_of, column_of);
      at.store_dx(dx[u]);
      if constexpr (Config::kWantsRecompute) at.store_recomputed(recomputed[u]);
    }
    store_tile<Config>(a, at, row_of, column_of);
  };
  for_tiles<Config>(a, tile, [&](int64 g) { write_group<Config, Line>(a, sums, g); });
  write_parts<Config, Line>(a, sums);
}

ONEPASS_END
