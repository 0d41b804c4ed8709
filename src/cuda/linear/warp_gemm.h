// Lines with `linear` in one kernel whose warps multiply (sm_80 and later): what streamed and resident share.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

struct warp_linear_call {
  const request& before;  // x: what enters the words before `linear`; y is not written
  const arguments& a_before;
  const request& behind;  // y: the result
  const arguments& a_behind;
  const void* matrix;  // [columns, depth]
  int64 matrix_stride, depth;
};
struct warp_linear_plan {
  configuration before, behind;
  unsigned grid, threads, shared_bytes;
};

// Whether addresses and strides suit the kernels.
bool fits(const warp_linear_call&);
// Of so many threads a row; p.threads is set.
void describe_rows(const warp_linear_call&, int threads_of_row, warp_linear_plan& p);
// Bytes from one row in shared memory to the next, whose pieces of 64 bytes eight threads read at a time.
int pitch_of(int64 depth);

// of_before, of_all: further members of the Configs.
std::string source(const warp_linear_call&, const warp_linear_plan&, const std::string& header,
                   const std::string& function, const std::string& of_before, const std::string& of_all);
// members: what else the source depends on.
void launch(const warp_linear_call&, const warp_linear_plan&, const std::string& header,
            std::initializer_list<int> members, const std::function<std::string()>& source, int device, void* stream);

}  // namespace onepass::cuda
