// Stores a block's part of the column sums (kernel/row/column_sum.cuda.h adds the parts up).
#pragma once

#include "onepass/kernel/row/row_groups.cuda.h"

ONEPASS_BEGIN

template <bool First, class A, class B>
ONEPASS_FUNCTION auto choose_type(A a, B b) {
  if constexpr (First) return a;
  else return b;
}

// The operand whose column sum is number `slot`.
template <class Config>
constexpr __device__ int operand_of(int slot) {
  int i = 0;
  while ((Config::kWantsColumn >> i & 1) == 0 || bits_below(Config::kWantsColumn, i) != slot) ++i;
  return i;
}

template <class Config>
constexpr __device__ bool is_grouped(int slot) {
  if constexpr (!kGrouped<Config>) return false;
  else return (Config::kGroupedOperand >> operand_of<Config>(slot) & 1) != 0;
}

// Writes numbers of units of columns, of each vector one, into the block's part, or as the gradient: see write_part.
// The threads of a unit are neighbours in a warp, and are all here.
template <class Config, bool OfGroup>
ONEPASS_FUNCTION void write_units(const arguments& a, typename Config::arithmetic sum, int slot, int64 part,
                                  int64 first, int across, int down) {
  using T = typename Config::arithmetic;
  constexpr int V = Config::kVectorSize, kUnit = static_cast<int>(Config::kUnit), kThreads = kUnit / V,
                kDown = Config::kDown;
  static_assert(kThreads > 0 && kThreads <= 32 && Config::kAcross % kThreads == 0);
  const uint32 unit_first = threadIdx.x % 32 & ~static_cast<uint32>(kThreads - 1);
  const uint32 all = 0xffffffffu >> (32 - kThreads) << unit_first;
#pragma unroll
  for (int apart = kThreads / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(all, sum, apart);
  const int64 column = first + across * V, units = a.columns / kUnit;
  void* to = static_cast<T*>(a.column_partial) + (slot * a.parts + part) * a.columns;
  dtype type = sizeof(T) == 8 ? dtype::f64 : dtype::f32;
  if constexpr (OfGroup || Config::kOnePart) {
    const view& gradient = a.operand_gradient[operand_of<Config>(slot)];
    to = static_cast<char*>(gradient.data) + (OfGroup ? part : 0) * units * size_of(gradient.type),
    type = gradient.type;
  }
  const bool writes = across % kThreads == 0 && column < a.columns;
  if constexpr (kDown > 1) {
    __shared__ T of_rows[kDown][Config::kAcross / kThreads];
    __syncthreads();
    if (across % kThreads == 0) of_rows[down][across / kThreads] = sum;
    __syncthreads();
    if (down > 0 || !writes) return;
    double total = 0;
    for (int d = 0; d < kDown; ++d) total += static_cast<double>(of_rows[d][across / kThreads]);
    sum = static_cast<T>(total);
  }
  if (writes) store_as<1>(type, to, column / kUnit, pack<T, 1>(sum), 1);
}

// Writes a vector of one column sum into the block's part, number `part`, or, where there is but one, as the gradient
// that it is. `column` is this thread's, `first` that of the threads with across = 0. The block's rows are added in a
// fixed order, in double where they are many. OfGroup: of a group of rows, whose gradient is row `part`. Columns are
// counted in the line's order.
template <class Config, class Line, bool OfGroup = false>
ONEPASS_FUNCTION void write_part(const arguments& a, pack<typename Config::arithmetic, Config::kVectorSize> sum,
                                 int slot, int64 part, int64 first, int across, int down) {
  using T = typename Config::arithmetic;
  if constexpr (Config::kUnit > 1 && Line::channels != 0) {
    if ((Line::channels >> operand_of<Config>(slot) & 1) != 0)
      return write_units<Config, OfGroup>(a, sum.v[0], slot, part, first, across, down);
  }
  constexpr int V = Config::kVectorSize, kColumns = Config::kAcross * V, kDown = Config::kDown;
  constexpr dtype kSum = sizeof(T) == 8 ? dtype::f64 : dtype::f32;
  void* to = static_cast<T*>(a.column_partial) + (slot * a.parts + part) * a.columns;
  dtype type = kSum;
  if constexpr (OfGroup) {
    const view& gradient = a.operand_gradient[operand_of<Config>(slot)];
    to = static_cast<char*>(gradient.data) + part * a.columns * size_of(gradient.type), type = gradient.type;
  } else if constexpr (Config::kOnePart) {
    const view& gradient = a.operand_gradient[operand_of<Config>(slot)];
    to = gradient.data, type = gradient.type;
  }
  if constexpr (kDown > 1) {
    constexpr int kThreads = Config::kThreads, kEach = (kColumns + kThreads - 1) / kThreads;  // columns a thread
    __shared__ T shared[kDown][kColumns];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i) shared[down][across * V + i] = sum.v[i];
    __syncthreads();
    using wide = decltype(choose_type<(kDown > 16)>(0.0, T(0)));
    wide total[kEach] = {};
    const auto for_own = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int c = i * kThreads + static_cast<int>(threadIdx.x);
        if (kColumns % kThreads == 0 || c < kColumns) body(i, c);
      }
    };
    const auto store = [&](int c, wide sum) {
      if (Config::kExact || first + c < a.columns)
        store_as<1>(type, to, column_order<Line>::column_at(a, first + c), pack<T, 1>(static_cast<T>(sum)), 1);
    };
    if constexpr (kDown > 16 && kThreads >= 2 * kColumns) {  // some threads a column, each with every kShares-th row
      constexpr int kShares = kThreads / kColumns;
      __shared__ wide of_share[kShares][kColumns];
      const int c = static_cast<int>(threadIdx.x) % kColumns, share = static_cast<int>(threadIdx.x) / kColumns;
      wide sum = 0;
      if (share < kShares) {
#pragma unroll 4
        for (int d = share; d < kDown; d += kShares) sum += static_cast<wide>(shared[d][c]);
        of_share[share][c] = sum;
      }
      __syncthreads();
      if (share > 0) return;
#pragma unroll
      for (int i = 1; i < kShares; ++i) sum += of_share[i][c];
      store(c, sum);
    } else {
      for (int d = 0; d < kDown; ++d) for_own([&](int i, int c) { total[i] += static_cast<wide>(shared[d][c]); });
      for_own([&](int i, int c) { store(c, total[i]); });
    }
  } else {
    const int64 column = first + across * V;
    const int count = count_at<V>(column, a.columns);
    if constexpr (!column_order<Line>::kZips) {
      store_as<Config::kRagged ? 1 : Config::kAccess>(type, to, column, sum, count);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        store_as<1>(type, to, column_order<Line>::column_at(a, column + i), pack<T, 1>(sum.v[i]), count > i);
    }
  }
}

ONEPASS_END
