// Several tensors in one launch on CUDA: each has arguments of its own, and blocks of its own among the launch's.
#pragma once

#include "onepass/lane/cuda.h"
#include "onepass/kernel/arguments.h"

ONEPASS_BEGIN

// A block's number among those of its tensor, and how many those are.
struct share_of_blocks {
  unsigned block, blocks;
};
template <class Config>
ONEPASS_FUNCTION share_of_blocks share_of(const arguments& a, unsigned block, unsigned blocks) {
  if constexpr (Config::kMembers > 0) return {block - a.first_block, a.blocks};
  else return {block, blocks};
}

// In the order of their blocks; where there are fewer, the last ones begin behind every block.
template <int kCount>
struct members {
  arguments of[kCount];

  ONEPASS_FUNCTION const arguments& at(unsigned block) const {
    int member = 0;
#pragma unroll
    for (int step = half_of_power_from(kCount); step > 0; step /= 2) {
      if (member + step < kCount && of[member + step].first_block <= block) member += step;
    }
    return of[member];
  }

 private:
  static constexpr __device__ int half_of_power_from(int count) {
    int power = 1;
    while (power < count) power *= 2;
    return power / 2;
  }
};

ONEPASS_END
