// Calls of lines without `linear`, without memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

#include "src/cuda/row/configuration.h"
#include "src/plan/plan.h"

namespace onepass::cuda {

// A line of each kind.
inline constexpr const char* kLines[] = {
    "gelu",
    "bias | gelu_tanh",
    "gate(silu)",
    "bias | dropout(0.1) | add",
    "layer_norm | scale | bias",
    "bias | dropout(0.1) | add | keep | rms_norm | scale",
    "mul(0.125) | mask | softmax",
    "bias | scale | bias | layer_norm | scale | bias | scale",  // six column gradients
};

// How tensors lie: numbers between the allocator's address and the tensor's, and between two rows; and whether dx' rows
// are as far apart, where other results are dense.
struct memory {
  int64 offset = 0, gap = 0;
  bool with_dx = false;
};
// Whose rows begin at 16 bytes, whatever their length.
inline memory padded(int64 columns, dtype type) {
  const int64 step = 16 / size_of(type);
  return {0, ceil_div(columns, step) * step - columns, true};
}
struct call {
  request r;
  arguments a;
};
inline std::ostream& operator<<(std::ostream& out, const call& c) {
  return out << c.r.line << (c.r.backward ? " backward" : " forward") << ", dtype " << static_cast<int>(c.r.x) << ", "
             << c.a.rows << " x " << c.a.columns << ", row stride " << c.a.y.stride[kMaxDims - 1] << ", at "
             << c.a.y.data;
}

// With every gradient, as the binding asks for it. again: and the result made again.
inline call call_of(const spec::line& line, bool backward, dtype x, dtype column, int64 rows, int64 columns,
                    memory at = {}, bool recomputes = false) {
  void* const address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  void* const start =
      reinterpret_cast<void*>((std::uintptr_t{1} << 20) + static_cast<std::uintptr_t>(at.offset * size_of(x)));
  const std::int64_t sizes[2] = {rows, columns};
  spec::imagined_frame f(line, sizes, x, column, x, {start, address, columns + at.gap});
  if (!backward) {
    f.forward(true, true);
    return {request_of(f, false, spec::type_text(line, 0, false)), f.a};
  }
  const spec::gradients wanted = spec::plan_gradients(line, x, f.facts(), (std::uint64_t{2} << line.operands) - 1);
  f.backward(wanted, recomputes, true);
  return {request_of(f, wanted, spec::type_text(line, 0, true)), f.a};
}

}  // namespace onepass::cuda
