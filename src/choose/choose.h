// The one decision of how a call of a line with `linear`, `scores` or `values` is computed. Launches, Line.plan and the
// prices of `explain` and `fuse` all call `choose`. docs/design.md has the table of the ways.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "src/cuda/runtime/driver.h"
#include "src/plan/contraction.h"

namespace onepass::choice {

// The kernels that compute a way.
enum class implementation : int {
  library,  // the vendor's GEMMs and the kernels of rows
  gemm,     // cuda/linear/gemm_sm90.h
  small_m,  // cuda/linear/small_m.h
  small_k,  // cuda/linear/small_k.h
  small_n,  // cuda/linear/small_n.h, and on the CPU torch/linear/small_n.h
  cluster,  // cuda/attention/probabilities_sm90.h, backward probabilities_backward.h
  tiles,    // cuda/attention/forward_sm90.h, backward_sm90.h
  warps,    // cuda/attention/forward_sm80.h, backward_sm80.h
  panels,   // torch/linear/cpu_panels.h, torch/attention/cpu_panels.h
  chunks,   // torch/linear/chunks.h
};

struct sizes {
  int64 rows, depth, columns;  // x is (rows, depth), the matrix, or all keys of a batch, (columns, depth)
  dtype type;                  // of the matrix, or the keys
  bool saves_product = false;  // `linear`, for backward
  int64 matrices = 1;          // `scores`: batches of keys
  int64 group = 1;             // `scores`: matrices of queries that share a batch's keys
  int key_masks = 0;           // `scores`: masks that leave keys out for all rows of a matrix

  int64 x_bytes() const { return rows * depth * size_of(type); }
  int64 result_bytes() const { return rows * columns * size_of(type); }
  int64 matrix_bytes() const { return matrices * columns * depth * size_of(type); }
};

// Everything that the choice depends on. Tensors are dense unless `unfit` says otherwise.
struct call {
  const spec::contraction& of;  // in a line with `values`, its part from `scores` to before `values`
  choice::sizes sizes;
  spec::strategy named = spec::strategy::automatic;
  int64 value_depth = 0;  // with `values`: numbers of a value
  bool values = false;
  // The call wants results that a kernel for the whole line does not give. With `values`: the weights or their
  // gradient. Backward of `scores`: other gradients than those of both queries and keys. Backward of `linear`: its
  // input's gradient itself, or none of the words before it.
  bool gives_more = false;
  bool backward = false;
  bool from_input = false;  // backward of `linear`: the words before it start from its input, which is computed again
  bool one_dtype = true;    // x and the matrix have one
  std::uint32_t unfit = 0;  // implementations (bits) that do not suit the tensors' addresses and strides, or on the CPU
                            // cannot be compiled
};

struct way {
  spec::strategy how;
  implementation by = implementation::library;
  int64 bytes = 0;                                           // through memory
  double seconds = std::numeric_limits<double>::infinity();  // where it is known
  std::string why_not{};                                     // empty where it serves
  int rank = 0;                                              // before time: lower first
  const char* kernel = "";                                   // on CUDA: the kernel that only this way launches

  bool serves() const { return why_not.empty(); }
};

struct decision {
  std::vector<way> ways;
  std::size_t taken = 0;

  // Where the line names a way that does not serve, that way, with why_not.
  const way& chosen() const { return ways[taken]; }
  // The way of this strategy that is or would be taken. Where none serves, why_not has the reasons of all.
  way of(spec::strategy) const;
};

// chip: null on the CPU.
decision choose(const call&, const cuda::device_facts* chip);

// Rows of a chunk of what `linear` gives to endings. Of so few chunks the gradient of a matrix of 16 bits is added up
// in its own dtype: each chunk rounds it, and the last one's rounding is the largest. Of more it is in float32.
inline constexpr int64 kFewChunks = 3;
int64 chunk_rows(const sizes&, bool on_cpu);

// Inference of attention on the CPU: our kernels replace torch's engine from so many weights (rows of queries times
// keys) and rows of queries on. docs/measured-facts.md, "Beside torch's engines". On CUDA: cuda::kBesideEngines.
struct beside_cpu_engine {
  int weights = 1 << 14, weights_of_bf16 = 1 << 12;
  int queries = 16;  // of other dtypes than bfloat16
};
inline constexpr beside_cpu_engine kBesideCpuEngine{};

}  // namespace onepass::choice
