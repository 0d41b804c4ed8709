// Runs a line's kernels on the CPU: finds or compiles them, cuts the work into tasks, and sums column gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "onepass/kernel/cpu_kernels.h"
#include "src/line/line.h"

namespace onepass::cpu {

// Those for x of a dtype, from the table, or compiled with the system compiler at first use: others are null then. All
// of them where x is none.
// Throws cannot_compile (src/compiler.h) where neither is to be had, every time, though it tries once. They stay as
// long as somebody has them.
std::shared_ptr<const cpu_kernels> kernels_for(const spec::line&, std::uint64_t boolean_masks, dtype x);
// Null where they would have to be compiled, or cannot be.
std::shared_ptr<const cpu_kernels> find_kernels(const spec::line&, std::uint64_t boolean_masks, dtype x);
bool ahead_of_time(const spec::line&, std::uint64_t boolean_masks);
std::string source(const spec::line&, std::uint64_t boolean_masks, dtype x);  // what the compiler gets

// Fills in the partition (a function of the shapes only) and returns the number of parts of column_partial, its own.
int64 partition(arguments&, bool rowwise);

// The kernel for these arguments, which are laid out.
cpu_kernel choose(const cpu_kernels&, const arguments&, dtype x, bool backward);

void run(cpu_kernel, const arguments&);
// Throws std::out_of_range where a target of the line is no column, before forward runs.
void require_targets(const spec::line&, const arguments&);
// Where the result is wanted again, the forward kernel follows the backward kernel task by task: what it reads is still
// in cache. Not of a line that keeps a value, which forward would store.
void run_backward(const cpu_kernels&, const arguments&, dtype x);

// Adds so many parts of column_partial in order into 1-D outputs, one per wanted column operand; not where it is null.
void reduce_columns(const arguments&, int64 parts, int slots, const view* outputs);

// The same of a slot that has a sum for each group of rows, where tasks share groups.
void reduce_groups(const arguments&, int slot, const view& output);

}  // namespace onepass::cpu
