// `linear` in one kernel (sm_90a): a GEMM whose epilogue is the words behind `linear`.
//
// A block has four warpgroups. Warpgroup 0 runs the epilogue over a tile of accumulators in shared memory while the
// next tile is multiplied. Warpgroups 1 and 2 multiply (wgmma), 64 rows of a tile each, and store their accumulators to
// shared memory. With one buffer they take turns: the second waits until the epilogue has read the first one's, and
// runs behind it from there on. One thread of warpgroup 3 loads tiles of x and of the matrix into a ring by TMA. Blocks
// of a cluster have tiles below each other and multicast the matrix to each other.
//
// The prologue is empty, or a norm that is deferred into the epilogue (kernel/linear/folded_norm.cuda.h). The norm's
// statistics come from another kernel, or from here, where a block has all columns of its rows: warpgroup 0 then takes
// a row's moments from the tiles of x in the ring, those of the next tile between rows of this one.
//
// Config:
//   kX                storage type throughout: bf16 or f16
//   kTileN, kStages, kCluster
//   kBuffers          2: each multiplying warpgroup has a buffer for its accumulators; 1: they share one in turns
//   kGroup            tiles of a cluster below each other that are computed before the next ones beside them
//   before, behind    prologue and epilogue: what kernel/common/cursor.cuda.h asks for
//   kDefers           `before` is a norm, with or without affine, and deferred
//   kTakesMoments     this kernel computes the norm's statistics
#pragma once

#include "onepass/kernel/linear/folded_norm.cuda.h"

ONEPASS_BEGIN

template <class Config>
ONEPASS_FUNCTION void load_tiles(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic) {
  using layout = linear_shared<Config>;
  constexpr int kPart = Config::kTileN / Config::kCluster;
  const tile_order<Config> tiles(a);
  const int rank = Config::kCluster > 1 ? cluster_rank() : 0;
  ring_position<Config::kStages> at;
  prefetch(a.input), prefetch(a.matrix);
  int row, column;
  for (int turn = 0; tiles.at(turn, row, column); ++turn) {
    for (int k = 0; k < a.k; k += kTileK) {
      wait_for_mbarrier(&shared.empty[at.stage], at.phase ^ 1);
      arrive_and_expect(&shared.full[at.stage], layout::kStageBytes);
      const uint32 to = layout::stages(dynamic) + at.stage * layout::kStageBytes;
      const uint32 box = shared_address(&shared.full[at.stage]);
      tma_load_tile(to, a.input, row, k, box);
      const uint32 part = to + layout::kInputBytes + rank * (kPart * kTileK * 2);
      if constexpr (Config::kCluster == 1) tma_load_tile(part, a.matrix, column, k, box);
      else tma_load_tile_multicast((1 << Config::kCluster) - 1, part, a.matrix, column + rank * kPart, k, box);
      at.next();
    }
  }
}

// Row: the row word that is deferred.
template <class Config, class Row>
ONEPASS_FUNCTION void multiply_tiles(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic) {
  using layout = linear_shared<Config>;
  constexpr int N = Config::kTileN;
  const tile_order<Config> tiles(a);
  const int own = static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1;  // which 64 rows of the tile
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  ring_position<Config::kStages> at;
  int row, column;
  for (int turn = 0; tiles.at(turn, row, column); ++turn) {
    float d[N / 2] = {};
    int previous = 0;  // the stage that the wgmma in flight reads
    for (int k = 0; k < a.k; k += kTileK) {
      wait_for_mbarrier(&shared.full[at.stage], at.phase);
      const uint32 stage = layout::stages(dynamic) + at.stage * layout::kStageBytes;
      const uint64 rows = tile_descriptor(stage + own * (64 * kTileK * 2)),
                   columns = tile_descriptor(stage + layout::kInputBytes);
      begin_wgmma();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step)
        add_wgmma<Config::kX, N>(d, rows + 2 * step, columns + 2 * step, k + step > 0);
      commit_wgmma();
      wait_for_wgmma<1>();
      if (is_leader && k > 0) arrive_in_cluster<Config::kCluster>(&shared.empty[previous]);
      previous = at.stage;
      at.next();
    }
    wait_for_wgmma<0>();
    if (is_leader) arrive_in_cluster<Config::kCluster>(&shared.empty[previous]);
    if constexpr (Config::kDefers) {
      wait_for_mbarrier(&shared.norm_full, turn & 1);
      apply_norm<Row, N>(d, shared.norm + 64 * own, shared.folded);
    }
    wait_for_mbarrier(&shared.accumulators_empty[own], (turn + (Config::kBuffers == 2 ? 1 : 1 + own)) & 1);
    store_accumulators<Config::kX, N>(d, layout::accumulators(dynamic, own));
    arrive(&shared.accumulators_full[own]);
  }
}

// The epilogue of 64 rows of accumulators. All threads call `between` after every few rows.
template <class Config, class Line, class Between>
ONEPASS_FUNCTION void run_epilogue(const arguments& a, char* accumulators, int row, int column,
                                   const Between& between) {
  using index = typename Config::index;
  const int across = static_cast<int>(threadIdx.x) % Config::kAcross,
            down = static_cast<int>(threadIdx.x) / Config::kAcross;
  const index first = column + across * Config::kVectorSize;
  const int count = Config::kExact ? Config::kVectorSize : count_at<Config::kVectorSize>(first, a.columns);
  for (int top = 0; top < 64; top += Config::kDown * Config::kUnroll) {
#pragma unroll
    for (int u = 0; u < Config::kUnroll; ++u) {
      const int r = top + u * Config::kDown + down;
      if (r >= 64) continue;
      cursor<Config, Line> at(a);
      at.set_copies(accumulators + (swizzled_piece(across, r) - across) * 16, r);
      at.set_stage(0);
      at.set_vector(0);
      at.set_row(static_cast<index>(row) + r, row + r < a.rows);
      at.set_column(first, count);
      at.store_y(Line::pre::forward(at.x(), at));
    }
    between();
  }
}

template <class Config, class Before, class Behind>
ONEPASS_FUNCTION void linear_forward(const linear_arguments& a) {
  using layout = linear_shared<Config>;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ layout shared;
  if (threadIdx.x == 0) shared.init_barriers();
  arrive_at_cluster();
  wait_for_cluster();
  const tile_order<Config> tiles(a);
  // setmaxnreg: 128 * (152 + 2 * 168 + 24) registers are the 65536 of an SM.
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (group == 0) {
    setmaxnreg_inc<152>();
    const auto epilogue = [&](int turn, int row, int column, const auto& between) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wait_for_mbarrier(&shared.accumulators_full[half], turn & 1);
        run_epilogue<typename Config::behind, Behind>(a.behind, layout::accumulators(dynamic, half), row + 64 * half,
                                                      column, between);
        arrive(&shared.accumulators_empty[Config::kBuffers == 2 ? half : 1 - half]);
      }
    };
    int row, column;
    if constexpr (Config::kTakesMoments) {
      deferred_norms<Config, Before> norms(a, shared, dynamic);
      for (int turn = 0; tiles.at(turn, row, column); ++turn) {
        norms.finish_turn(turn, row, column);
        epilogue(turn, row, column, [&] { norms.take_if_loaded(); });
      }
    } else {
      for (int turn = 0; tiles.at(turn, row, column); ++turn) {
        if constexpr (Config::kDefers) store_norm<Config>(a, shared, norm_of_row<Before>(a, row), column);
        epilogue(turn, row, column, [] {});
      }
    }
  } else if (group == 3) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 3 * kWarpgroupThreads) load_tiles<Config>(a, shared, dynamic);
    __syncwarp();
  } else {
    setmaxnreg_inc<168>();
    multiply_tiles<Config, typename Before::row>(a, shared, dynamic);
  }
  arrive_at_cluster();  // no block exits while another multicasts to it or arrives at its mbarriers
  wait_for_cluster();
}

ONEPASS_END
