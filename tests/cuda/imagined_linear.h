// Calls of lines with `linear` or `scores`, without memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/linear/small_k.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/linear/small_m.h"
#include "src/plan/plan.h"

namespace onepass::cuda {

// Its tensors begin at multiples of 16 bytes.
class imagined_linear {
 public:
  imagined_linear(const char* line, int64 rows, int64 k, int64 columns, dtype type, bool saves, bool defers = false)
      : parts_(spec::parse(line)), behind_line_(saves ? parts_.behind_keeping : parts_.behind), defers_(defers), k_(k) {
    before_ = fill(parts_.before, a_before_, rows, k, type);
    behind_ = fill(behind_line_, a_behind_, rows, columns, type);
    if (saves && parts_.before.rowwise()) a_before_.statistics = address();
  }
  warp_linear_call by_warps() const {
    return {.before = before_,
            .a_before = a_before_,
            .behind = behind_,
            .a_behind = a_behind_,
            .matrix = address(),
            .matrix_stride = k_,
            .k = k_};
  }
  // The first operand behind is booleans that all rows share.
  void pad() {
    behind_.line = spec::type_text(behind_line_, 1, false);
    behind_.operand[0] = dtype::boolean;
    a_behind_.operand[0] = view{address(), {}, dtype::boolean, 1};
  }
  probabilities_sm80_call scores() const {  // of two times three batches
    constexpr int64 kOuter = 2, kInner = 3;
    return {by_warps(), kOuter, kInner, kInner * a_behind_.columns * k_, a_behind_.columns * k_};
  }
  linear_call call() const {
    return {.before = defers_ ? before_ : no_words_,
            .a_before = defers_ ? a_before_ : no_arguments_,
            .behind = behind_,
            .a_behind = a_behind_,
            .defers = defers_,
            .input = address(),
            .input_stride = k_,
            .matrix = address(),
            .matrix_stride = k_,
            .k = k_,
            .sums = nullptr,
            .offsets = nullptr};
  }

 private:
  static void* address() { return reinterpret_cast<void*>(std::uintptr_t{4096}); }

  static request fill(const spec::line& line, arguments& a, int64 rows, int64 columns, dtype type) {
    const std::int64_t sizes[2] = {rows, columns};
    spec::imagined_frame f(line, sizes, type, type, type, {address(), address(), columns});
    f.forward(false, true);
    a = f.a;
    return request_of(f, false, spec::type_text(line, 0, false));
  }

  spec::contraction parts_;
  spec::line behind_line_;
  bool defers_;
  int64 k_;
  arguments a_before_{}, a_behind_{}, no_arguments_{};
  request before_, behind_, no_words_;
};

}  // namespace onepass::cuda
