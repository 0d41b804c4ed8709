// Sets of a call's tensors on CUDA, as bits.
#pragma once

#include "onepass/lane/target.h"
#include "onepass/skeleton/arguments.h"

ONEPASS_BEGIN

constexpr __device__ int bits_below(uint64 bits, int i) {
  int count = 0;
  for (int k = 0; k < i; ++k) count += static_cast<int>(bits >> k & 1);
  return count;
}

// A tensor that is read row by row. Rowwise kernels bring those in Config::kStreams (bits) kStages rows ahead of their
// use, and the operands in kBroughtOnce (bits), which have one row for all, before the first.
enum class stream : int {
  x,
  y,
  operand,
  kept = operand + kMaxOperands,
  kept_gradient = kept + kMaxKeeps,
  again = kept_gradient + kMaxKeeps
};

constexpr stream operator+(stream s, int i) { return static_cast<stream>(static_cast<int>(s) + i); }
// Whether a tensor is in a set (bits), and how many of the set are before it.
constexpr bool is_in(uint64 tensors, stream s) { return (tensors >> static_cast<int>(s) & 1) != 0; }
constexpr int place_in(uint64 tensors, stream s) { return bits_below(tensors, static_cast<int>(s)); }

ONEPASS_END
