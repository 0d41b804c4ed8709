// The second stage of column gradients: adds the blocks' parts in a fixed order, in double. Its work does not grow with
// rows.
#pragma once

#include "onepass/lane/cuda.h"
#include "onepass/skeleton/arguments.h"

namespace onepass {

struct column_sum_arguments {
  const void* partial;  // [slots][parts][columns], float or double
  int64 parts, columns;
  view output[kMaxOperands];
};

}  // namespace onepass

ONEPASS_BEGIN

// A block of 32 columns by 32: grid (ceil(columns / 32), slots). T: the parts' type.
template <class T>
ONEPASS_FUNCTION void column_sum(const column_sum_arguments& a) {
  constexpr int kDown = 32;
  __shared__ double shared[kDown][33];
  const int64 column = static_cast<int64>(blockIdx.x) * 32 + threadIdx.x;
  const T* from = static_cast<const T*>(a.partial) + blockIdx.y * a.parts * a.columns;
  wait_for_kernel_before();
  double total = 0;
  if (column < a.columns) {
#pragma unroll 8
    for (int64 part = threadIdx.y; part < a.parts; part += kDown)
      total += static_cast<double>(from[part * a.columns + column]);
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = shared[threadIdx.x][threadIdx.y];  // now a warp has one column
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
  if (threadIdx.x == 0) shared[0][threadIdx.y] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= a.columns) return;
  total = shared[0][threadIdx.x];
  const view& out = a.output[blockIdx.y];
  switch (out.type) {
    case dtype::f32: static_cast<float*>(out.data)[column] = static_cast<float>(total); break;
    case dtype::f64: static_cast<double*>(out.data)[column] = total; break;
    case dtype::bf16: static_cast<uint16*>(out.data)[column] = to_storage<dtype::bf16>(total); break;
    default: static_cast<uint16*>(out.data)[column] = to_storage<dtype::f16>(total); break;
  }
}

ONEPASS_END
