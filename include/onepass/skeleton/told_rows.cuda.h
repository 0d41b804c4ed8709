// How the blocks of a cluster tell each other what each has of a strip's queries' gradients (sm_90a): copies bring it
// to the blocks that have the rows, which add it up. What is a block's own its threads write to where the others'
// comes. There each thread says itself what it has written and read: compute-sanitizer knows no order through a warp's
// barrier.
//
// How many bytes pass between blocks is what backward takes from 128 numbers on (docs/measured-facts.md), so a number
// takes 16 bits: it is so many steps, of which the largest number of its row and block has 32766, and a step's size
// follows the row. At most 2^-16 of the largest is rounded away; rounding the scores' gradients to bfloat16 or float16
// costs every number of the row more.
#pragma once

#include "onepass/skeleton/score_strips.cuda.h"

ONEPASS_BEGIN

inline constexpr float kSteps = 32766.0f, kNoStep = 8421376.0f;  // 2^23 + 2^15, in whose low bits stands what is added

ONEPASS_FUNCTION uint32 pair_to_steps(float x, float y, float steps_of_one) {
  return __byte_perm(__float_as_uint(fmaf(x, steps_of_one, kNoStep)), __float_as_uint(fmaf(y, steps_of_one, kNoStep)),
                     0x5410);
}
template <int kUpper>
ONEPASS_FUNCTION float steps_of(uint32 pair) {
  return __uint_as_float(__byte_perm(pair, 0x4b000000, kUpper ? 0x7632 : 0x7610)) - kNoStep;
}

// A warp's 16 rows of products, to the blocks that have them.
template <class Config>
ONEPASS_FUNCTION void tell_rows(const float (&of)[score_gradient_shared<Config>::kNumbers / 2],
                                score_gradient_shared<Config>& shared, char* dynamic, int stage) {
  using layout = score_gradient_shared<Config>;
  const int lane = static_cast<int>(threadIdx.x) % 32, rank = cluster_rank();
  bool has_own = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_strip = row_of_products() + 8 * i;
    const bool is_own = of_strip / layout::kOwnRows == rank;
    has_own |= is_own;
    char* row = at_shared(dynamic, is_own ? layout::told(dynamic, stage, rank, of_strip % layout::kOwnRows)
                                          : layout::sum(dynamic, stage, of_strip));
    float largest = 1e-30f;  // a step's reciprocal is finite; infinity or a NaN makes the block's part of the row NaN
#pragma unroll
    for (int j = 2 * i; j < layout::kNumbers / 2; j += 4)
      largest = max_number(max_number(largest, fabsf(of[j])), fabsf(of[j + 1]));
    largest = largest_of_four(largest);
    const float step = largest * (1.0f / kSteps), steps_of_one = reciprocal_number(step);
#pragma unroll
    for (int j = 0; j < layout::kNumbers / 8; ++j)
      reinterpret_cast<uint32*>(row)[4 * j + lane % 4] =
          pair_to_steps(of[4 * j + 2 * i], of[4 * j + 2 * i + 1], steps_of_one);
    if (lane % 4 == 0) *reinterpret_cast<float*>(row + layout::kNumbers * 2) = step;
  }
  if (has_own) arrive(&shared.sums[stage]);
  hand_shared_to_copies();
  __syncwarp();
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane * layout::kToldRows, block = row / layout::kOwnRows;
  if (lane < 16 / layout::kToldRows && block != rank)
    tell_bytes(in_block(layout::told(dynamic, stage, rank, row % layout::kOwnRows), block),
               layout::sum(dynamic, stage, row), layout::kToldRows * layout::kSumPitch,
               in_block(shared_address(&shared.sums[stage]), block));
}

// The queries' gradients of this block's own rows of all strips: the sum of what all blocks tell, to memory.
template <class Config>
ONEPASS_FUNCTION void add_rows(const score_gradient_arguments& a, score_gradient_shared<Config>& shared,
                               char* dynamic) {
  using layout = score_gradient_shared<Config>;
  constexpr int kEights = layout::kNumbers / 8, kThreads = layout::kAddingWarps * 32;
  static_assert(3 * kGroupThreads % kThreads == 0, "the fourth warpgroup's first warps");
  const int thread = static_cast<int>(threadIdx.x) % kThreads, lane = thread % 32, column = thread % kEights * 8,
            rank = cluster_rank(), own = rank * layout::kOwnRows;
  ring_position<layout::kStages> ring;
#pragma unroll 1
  for (strip_walk<Config> at(a); !at.is_done(); at.next(), ring.next()) {
    wait_for_mail(&shared.sums[ring.stage], ring.phase);
    if (thread == 0) shared.expect_sums(ring.stage);
#pragma unroll 1
    for (int row = thread / kEights; row < layout::kOwnRows; row += kThreads / kEights) {
      numbers<float, 8> sum = plus::none<float, 8>();
#pragma unroll 4
      for (int part = 0; part < layout::kParts; ++part) {
        const char* from = at_shared(dynamic, layout::told(dynamic, ring.stage, part, row));
        const float step = *reinterpret_cast<const float*>(from + layout::kNumbers * 2);
        const uint4 pairs = *reinterpret_cast<const uint4*>(from + column * 2);
        const uint32 of[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum.v[2 * c] = fmaf(steps_of<0>(of[c]), step, sum.v[2 * c]);
          sum.v[2 * c + 1] = fmaf(steps_of<1>(of[c]), step, sum.v[2 * c + 1]);
        }
      }
      if (own + row < a.rows - at.row() && column < a.depth) {
        const auto pair = [&](int c) {
          return pair_to_storage<Config::kX>(sum.v[2 * c] * a.factor, sum.v[2 * c + 1] * a.factor);
        };
        *reinterpret_cast<uint4*>(static_cast<uint16*>(a.rows_gradient) + (at.row_of_all() + own + row) * a.depth +
                                  column) = {pair(0), pair(1), pair(2), pair(3)};
      }
    }
    hand_shared_to_copies();
    arrive(&shared.read_sums[ring.stage]);
    __syncwarp();
    if (lane < Config::kCluster && lane != rank) arrive_in_block(&shared.read_sums[ring.stage], lane);
  }
}

ONEPASS_END
