// The second stage of column gradients: adds the blocks' parts in a fixed order, in double. Its work does not grow with
// rows.
#pragma once

#include "onepass/lane/device/memory.cuda.h"
#include "onepass/kernel/row/shapes.h"

namespace onepass {

struct column_sum_arguments {
  column_sum of[ONEPASS_SUMS];
};

}  // namespace onepass

ONEPASS_BEGIN

// A block of Threads, blockDim.x across (V columns each) by blockDim.y (a power of two) down the parts: grid
// (ceil(columns / its columns), sums). T: the parts' type. Grouped: each of the sums is one
// of several, whose parts, results and blocks follow each other.
template <class T, int Threads, int V, bool Grouped = false>
ONEPASS_FUNCTION void add_columns(const column_sum_arguments& a) {
  __shared__ double shared[Threads][V + 1];
  const int across = static_cast<int>(blockDim.x), down = static_cast<int>(blockDim.y),
            thread = static_cast<int>(threadIdx.y) * across + static_cast<int>(threadIdx.x);
  const auto& of = a.of[blockIdx.y];
  int64 block = blockIdx.x, group = 0;
  if constexpr (Grouped) {
    const int64 blocks = (of.columns + across * V - 1) / (across * V);
    group = block / blocks, block %= blocks;
  }
  const int64 column = (block * across + threadIdx.x) * V;
  const T* from = static_cast<const T*>(of.partial) + column;
  if constexpr (Grouped) from += group * of.parts * of.stride;
  const int64 left = of.columns - column;
  const int count = left >= V ? V : left > 0 ? static_cast<int>(left) : 0;
  double total[V] = {};
  wait_for_kernel_before();
  if (count > 0) {
    const auto add_parts = [&](auto memory_of) {
#pragma unroll 8
      for (int64 part = threadIdx.y; part < of.parts; part += down) {
        const auto row = decltype(memory_of)::load_written(from + part * of.stride, count);
#pragma unroll
        for (int i = 0; i < V; ++i) total[i] += static_cast<double>(row.numbers[i]);
      }
    };
    constexpr dtype D = sizeof(T) == 8 ? dtype::f64 : dtype::f32;
    if (of.stride % V == 0) add_parts(memory<D, V, V>());  // aligned
    else add_parts(memory<D, V, 1>());
  }
#pragma unroll
  for (int i = 0; i < V; ++i) shared[thread][i] = total[i];
  for (int half = down / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.y) >= half) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) shared[thread][i] = total[i] += shared[thread + half * across][i];
  }
  if (threadIdx.y != 0) return;
  const int64 to = Grouped ? group * of.columns + column : column;
  for (int i = 0; i < count; ++i) store_as<1>(of.type, of.data, to + i, pack<double, 1>(total[i]), 1);
}

ONEPASS_END
