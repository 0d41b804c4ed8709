// A norm before `linear`, deferred into the GEMM's epilogue: with W' = W ∘ scale, whose rows are centred for
// layer_norm,
//   linear(layer_norm(x) ∘ scale + bias) = (x W'ᵀ - mean sumᵀ) rstd + offsetᵀ,   sum = W' 1,   offset = W bias.
// x enters the GEMM unrounded; W' is rounded. sum adds up the rounded elements of W', so that the mean drops out
// however large it is beside the deviation. (Centring is exact, for the normalised row sums to zero; it keeps the
// accumulators small.)
#pragma once

#include "onepass/kernel/linear/gemm_tiles.cuda.h"
#include "onepass/kernel/row/statistics.cuda.h"

ONEPASS_BEGIN

struct fold_arguments {
  const void *matrix, *scale, *bias;  // [columns, k], its rows `stride` elements apart; [k]
  void* folded;                       // [columns, k]
  float *sums, *offsets;              // [columns]
  int64 k, stride;
};

// The sum of `own` over a block of Threads.
template <int Threads>
ONEPASS_FUNCTION float sum_of_block(float own) {
  __shared__ float shared[Threads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) own += __shfl_xor_sync(0xffffffffu, own, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < Threads / 32; ++warp) total += shared[warp];
  return total;
}

// Folds a norm into the matrix: a block of Threads for each row. Config: kMatrix, kScale, kBias (dtype::none: there is
// none), kCentred.
template <class Config, int Threads>
ONEPASS_FUNCTION void fold(const fold_arguments& a) {
  constexpr int V = 8;
  using L = pack<float, V>;
  using matrix_memory = memory<Config::kMatrix, V, V>;
  const auto* row =
      static_cast<const typename stored<Config::kMatrix>::type*>(a.matrix) + static_cast<int64>(blockIdx.x) * a.stride;
  auto* folded = static_cast<typename stored<Config::kMatrix>::type*>(a.folded) + static_cast<int64>(blockIdx.x) * a.k;
  const auto each = [&](const auto& body) {
    for (int64 k = threadIdx.x * V; k < a.k; k += Threads * V) {
      const L w = matrix_memory::template numbers_of<float>(matrix_memory::load(row + k, V));
      L scaled = w;
      if constexpr (Config::kScale != dtype::none) scaled = w * load_as<V>(Config::kScale, a.scale, k);
      body(k, w, scaled);
    }
  };
  float sum = 0, offset = 0;
  each([&](int64 k, L w, L scaled) {
    sum += sum_lanes(scaled);
    if constexpr (Config::kBias != dtype::none) offset += sum_lanes(w * load_as<V>(Config::kBias, a.bias, k));
  });
  const float mean = Config::kCentred ? sum_of_block<Threads>(sum) / static_cast<float>(a.k) : 0.0f;
  sum = 0;
  each([&](int64 k, L, L scaled) {
    const L rounded = rounded_to<Config::kMatrix>(scaled - L(mean));
    matrix_memory::store(folded + k, rounded, V);
    sum += sum_lanes(rounded);
  });
  sum = sum_of_block<Threads>(sum);
  offset = sum_of_block<Threads>(offset);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum, a.offsets[blockIdx.x] = offset;
}

// The moments of a row word's statistics, from tiles of 64 columns in shared memory (device/matrix.cuda.h): a thread
// has a row. Σd² / n - (Σd / n)² is over d = x - shift, where shift is the mean of the row's first tile. It loses at
// most a factor of n / 64 of float32's precision, where the other tiles' mean is far from the first's.
template <dtype D, class Row>
class tile_moments {
 public:
  explicit ONEPASS_FUNCTION tile_moments(float inverse_columns) : inverse_columns_(inverse_columns) {}

  ONEPASS_FUNCTION void begin() {
    begun_ = false;
    sum_ = squares_ = vector(0.0f);
  }
  // The first `count` columns of a tile's row.
  ONEPASS_FUNCTION void take(const char* tile, int row, int count) {
    vector x[8];
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) x[piece] = numbers_at(tile + row * 128 + (piece ^ (row & 7)) * 16);
    if constexpr (kCentres) {
      if (!begun_) shift_ = mean_of(x, count);
      begun_ = true;
    }
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      if constexpr (kCentres) {
        vector d = x[piece] - vector(shift_);
        if (count < 64) d = where(first_n<vector>(count - 8 * piece), d, vector(0.0f));
        sum_ = sum_ + d;
        squares_ = fma(d, d, squares_);
      } else {  // TMA fills what is behind the row's end with zeros
        squares_ = fma(x[piece], x[piece], squares_);
      }
    }
  }

  // Row::statistics calls these.
  ONEPASS_FUNCTION float inverse_columns() const { return inverse_columns_; }
  ONEPASS_FUNCTION float squares() const { return sum_lanes(squares_); }
  ONEPASS_FUNCTION word::row_moments<float> moments() const {
    const float rest = sum_lanes(sum_) * inverse_columns_;
    return {shift_ + rest, 0.0f, fmaf(-rest, rest, squares() * inverse_columns_)};
  }

 private:
  using vector = pack<float, 8>;
  static constexpr bool kCentres = Row::about.statistics > 1;

  static ONEPASS_FUNCTION vector numbers_at(const char* at) {
    using numbers_in = memory<D, 8, 8>;
    return numbers_in::template numbers_of<float>(numbers_in::load_written(at, 8));
  }
  static ONEPASS_FUNCTION float mean_of(const vector (&x)[8], int count) {
    vector total = x[0];
#pragma unroll
    for (int piece = 1; piece < 8; ++piece) total = total + x[piece];
    return sum_lanes(total) / static_cast<float>(count);
  }
  float inverse_columns_, shift_ = 0;
  bool begun_ = false;
  vector sum_, squares_;
};

// (d - mean sum) rstd + offset for 64 rows of wgmma accumulators, without the mean where Row has none. norm: mean and
// rstd of each row. norm and folded are in shared memory, since a multiplying thread has no registers to prefetch into.
template <class Row, int N>
ONEPASS_FUNCTION void apply_norm(float (&d)[N / 2], const word::pair<float>* norm, const folded_pair* folded) {
  const int lane_id = static_cast<int>(threadIdx.x) % 32, row = row_of_accumulators();
  const word::pair<float> above = norm[row], below = norm[row + 8];
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const folded_pair of = folded[4 * j + lane_id % 4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float &a = d[4 * j + i], &b = d[4 * j + 2 + i];
      if constexpr (Row::about.statistics > 1) {
        a = fmaf(-above.first, of.sum[i], a);
        b = fmaf(-below.first, of.sum[i], b);
      }
      a = fmaf(a, above.second, of.offset[i]);
      b = fmaf(b, below.second, of.offset[i]);
    }
  }
}

// A row's statistics as apply_norm takes them.
template <class Row>
ONEPASS_FUNCTION word::pair<float> norm_of(word::row_numbers<float> statistics) {
  return Row::about.statistics > 1 ? word::pair<float>{statistics.first, statistics.second}
                                   : word::pair<float>{0.0f, statistics.first};
}
// Stores to shared memory what apply_norm reads: the norm of this thread's row, and sum and offset of the tile's
// columns.
template <class Config>
ONEPASS_FUNCTION void store_norm(const linear_arguments& a, linear_shared<Config>& shared, word::pair<float> norm,
                                 int column) {
  shared.norm[threadIdx.x] = norm;
  for (int i = static_cast<int>(threadIdx.x); i < Config::kTileN / 2; i += kWarpgroupThreads) {
    const int at = column + 2 * i;
    shared.folded[i] = {{a.sums[at], a.sums[at + 1]}, {a.offsets[at], a.offsets[at + 1]}};
  }
  arrive(&shared.norm_full);
}
// The norm of this thread's row of the tile that begins at `row`, from statistics in memory.
template <class Line>
ONEPASS_FUNCTION word::pair<float> norm_of_row(const linear_arguments& a, int row) {
  const int64 own = row + static_cast<int>(threadIdx.x);
  if (own >= a.before.rows) return {};
  const auto* statistics = static_cast<const float*>(a.before.statistics);
  const float second = Line::row::about.statistics > 1 ? statistics[a.before.rows + own] : 0.0f;
  return norm_of<typename Line::row>(word::row_numbers<float>{statistics[own], second});
}

// The statistics of the rows of this block's tiles, from the tiles of x in the ring: a thread has a row of each tile.
template <class Config, class Line>
class deferred_norms {
 public:
  ONEPASS_FUNCTION deferred_norms(const linear_arguments& a, linear_shared<Config>& shared, char* dynamic)
      : a_(a), shared_(shared), dynamic_(dynamic), tiles_(a), moments_(static_cast<float>(a.before.inverse_columns)) {
    begin(0);
  }

  // Takes the rest of this turn's row, stores its norm for apply_norm and begins the next turn.
  ONEPASS_FUNCTION void finish_turn(int turn, int row, int column) {
    while (column_ < a_.k) take();
    float eps = 0;
    if constexpr (Line::row_parameter >= 0) eps = static_cast<float>(a_.before.parameter[Line::row_parameter]);
    const word::row_numbers<float> of = Line::row::statistics(moments_, eps);
    store_norm(a_, shared_, norm_of<typename Line::row>(of), column);
    const int64 own = row + static_cast<int>(threadIdx.x);
    if (Config::before::kSavesStatistics && column == 0 && own < a_.before.rows) save<Line>(a_.before, own, of);
    begin(turn + 1);
  }
  // Takes a tile of the next turn, if it has been loaded.
  ONEPASS_FUNCTION void take_if_loaded() {
    if (column_ < a_.k && __all_sync(0xffffffffu, is_phase_complete(&shared_.full[at_.stage], at_.phase))) take();
  }

 private:
  using layout = linear_shared<Config>;

  ONEPASS_FUNCTION void begin(int turn) {
    int row, column;
    column_ = tiles_.at(turn, row, column) ? 0 : a_.k;
    moments_.begin();
  }
  ONEPASS_FUNCTION void take() {
    wait_for_mbarrier(&shared_.full[at_.stage], at_.phase);
    const int64 left = a_.k - column_;
    moments_.take(layout::stage(dynamic_, at_.stage), static_cast<int>(threadIdx.x),
                  left < kTileK ? static_cast<int>(left) : kTileK);
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared_.empty[at_.stage]);
    at_.next();
    column_ += kTileK;
  }
  const linear_arguments& a_;
  layout& shared_;
  char* dynamic_;
  const tile_order<Config> tiles_;
  tile_moments<Config::kX, typename Line::row> moments_;
  ring_position<Config::kStages> at_;
  int64 column_ = 0;
};

ONEPASS_END
