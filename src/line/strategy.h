// The strategies of a contraction (`linear`, or `scores` with `values` or without) and their names in a line's text.
#pragma once

#include <string_view>

namespace onepass::spec {

// How a contraction is computed: chosen by shapes and device, or what the line names.
enum class strategy : int {
  automatic,
  unfused,   // the words before it, the library's GEMM, the words behind it
  tiled,     // `linear`: one kernel (onepass/kernel/linear/gemm_sm90.cuda.h)
  deferred,  // `linear`: the same kernel, which applies a norm behind the GEMM (kernel/linear/folded_norm.cuda.h)
  small_m,   // `linear`: one kernel for few rows (kernel/linear/small_m.cuda.h)
  small_k,   // `linear`: one kernel for few in_features (kernel/linear/small_k.cuda.h)
  small_n,   // `linear`: one kernel for few out_features (kernel/linear/small_n.cuda.h), on the CPU too
  two_pass,  // `scores`: one kernel, which reads the keys for the row's sum and again for the result
  flash,     // `scores` and `values`: flash attention (kernel/attention/forward_sm90.cuda.h)
  panels,    // on the CPU, a panel of rows at a time (src/cpu/linear.h, src/cpu/attention.h)
  chunked,   // `linear` and endings: the library's GEMM of a chunk of rows at a time (src/torch/linear/chunks.h)
};

// A line is stored under `name`. `old_name` is read as an alias; Python warns of it.
struct strategy_facts {
  std::string_view name;
  bool linear, scores, values;  // which contractions know it
  std::string_view old_name{};
};
inline constexpr strategy_facts kStrategies[] = {
    {"auto", true, true, true},
    {"unfused", true, true, true},
    {"tiled", true, false, false},
    {"deferred", true, false, false},
    {"small_m", true, false, false, "streamed"},
    {"small_k", true, false, false, "resident"},
    {"small_n", true, false, false, "dots"},
    {"two_pass", false, true, false, "resident"},
    {"flash", false, false, true, "streamed"},
    {"panels", true, true, true},
    {"chunked", true, false, false},
};

constexpr std::string_view name_of(strategy how) { return kStrategies[static_cast<int>(how)].name; }

}  // namespace onepass::spec
