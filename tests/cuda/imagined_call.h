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

// How tensors lie: numbers between the allocator's address and the tensor's, and between two rows.
struct memory {
  int64 offset = 0, gap = 0;
};
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
                    memory at = {}, bool again = false) {
  call c{};
  void* const address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  void* const start =
      reinterpret_cast<void*>((std::uintptr_t{1} << 20) + static_cast<std::uintptr_t>(at.offset * size_of(x)));
  const auto tensor = [&](dtype type) { return view{start, {0, 0, 0, columns + at.gap}, type, 1}; };
  c.a.rows = rows, c.a.columns = columns;
  std::fill(c.a.size, c.a.size + kMaxDims - 1, 1);
  c.a.size[kMaxDims - 1] = rows;
  c.r = request(line, backward);
  c.r.x = x, c.r.line = spec::type_text(line, 0, backward);
  std::vector<spec::operand_facts> facts;
  for (int i = 0; i < line.operands; ++i) {
    const bool is_column = line.operand_word(i).about->operand == operand_kind::column;
    c.r.operand[i] = is_column ? column : x;
    facts.push_back({c.r.operand[i], false});
    c.a.operand[i] = is_column ? view{address, {}, column, 1} : tensor(x);
  }
  const spec::reads reads = spec::backward_reads(line, again);
  if (again) c.r.wants_again = true, c.a.again = tensor(x);
  if (!backward || reads.x || reads.result) c.a.x = tensor(x);
  c.a.y = tensor(x);
  c.a.statistics = address;
  for (int k = 0; k < line.keeps; ++k) (backward ? c.a.kept_gradient : c.a.kept)[k] = tensor(x);
  if (!backward) return c;
  const spec::gradients wanted = spec::plan_gradients(line, x, facts, (std::uint64_t{2} << line.operands) - 1);
  c.r.wants_column = c.a.wants_column = wanted.wants_column;
  c.r.wants_tensor = wanted.wants_tensor, c.r.wants_dx = wanted.wants_dx;
  for (const spec::gradient_output& g : wanted.outputs) {
    if (!g.column) (g.input == 0 ? c.a.dx : c.a.operand_gradient[g.input - 1]) = tensor(g.type);
  }
  return c;
}

}  // namespace onepass::cuda
