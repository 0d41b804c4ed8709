// Tensors on the CPU as matrices, one for each batch.
#pragma once

#include "src/cpu/matrix.h"
#include "src/torch/attention/batches.h"

namespace onepass::binding {

// A tensor's matrices, one for each batch of keys, in one dtype, their rows contiguous.
class matrices {
 public:
  matrices(const Tensor& t, int own, dtype type) : held_(in_dtype(t, type)), type_(type) {
    if (find(own)) return;
    held_ = torch::stable::contiguous(held_);
    find(own);
  }
  cpu::matrix part(std::int64_t batch, std::int64_t first, std::int64_t count) const {
    const std::int64_t at =
        batch / inner_.size * outer_.stride + batch % inner_.size * inner_.stride + first * rows_.stride;
    return {static_cast<char*>(held_.data_ptr()) + at * size_of(type_),
            type_,
            count,
            held_.size(held_.dim() - 1),
            rows_.stride,
            1};
  }
  cpu::matrix whole(std::int64_t batch) const { return part(batch, 0, rows_.size); }

 private:
  bool find(int own) {
    const int last = static_cast<int>(held_.dim()) - 1;
    const auto outer = merged(held_, 0, own - 1), inner = merged(held_, own > 0 ? own - 1 : 0, own),
               rows = merged(held_, own, last);
    constexpr std::int64_t kFarthest = 1 << 24;  // what is gathered from many rows counts in 32 bits
    if (!outer || !inner || !rows || rows->stride > kFarthest) return false;
    if (held_.stride(last) != 1 && held_.size(last) > 1) return false;
    outer_ = *outer, inner_ = *inner, rows_ = *rows;
    return true;
  }

  Tensor held_;
  dtype type_;
  dimension outer_{}, inner_{}, rows_{};
};

}  // namespace onepass::binding
