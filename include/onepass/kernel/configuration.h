// What a CUDA kernel of rows is compiled for, besides its line: the members of `Config`. Plain C++ for two readers: the
// kernels, and src/cuda, which makes a struct (row/configuration.h) and the text of Config (runtime/source.cc) from
// this list.
#pragma once

#include "onepass/kernel/arguments.h"

namespace onepass {

// Tensors that a kernel reads or writes row by row, as Config's sets (BITS) number them.
enum class stream : int {
  x,
  y,  // backward: its gradient, or dx
  operand,
  kept = operand + kMaxOperands,
  kept_gradient = kept + kMaxKeeps,
  recomputed = kept_gradient + kMaxKeeps
};
constexpr stream operator+(stream s, int i) { return static_cast<stream>(static_cast<int>(s) + i); }
constexpr uint64 bit_of(stream s) { return uint64{1} << static_cast<int>(s); }

// How many columns a channel has: any number, so that a lane may be in two; whole lanes; and a power of two.
enum channel_columns : uint64 { of_any, of_whole_lanes, of_power_of_two };

// NUMBER(member, name) is an int, FLAG a bool, BITS a set. Config has beside these:
//   arithmetic, index   float or double; of an element: int where they are few, int64
//   kX, kOperand[]      storage types
//   kY, kKept[]         and of results that are rows; backward: kY of dx
//   kThreads            of a block
//   kMembers            tensors that the launch has room for, each with arguments of its own; 0: one
//   kFeatures           that end a row
//   kInHalves           of a line with `rope`: an access moves half of a lane, which is all within the row or behind it
//   kWantsColumn, kWantsTensor (BITS by operand), kWantsDx, kWantsRecompute   gradients, and the result, that are
//   wanted
#define ONEPASS_CONFIGURATION(NUMBER, FLAG, BITS)                                                                    \
  /* Elements of a lane; elements that one access may move (lane/device/memory.cuda.h). */                           \
  NUMBER(vector_size, kVectorSize)                                                                                   \
  NUMBER(access, kAccess)                                                                                            \
  /* Threads along the columns, and down the rows; blocks along the columns. */                                      \
  NUMBER(across, kAcross)                                                                                            \
  NUMBER(down, kDown)                                                                                                \
  NUMBER(cluster, kCluster)                                                                                          \
  /* Elementwise: lanes in flight. Rowwise: lanes of the row that a thread has, and those of them that are within    \
     the row for every thread. */                                                                                    \
  NUMBER(unroll, kUnroll)                                                                                            \
  NUMBER(held_vectors, kHeldVectors)                                                                                 \
  NUMBER(whole_vectors, kWholeVectors)                                                                               \
  /* The threads' lanes fill the row: none reaches past its end. */                                                  \
  FLAG(exact, kExact)                                                                                                \
  /* Elementwise: one long row. */                                                                                   \
  FLAG(flat, kFlat)                                                                                                  \
  /* Leading dimensions that rows are counted in. */                                                                 \
  NUMBER(dims, kDims)                                                                                                \
  /* Rowwise: rows that async copies run ahead by; lanes of shared memory behind a row's. */                         \
  NUMBER(stages, kStages)                                                                                            \
  NUMBER(spare_vectors, kSpareVectors)                                                                               \
  /* Rowwise: does not hold the row, but recomputes it from the copies; the next row is in flight. */                \
  FLAG(recomputes, kRecomputes)                                                                                      \
  FLAG(ahead, kAhead)                                                                                                \
  /* Column sums stay in registers; they have one part, which is stored as the gradients. */                         \
  FLAG(sums_in_registers, kSumsInRegisters)                                                                          \
  FLAG(one_part, kOnePart)                                                                                           \
  /* Operands whose column sums have a row for each group of rows (row_groups); a group's rows are apart; what a     \
     block has: 0 a part of one group, 1 one group, 2 groups in turn, of which it stores the gradients. */           \
  BITS(grouped_operand, kGroupedOperand)                                                                             \
  FLAG(apart, kApart)                                                                                                \
  NUMBER(groups_a_block, kGroupsABlock)                                                                              \
  /* Columns whose gradients are added up for words by channels, a power of two; 0: each by itself. */               \
  BITS(unit, kUnit)                                                                                                  \
  /* How a lane lies in what words by channels have a number for. */                                                 \
  BITS(channels, kChannels)                                                                                          \
  FLAG(in_place, kInPlace) /* dx lies where dy does */                                                               \
  FLAG(strided_dx, kStridedDx)                                                                                       \
  /* Rows begin with whole lanes and end within one. */                                                              \
  FLAG(ragged, kRagged)                                                                                              \
  FLAG(saves_statistics, kSavesStatistics)                                                                           \
  FLAG(only_statistics, kOnlyStatistics) /* and stores nothing else */                                               \
  /* Rows taken in parts: which row word a kernel is for. */                                                         \
  NUMBER(row_word, kRowWord)                                                                                         \
  /* Tensors with one element for a whole row. */                                                                    \
  FLAG(single_x, kSingleX)                                                                                           \
  FLAG(single_y, kSingleY)                                                                                           \
  BITS(single_operand, kSingleOperand)                                                                               \
  BITS(single_kept_gradient, kSingleKeptGradient)                                                                    \
  /* Operands of which one row serves all rows; that begin at 16 bytes, too; or all rows of a matrix. */             \
  BITS(repeated_operand, kRepeatedOperand)                                                                           \
  BITS(aligned_operand, kAlignedOperand)                                                                             \
  BITS(shared_operand, kSharedOperand)                                                                               \
  /* One number that dy is multiplied by in its place, which is all that is done. */                                 \
  BITS(one_factor, kOneFactor)                                                                                       \
  /* Tables of `rope` with one element for two columns. */                                                           \
  BITS(one_for_two, kOneForTwo)                                                                                      \
  /* By stream: contiguous tensors; those that async copies load ahead; results that leave through shared memory. */ \
  BITS(dense, kDense)                                                                                                \
  BITS(streams, kStreams)                                                                                            \
  BITS(staged, kStaged)                                                                                              \
  /* Operands that are loaded once, before the first row; and those that words behind the row word take, but are     \
     loaded before its statistics. */                                                                                \
  BITS(loaded_once, kLoadedOnce)                                                                                     \
  BITS(early, kEarly)

}  // namespace onepass
