// Instructions that the CPU's kernels of the common lines take, counted by valgrind's callgrind: `make
// bench-instructions`. Exact on a noisy machine, where times are not. Valgrind has AVX2 at most.
#include <valgrind/callgrind.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "src/cpu/row/run.h"
#include "src/line/line.h"

namespace onepass::cpu {
namespace {

constexpr int64 kRows = 64, kColumns = 1024;
const char* const kLines[] = {"bias | gelu",
                              "bias | gelu_tanh",
                              "gate(silu)",
                              "layer_norm | scale | bias",
                              "layer_norm | scale | bias | gelu",
                              "rms_norm | scale",
                              "add | keep | rms_norm | scale",
                              "softmax",
                              "bias | dropout(0.1) | add",
                              "gelu | dropout(0.1) | add"};

// Memory of one tensor of either type, of numbers that are normal in both.
struct tensor {
  std::vector<std::uint32_t> words;
  explicit tensor(std::mt19937& random) : words(kRows * kColumns) {
    for (std::uint32_t& word : words) word = 0x3e003f00u | (random() & 0x80ff80ffu);
  }
  view rows(dtype type) { return {words.data(), {0, 0, 0, kColumns}, type, 1}; }
  view column(dtype type) { return {words.data(), {}, type, 1}; }
};

void count(const char* text, dtype type, const char* type_name) {
  const spec::line line = spec::parse(text);
  const std::shared_ptr<const cpu_kernels> held = kernels_for(line, 0);
  const cpu_kernels& kernels = *held;
  std::mt19937 random(1);
  std::vector<tensor> tensors(4 + 2 * kMaxOperands + 2, tensor(random));
  auto next = tensors.begin();
  arguments a{};
  a.rows = kRows, a.columns = kColumns, a.inverse_columns = 1.0 / kColumns, a.matrix_rows = kRows;
  a.size[0] = a.size[1] = a.size[2] = 1, a.size[3] = kRows;
  for (std::size_t i = 0; i < line.parameters.size(); ++i) a.parameter[i] = line.parameters[i];
  const std::int64_t state[2] = {1, 0};
  a.dropout_state = reinterpret_cast<const int64*>(state);
  std::vector<float> statistics(2 * kRows);
  a.statistics = statistics.data();
  a.x = (next++)->rows(type), a.y = (next++)->rows(type);
  for (int i = 0; i < line.operands; ++i) {
    const bool column = line.operand_word(i).about->operand == operand_kind::column;
    a.operand[i] = column ? (next++)->column(type) : (next++)->rows(type);
    if (column) a.wants_column |= uint64{1} << i;
    else a.operand_gradient[i] = (next++)->rows(type);
  }
  for (int k = 0; k < line.keeps; ++k) a.kept[k] = (next++)->rows(type);
  const auto measured = [&](bool backward) {
    const cpu_kernel kernel = choose(kernels, a, type, backward);
    partition(a, line.rowwise());
    std::vector<double> partial(kMaxOperands * 64 * kColumns);
    a.column_partial = partial.data();
    run(kernel, a);
    CALLGRIND_TOGGLE_COLLECT;
    run(kernel, a);
    CALLGRIND_TOGGLE_COLLECT;
    char label[200];
    std::snprintf(label, sizeof label, "%s|%s|%s", text, type_name, backward ? "backward" : "forward");
    CALLGRIND_DUMP_STATS_AT(label);
  };
  measured(false);
  a.dx = (next++)->rows(type);
  for (int k = 0; k < line.keeps; ++k) a.kept_gradient[k] = (next++)->rows(type);
  measured(true);
}

}  // namespace
}  // namespace onepass::cpu

int main() {
  std::printf("%lld numbers, %s\n", static_cast<long long>(onepass::cpu::kRows * onepass::cpu::kColumns),
              onepass::cpu::simd_target());
  for (const char* line : onepass::cpu::kLines) {
    onepass::cpu::count(line, onepass::dtype::f32, "fp32");
    onepass::cpu::count(line, onepass::dtype::bf16, "bf16");
  }
}
