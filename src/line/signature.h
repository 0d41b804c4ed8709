// The interface between the library and the autograd function, which is compiled apart, for the torch that is
// installed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace onepass {

inline constexpr int kMostResults = 32, kMostOperands = 32;

struct line_signature {
  const void* line;  // the library's own
  int operands;
  int resumes_from;  // the result that backward reads in x's place: 0, or 1 + the keep's number; -1: none
  bool rowwise, reads_x, reads_statistics;
  std::uint64_t reads_operands;  // bits
  std::uint64_t numbers;         // bits of the results that are one number a row: 0, or 1 + the keep's number
  std::uint64_t scales, not_differentiable;  // bits of results, likewise: codes' scales; codes and their scales
  int group;                                 // columns that share a scale; 0: the row, [..., 1]
  std::int8_t own_dtypes[kMostResults];      // of results that have another than x's; else 0
  std::uint64_t row_operands;                // bits: those that are rows, as x is, and not a column or a matrix
  std::uint64_t channel_operands;            // bits: those with a number for some neighbouring columns
  int weight;  // the operand of `linear` or `scores`; -1: the line has none, and what follows does not apply
  bool scores, values;
  int keeps_before;    // keeps that stand before it
  int resumes_behind;  // the result that backward reads in place of the GEMM's
  bool reads_product;  // the GEMM's result
  bool x_for_weight;   // x is read only for the gradient of the matrix, and so are these operands
  std::uint64_t operands_for_weight;
  std::int8_t keeps_before_operand[kMostOperands];  // keeps that stand before the operand's word
};

// torch's AtenTensorHandle; null: absent. Arguments are borrowed; results are owned by the caller.
using tensor_handle = void*;

struct line_forward {
  const line_signature& line;
  tensor_handle x;
  const tensor_handle* operands;
  tensor_handle dropout_state;
  bool save;  // the GEMM's result and the row statistics, where backward reads them
};
struct line_backward {
  const line_signature& line;
  const tensor_handle* gradients;
  int gradient_count;
  tensor_handle x;
  const tensor_handle* operands;
  tensor_handle resumed, statistics, product, resumed_behind, dropout_state;
  const std::int64_t* types;  // of x, then of the operands
  std::int64_t wanted;
};
struct line_library {
  // Null for what is no line; valid until what is put into `held` is released.
  const line_signature* (*find)(const char* text, void** held);
  void (*release)(void* held);
  // Whether the kernels for the CPU and x of a dtype are there; boolean_masks: a bit for each operand that is boolean.
  bool (*is_ready_on_cpu)(const line_signature&, std::uint64_t boolean_masks, int x);
  // For x and each operand where its gradient comes from: kUnwanted, kUpstream, or its index among what backward
  // writes. operand_types: as below. wanted: bit 0 for x, bit i + 1 for operand i. True where backward writes anything.
  bool (*plan)(const line_signature&, int dtype, const std::int64_t* operand_types, std::uint64_t wanted, int* sources);
  // The operators themselves, without the dispatcher, which for a small call takes longer than the work. They give the
  // number of results, or one of those below and in `error` what was wrong, valid until the thread's next call.
  int (*forward)(const line_forward&, tensor_handle* results, const char** error);
  int (*backward)(const line_backward&, tensor_handle* results, const char** error);
};

inline constexpr int kFailed = -1, kOutOfRange = -2;  // the latter of a target that is no column
inline constexpr int kUnwanted = -2, kUpstream = -1;

// An operand's type: its dtype's number, plus these. A gradient that is a sum over rows has the operand's own leading
// dimensions, and is never made whole; kHas counts the bits of those that the operand has, the last one's first.
inline constexpr std::int64_t kBroadcast = 16;  // its shape is not x's
inline constexpr std::int64_t kSummed = 32, kHas = 64;
// Above all, of words by channels: the logarithm of a power of two of neighbouring columns whose gradients are one
// number's. Backward adds so many up, or as many as a kernel's threads of a warp have.
inline constexpr std::int64_t kUnit = std::int64_t{1} << 56;

// Of channels with so many columns each. (python/onepass/_arguments/shapes.py has it, too.)
inline std::int64_t unit_type(std::int64_t columns) {
  constexpr int kLeast = 5, kMost = 8;
  const int log = std::min(std::countr_zero(static_cast<std::uint64_t>(columns)), kMost);
  return columns > 0 && log >= kLeast ? kUnit * log : 0;
}

// What the shape of an operand that broadcasts to x's adds to its type. (python/onepass/_arguments/shapes.py has it,
// too.) Leading dimensions that it has and has not may take turns twice (row_groups in kernel/arguments.h).
template <class Sizes>
std::int64_t repetition(const Sizes& own, const Sizes& x) {
  const auto dims = static_cast<std::int64_t>(x.size()), missing = dims - static_cast<std::int64_t>(own.size());
  constexpr std::int64_t kMostDims = 48;
  std::int64_t has = 0;
  int turns = 0;
  bool whole = true;
  for (std::int64_t d = 0; d + 1 < dims; ++d) {
    const auto size = x[static_cast<std::size_t>(d)];
    if (size == 1) continue;
    const bool is_there = d >= missing && own[static_cast<std::size_t>(d - missing)] != 1;
    turns += is_there != (turns % 2 == 0);
    if (is_there && dims <= kMostDims) has |= std::int64_t{1} << (dims - 2 - d);
    whole = whole && is_there;
  }
  return whole || turns > 3 || dims > kMostDims ? kBroadcast : kBroadcast + kSummed + kHas * has;
}

}  // namespace onepass
