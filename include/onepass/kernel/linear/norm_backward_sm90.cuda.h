// Backward of a norm and a `linear` of at most 64 features (sm_90a), x read once and its gradient written once.
//
// With x̂ = (x - mean) rstd, W' = W ∘ scale, its rows centred for layer_norm (kernel/linear/folded_norm.cuda.h), and the
// result's gradient times its row's rstd, rounded, r:
//   g = r W',   dx = g - x̂ (Σ g x̂) / columns,   and of rᵀ x with Σ r mean taken off: the products G of
//   narrow_gradients, below.
// (Centred rows of W' sum to zero, so that the mean of g, which layer_norm's gradient takes off, is zero.)
//
// A team of blocks has tiles of 64 rows, each block 256 columns of them. A row's Σ g x̂ is the sum of what all blocks of
// the team find, through global memory; meanwhile they go on with the next tile, and keep x in shared memory. Of a
// block, the first warpgroup brings tiles and makes r. Two have 128 columns each, and G in their registers to the end;
// they wait for nothing but store_async. Of the last, a warp tells the team of the block's sums, two add up what all
// blocks told, and one sends dx on its way.
//
// Config:
//   kX        storage type throughout: bf16 or f16
//   kCentres  layer_norm's statistics, or rms_norm's
//   kStages   tiles in shared memory
//   kBehind   tiles that a row's sums are waited for
#pragma once

#include "onepass/kernel/linear/gemm_tiles.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"

ONEPASS_BEGIN

struct narrow_arguments {
  tensor_map x, dx, matrix;  // matrix: W'
  const void* gradient;      // [rows, features], its rows `stride` numbers apart, at multiples of 16 bytes
  int64 rows, depth, features, stride;
  double inverse_columns;
  const float* statistics;  // [1 or 2][rows]
  float* shares;            // [tiles][slices][64]: parts of Σ g x̂
  uint32* ready;            // [tiles]: how many there are of those
  float* products;          // [teams][64 slices 256 + 128]: G's parts, then Σ gradient and Σ r mean
  int slices, teams;        // of 256 columns; of `slices` blocks
};

inline constexpr int kNarrowRows = 64, kNarrowColumns = 256, kFeatures = 64, kTileBytes = 64 * 128;

template <class Config>
struct narrow_shared {
  static constexpr int kTiles = kNarrowColumns / 64, kStageBytes = (kTiles + 1) * kTileBytes;

  // Of the matrix; of each stage: x and r are there, the block's sums, the team's sums; dx is there, and has left.
  uint64 matrix_full, full[Config::kStages], share_full[Config::kStages], sums_full[Config::kStages],
      done[Config::kStages], empty[Config::kStages];
  word::pair<float> norm[Config::kStages][kNarrowRows];
  float share[Config::kStages][2][kNarrowRows], sums[Config::kStages][kNarrowRows];
  float columns[2][kWarpgroupThreads / 8][kFeatures];

  static ONEPASS_FUNCTION char* matrix(char* dynamic) { return dynamic + (-shared_address(dynamic) & 1023u); }
  // x's tiles, then r.
  static ONEPASS_FUNCTION char* stage_at(char* dynamic, int stage) {
    return matrix(dynamic) + kTiles * kTileBytes + stage * kStageBytes;
  }
  static ONEPASS_FUNCTION char* scaled(char* dynamic, int stage) {
    return stage_at(dynamic, stage) + kTiles * kTileBytes;
  }

  ONEPASS_FUNCTION void open() {
    init_mbarrier(&matrix_full, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      init_mbarrier(&full[stage], kWarpgroupThreads + 1);
      init_mbarrier(&share_full[stage], kNarrowRows);
      init_mbarrier(&sums_full[stage], kNarrowRows);
      init_mbarrier(&done[stage], 2 * kWarpgroupThreads);
      init_mbarrier(&empty[stage], 1);
    }
    fence_mbarrier_init();
  }
};

// Where this block is: which tiles of rows, which columns.
template <class Config>
struct narrow_part {
  int team, slice, tiles, turns;
  const int teams;
  explicit ONEPASS_FUNCTION narrow_part(const narrow_arguments& a)
      : team(static_cast<int>(blockIdx.x) / a.slices),
        slice(static_cast<int>(blockIdx.x) % a.slices),
        tiles(static_cast<int>((a.rows + kNarrowRows - 1) / kNarrowRows)),
        turns(tiles > team ? (tiles - team + a.teams - 1) / a.teams : 0),
        teams(a.teams) {}

  ONEPASS_FUNCTION int tile(int turn) const { return team + turn * teams; }
  ONEPASS_FUNCTION int first_row(int turn) const { return tile(turn) * kNarrowRows; }
  // body(turn, stage, which time the stage is used, as a mailbox counts)
  template <class Body>
  ONEPASS_FUNCTION void each_turn(const Body& body) const {
    for (int turn = 0; turn < turns; ++turn) body(turn, turn % Config::kStages, turn / Config::kStages & 1);
  }
};

// The first warpgroup: a thread has eight features of every 16th row.
template <class Config>
class narrow_bringer {
 public:
  ONEPASS_FUNCTION narrow_bringer(const narrow_arguments& a, narrow_shared<Config>& shared, char* dynamic)
      : a_(a), shared_(shared), dynamic_(dynamic), part_(a) {}

  ONEPASS_FUNCTION void run() {
    if (threadIdx.x == 0) load_matrix_async();
    ask(0);
    part_.each_turn([&](int turn, int stage, uint32 phase) {
      wait_for_mbarrier(&shared_.empty[stage], phase ^ 1);
      load_async(turn, stage);
      ask(turn + 1);
    });
    if (part_.slice == 0) store_columns();
  }

 private:
  using layout = narrow_shared<Config>;
  using vector = pack<float, 8>;
  using gradients = memory<Config::kX, 8, 8>;
  static constexpr int kEach = kNarrowRows / (kWarpgroupThreads / 8);  // rows of a thread

  ONEPASS_FUNCTION void load_matrix_async() {
    arrive_and_expect(&shared_.matrix_full, layout::kTiles * kTileBytes);
    for (int i = 0; i < layout::kTiles; ++i)
      tma_load_tile(shared_address(layout::matrix(dynamic_) + i * kTileBytes), a_.matrix, 0,
                    part_.slice * kNarrowColumns + i * 64, shared_address(&shared_.matrix_full));
  }
  // What this thread needs of a turn's gradient and norm, a turn ahead.
  ONEPASS_FUNCTION void ask(int turn) {
    if (turn >= part_.turns) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64 row = part_.first_row(turn) + i * (kWarpgroupThreads / 8) + down_;
      const bool exists = row < a_.rows;
      const auto* from = static_cast<const uint16*>(a_.gradient) + row * a_.stride + piece_ * 8;
      gradient_[i] = exists && piece_ * 8 < a_.features ? gradients::load(from, 8) : gradients::buffer_of(vector(0.0f));
      norm_[i] = {0.0f, 0.0f};
      if (exists) norm_[i].first = a_.statistics[row];
      if (exists && Config::kCentres) norm_[i].second = a_.statistics[a_.rows + row];
    }
  }
  ONEPASS_FUNCTION void load_async(int turn, int stage) {
    if (threadIdx.x == 0) {
      arrive_and_expect(&shared_.full[stage], layout::kTiles * kTileBytes);
      for (int i = 0; i < layout::kTiles; ++i)
        tma_load_tile(shared_address(layout::stage_at(dynamic_, stage) + i * kTileBytes), a_.x, part_.first_row(turn),
                      part_.slice * kNarrowColumns + i * 64, shared_address(&shared_.full[stage]));
    }
    char* to = layout::scaled(dynamic_, stage);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * (kWarpgroupThreads / 8) + down_;
      const word::pair<float> norm = Config::kCentres ? norm_[i] : word::pair<float>{0.0f, norm_[i].first};
      const vector gradient = gradients::template numbers_of<float>(gradient_[i]);
      const vector scaled = rounded_to<Config::kX>(gradient * vector(norm.second));
      gradients::store(to + row * 128 + (piece_ ^ (row & 7)) * 16, scaled, 8);
      sum_ = sum_ + gradient;
      sum_of_means_ = fma(scaled, vector(norm.first), sum_of_means_);
      if (piece_ == 0) shared_.norm[stage][row] = norm;
    }
    fence_proxy_async_shared();
    arrive(&shared_.full[stage]);
  }
  ONEPASS_FUNCTION void store_columns() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shared_.columns[0][down_][piece_ * 8 + i] = sum_.v[i];
      shared_.columns[1][down_][piece_ * 8 + i] = sum_of_means_.v[i];
    }
    sync_warpgroup(1);
    const int feature = static_cast<int>(threadIdx.x) % kFeatures, which = static_cast<int>(threadIdx.x) / kFeatures;
    float total = 0;
    for (int i = 0; i < kWarpgroupThreads / 8; ++i) total += shared_.columns[which][i][feature];
    const int64 products = int64{kFeatures} * a_.slices * kNarrowColumns;
    a_.products[part_.team * (products + 2 * kFeatures) + products + which * kFeatures + feature] = total;
  }

  const narrow_arguments& a_;
  layout& shared_;
  char* dynamic_;
  const narrow_part<Config> part_;
  const int piece_ = static_cast<int>(threadIdx.x) % 8, down_ = static_cast<int>(threadIdx.x) / 8;
  typename gradients::buffer gradient_[kEach];
  word::pair<float> norm_[kEach];
  vector sum_ = vector(0.0f), sum_of_means_ = vector(0.0f);
};

// A warpgroup that has 128 columns.
template <class Config>
class narrow_columns {
 public:
  ONEPASS_FUNCTION narrow_columns(const narrow_arguments& a, narrow_shared<Config>& shared, char* dynamic)
      : a_(a), shared_(shared), dynamic_(dynamic), part_(a) {}

  ONEPASS_FUNCTION void run() {
    wait_for_mbarrier(&shared_.matrix_full, 0);
    for (int turn = 0; turn < part_.turns + Config::kBehind; ++turn) {
      if (turn < part_.turns) share(turn);
      if (turn >= Config::kBehind) finish(turn - Config::kBehind);
    }
    store_products();
  }

 private:
  using layout = narrow_shared<Config>;

  ONEPASS_FUNCTION char* tiles_of(int stage) const { return layout::stage_at(dynamic_, stage) + own_ * 2 * kTileBytes; }

  // g: of this thread 2 rows and 32 columns, as add_wgmma has them.
  ONEPASS_FUNCTION void multiply(int stage, float (&g)[64]) const {
    const uint64 rows = tile_descriptor(shared_address(layout::scaled(dynamic_, stage))),
                 matrix = transposed_tile_descriptor(shared_address(layout::matrix(dynamic_) + own_ * 2 * kTileBytes));
    begin_wgmma();
#pragma unroll
    for (int step = 0; step < kFeatures / 16; ++step)
      add_wgmma<Config::kX, 128, 0, 1>(g, rows + 2 * step, matrix + (2048 >> 4) * step, step > 0);
    commit_wgmma();
  }
  // body(two numbers of x, where they are in g, i): of this thread's row i.
  template <class Body>
  ONEPASS_FUNCTION void each_pair(char* tiles, const Body& body) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_ + 8 * i;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        char* piece = tiles + j / 8 * kTileBytes + row * 128 + ((j % 8) ^ (row & 7)) * 16;
        body(reinterpret_cast<uint32*>(piece)[column_], 4 * j + 2 * i, i);
      }
    }
  }
  static ONEPASS_FUNCTION float number(uint32 pair, int which) {
    return from_storage<Config::kX, float>(static_cast<uint16>(pair >> (16 * which)));
  }

  // This warpgroup's part of the rows' sums; and of G.
  ONEPASS_FUNCTION void share(int turn) {
    const int stage = turn % Config::kStages;
    wait_for_mbarrier(&shared_.full[stage], turn / Config::kStages & 1);
    float g[64] = {};
    multiply(stage, g);
    const uint64 rows = transposed_tile_descriptor(shared_address(layout::scaled(dynamic_, stage))),
                 columns = transposed_tile_descriptor(shared_address(tiles_of(stage)));
#pragma unroll
    for (int step = 0; step < kNarrowRows / 16; ++step)
      add_wgmma<Config::kX, 128, 1, 1>(products_, rows + (2048 >> 4) * step, columns + (2048 >> 4) * step, true);
    commit_wgmma();
    wait_for_wgmma<1>();
    const word::pair<float> norm[2] = {shared_.norm[stage][row_], shared_.norm[stage][row_ + 8]};
    float sum[2] = {0.0f, 0.0f};
    each_pair(tiles_of(stage), [&](const uint32& x, int at, int i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) sum[i] = fmaf(g[at + k], number(x, k) - norm[i].first, sum[i]);
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] *= norm[i].second;
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      if (column_ == 0) shared_.share[stage][own_][row_ + 8 * i] = sum[i];
    }
    if (column_ == 0) arrive(&shared_.share_full[stage]);
    wait_for_wgmma<0>();
  }
  // dx takes x's place in shared memory.
  ONEPASS_FUNCTION void finish(int turn) {
    const int stage = turn % Config::kStages;
    float g[64] = {};
    multiply(stage, g);
    wait_for_mbarrier(&shared_.sums_full[stage], turn / Config::kStages & 1);
    wait_for_wgmma<0>();
    float mean[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const word::pair<float> norm = shared_.norm[stage][row_ + 8 * i];
      mean[i] = norm.first, factor[i] = -norm.second * shared_.sums[stage][row_ + 8 * i];
    }
    each_pair(tiles_of(stage), [&](uint32& x, int at, int i) {
      const uint32 pair = x;
      x = pair_to_storage<Config::kX>(fmaf(number(pair, 0) - mean[i], factor[i], g[at]),
                                      fmaf(number(pair, 1) - mean[i], factor[i], g[at + 1]));
    });
    fence_proxy_async_shared();
    arrive(&shared_.done[stage]);
  }
  ONEPASS_FUNCTION void store_products() const {
    const int64 stride = static_cast<int64>(a_.slices) * kNarrowColumns;
    float* to = a_.products + part_.team * (kFeatures * stride + 2 * kFeatures) + row_ * stride +
                part_.slice * kNarrowColumns + own_ * 128 + column_ * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) to[i * 8 * stride + j * 8 + k] = products_[4 * j + 2 * i + k];
  }

  const narrow_arguments& a_;
  layout& shared_;
  char* dynamic_;
  const narrow_part<Config> part_;
  const int own_ = static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1;  // which 128 columns
  // Of a product's 64 rows and 8 columns: this thread's first row, and its pair of columns.
  const int row_ = row_of_accumulators(), column_ = static_cast<int>(threadIdx.x) % 4;
  float products_[64] = {};
};

// What the block's two warpgroups found of a row.
template <class Config>
ONEPASS_FUNCTION float share_of(const narrow_shared<Config>& shared, int stage, int row) {
  return shared.share[stage][0][row] + shared.share[stage][1][row];
}
// A warp: the block's part of the rows' sums, two rows a thread, to all blocks of the team.
template <class Config>
ONEPASS_FUNCTION void tell_of_sums(const narrow_arguments& a, narrow_shared<Config>& shared) {
  if (a.slices == 1) return;
  const narrow_part<Config> part(a);
  const int thread = static_cast<int>(threadIdx.x) % 32;
  part.each_turn([&](int turn, int stage, uint32 phase) {
    wait_for_mbarrier(&shared.share_full[stage], phase);
    float* to = a.shares + (static_cast<int64>(part.tile(turn)) * a.slices + part.slice) * kNarrowRows;
    for (int row = thread; row < kNarrowRows; row += 32) to[row] = share_of(shared, stage, row);
    __syncwarp();
    if (thread == 0) add_for_all(a.ready + part.tile(turn), 1);
  });
}
// Two warps: the sums of all blocks of the team, a row a thread.
template <class Config>
ONEPASS_FUNCTION void add_up_sums(const narrow_arguments& a, narrow_shared<Config>& shared, int row) {
  const narrow_part<Config> part(a);
  part.each_turn([&](int turn, int stage, uint32 phase) {
    wait_for_mbarrier(&shared.share_full[stage], phase);  // others' are hardly there before this block's
    float sum = 0;
    if (a.slices == 1) {
      sum = share_of(shared, stage, row);
    } else {
      wait_for_count(a.ready + part.tile(turn), static_cast<uint32>(a.slices));
      const float* from = a.shares + static_cast<int64>(part.tile(turn)) * a.slices * kNarrowRows + row;
#pragma unroll 16
      for (int i = 0; i < a.slices; ++i) sum += from[i * kNarrowRows];
    }
    shared.sums[stage][row] = sum * static_cast<float>(a.inverse_columns);
    arrive(&shared.sums_full[stage]);
  });
}
// A thread: dx leaves from shared memory.
template <class Config>
ONEPASS_FUNCTION void send_results(const narrow_arguments& a, narrow_shared<Config>& shared, char* dynamic) {
  using layout = narrow_shared<Config>;
  const narrow_part<Config> part(a);
  part.each_turn([&](int turn, int stage, uint32 phase) {
    wait_for_mbarrier(&shared.done[stage], phase);
    for (int i = 0; i < layout::kTiles; ++i)
      store_tile(shared_address(layout::stage_at(dynamic, stage) + i * kTileBytes), a.dx, part.first_row(turn),
                 part.slice * kNarrowColumns + i * 64);
    close_stores();
    wait_for_stores();
    arrive(&shared.empty[stage]);
  });
}

template <class Config>
ONEPASS_FUNCTION void narrow_linear_backward(const narrow_arguments& a) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ narrow_shared<Config> shared;
  if (threadIdx.x == 0) shared.open();
  __syncthreads();
  // What registers the groups take makes the 65536 of an SM.
  const int group = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (group == 0) {
    setmaxnreg_dec<88>();
    narrow_bringer<Config>(a, shared, dynamic).run();
  } else if (group == 3) {
    setmaxnreg_dec<40>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    if (thread < 32) tell_of_sums(a, shared);
    else if (thread < 96) add_up_sums(a, shared, thread - 32);
    else if (thread == 96) send_results(a, shared, dynamic);
  } else {
    setmaxnreg_inc<192>();
    narrow_columns<Config>(a, shared, dynamic).run();
  }
}

// The parameters' gradients of a norm and a `linear` of few features, of what the kernel above
// gives: with its products less the means, G, and the gradient's column sums s, of the matrix G ∘ scale + s bias, of
// scale Σ W ∘ G, of bias Wᵀ s; of a bias behind the product s.
//
// Config: kMatrix, kScale, kBias, kResultBias (dtype::none: there is none).

struct narrow_gradients_arguments {
  const float* products;              // [64, stride], then s, then Σ r mean
  const void *matrix, *scale, *bias;  // [features, depth], its rows `matrix_stride` apart; [depth], or null
  void *matrix_gradient, *scale_gradient, *bias_gradient, *result_bias_gradient;  // or null
  int64 depth, features, stride, matrix_stride;
};

// Blocks of 256 threads have 32 columns each.
template <class Config>
ONEPASS_FUNCTION void narrow_gradients(const narrow_gradients_arguments& a) {
  using number = typename stored<Config::kMatrix>::type;
  const int across = static_cast<int>(threadIdx.x) % 32, down = static_cast<int>(threadIdx.x) / 32;
  const int64 column = static_cast<int64>(blockIdx.x) * 32 + across;
  const float *sums = a.products + kFeatures * a.stride, *means = sums + kFeatures;
  if constexpr (Config::kResultBias != dtype::none) {
    const auto feature = static_cast<int64>(threadIdx.x);
    if (blockIdx.x == 0 && feature < a.features)
      store_as<1>(Config::kResultBias, a.result_bias_gradient, feature, pack<float, 1>(sums[feature]), 1);
  }
  __shared__ float shared[2][8][32];
  float of_scale = 0, of_bias = 0;
  if (column < a.depth) {
    float scale = 1, bias = 0;
    if constexpr (Config::kScale != dtype::none) scale = load_as<1>(Config::kScale, a.scale, column).v[0];
    if constexpr (Config::kBias != dtype::none) bias = load_as<1>(Config::kBias, a.bias, column).v[0];
    for (int64 feature = down; feature < a.features; feature += 8) {
      const float g = a.products[feature * a.stride + column] - means[feature], s = sums[feature];
      const float w = from_storage<Config::kMatrix, float>(
          static_cast<const number*>(a.matrix)[feature * a.matrix_stride + column]);
      if (a.matrix_gradient != nullptr)
        static_cast<number*>(a.matrix_gradient)[feature * a.depth + column] =
            to_storage<Config::kMatrix>(fmaf(g, scale, s * bias));
      of_scale = fmaf(w, g, of_scale);
      of_bias = fmaf(w, s, of_bias);
    }
  }
  shared[0][down][across] = of_scale, shared[1][down][across] = of_bias;
  __syncthreads();
  if (down >= 2 || column >= a.depth) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += shared[down][i][across];
  if constexpr (Config::kScale != dtype::none) {
    if (down == 0 && a.scale_gradient != nullptr)
      store_as<1>(Config::kScale, a.scale_gradient, column, pack<float, 1>(total), 1);
  }
  if constexpr (Config::kBias != dtype::none) {
    if (down == 1 && a.bias_gradient != nullptr)
      store_as<1>(Config::kBias, a.bias_gradient, column, pack<float, 1>(total), 1);
  }
}

ONEPASS_END
