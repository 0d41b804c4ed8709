// The GEMM kernel's arguments, tile scheduler and shared memory (kernel/linear/gemm_sm90.cuda.h).
#pragma once

#include "onepass/kernel/common/cursor.cuda.h"
#include "onepass/kernel/common/warpgroups.cuda.h"

ONEPASS_BEGIN

// sum and offset of two columns of the result, for a deferred norm (kernel/linear/folded_norm.cuda.h).
struct alignas(16) folded_pair {
  float sum[2], offset[2];
};

struct linear_arguments {
  tensor_map input, matrix;
  int64 k;                      // columns of x and of the matrix
  const float *sums, *offsets;  // a deferred norm's, padded to whole tiles
  arguments behind, before;
};

inline constexpr int kTileM = 128, kTileK = 64;

// The tile scheduler: a cluster computes tiles in groups of kGroup rows of tiles, each group column by column, so that
// L2 keeps the tiles of x and of the matrix that are used again.
template <class Config>
struct tile_order {
  int down, across, clusters, cluster;

  explicit ONEPASS_FUNCTION tile_order(const linear_arguments& a)
      : down(static_cast<int>((a.behind.rows + kTileM * Config::kCluster - 1) / (kTileM * Config::kCluster))),
        across(static_cast<int>((a.behind.columns + Config::kTileN - 1) / Config::kTileN)),
        clusters(static_cast<int>(gridDim.x) / Config::kCluster),
        cluster(static_cast<int>(blockIdx.x) / Config::kCluster) {}

  // False when the cluster has no tile left; row and column: where this block's tile begins.
  ONEPASS_FUNCTION bool at(int turn, int& row, int& column) const {
    const int tile = turn * clusters + cluster;
    if (tile >= down * across) return false;
    const int of_group = Config::kGroup * across, group = tile / of_group, rest = tile - group * of_group;
    const int first = group * Config::kGroup, height = down - first < Config::kGroup ? down - first : Config::kGroup;
    const int rank = Config::kCluster > 1 ? cluster_rank() : 0;
    row = ((first + rest % height) * Config::kCluster + rank) * kTileM;
    column = rest / height * Config::kTileN;
    return true;
  }
};

template <class Config>
struct linear_shared {
  static constexpr int kInputBytes = kTileM * kTileK * 2, kMatrixBytes = Config::kTileN * kTileK * 2;
  static constexpr int kStageBytes = kInputBytes + kMatrixBytes;

  uint64 full[Config::kStages], empty[Config::kStages];
  uint64 accumulators_full[2], accumulators_empty[2];  // for each warpgroup that multiplies
  uint64 norm_full;                                    // where a norm is deferred
  word::pair<float> norm[Config::kDefers ? kTileM : 1];
  folded_pair folded[Config::kDefers ? Config::kTileN / 2 : 1];

  static ONEPASS_FUNCTION uint32 stages(char* dynamic) { return first_tile(dynamic); }
  static ONEPASS_FUNCTION char* stage(char* dynamic, int of) {
    return at_shared(dynamic, stages(dynamic)) + of * kStageBytes;
  }
  // The accumulators of a warpgroup's 64 rows.
  static ONEPASS_FUNCTION char* accumulators(char* dynamic, int group) {
    return stage(dynamic, Config::kStages) + group % Config::kBuffers * (64 * Config::kTileN * 2);
  }

  ONEPASS_FUNCTION void init_barriers() {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      init_mbarrier(&full[stage], 1);
      init_mbarrier(&empty[stage], 2 * Config::kCluster + (Config::kTakesMoments ? kWarpgroupThreads / 32 : 0));
    }
    for (int i = 0; i < 2; ++i) {
      init_mbarrier(&accumulators_full[i], kWarpgroupThreads);
      init_mbarrier(&accumulators_empty[i], kWarpgroupThreads);
    }
    init_mbarrier(&norm_full, kWarpgroupThreads);
    fence_mbarrier_init();
  }
};

ONEPASS_END
