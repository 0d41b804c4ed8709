// Lines with `linear` in one kernel whose warps multiply (mma, sm_80 and later): what small_m and small_k share.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

#include "src/cuda/row/configuration.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

struct warp_linear_call {
  const request& before;  // x: the input of the prologue; y is not written
  const arguments& a_before;
  const request& behind;  // y: the result
  const arguments& a_behind;
  const void* matrix;  // [columns, k]
  int64 matrix_stride, k;
};
struct warp_linear_plan {
  configuration before, behind;
  unsigned grid, threads, shared_bytes;
};

// Whether addresses and strides suit the kernels.
bool fits(const warp_linear_call&);
// Fills in both configurations for so many threads a row. p.threads is set already.
void describe_rows(const warp_linear_call&, int threads_of_row, warp_linear_plan& p);
// Bytes from one row in shared memory to the next: an odd multiple of 64, so that eight threads that read 64 bytes each
// of neighbouring rows have no bank conflicts.
int pitch_of(int64 k);

// of_before, of_all: further members of the prologue's Config and of the kernel's.
std::string source(const warp_linear_call&, const warp_linear_plan&, const std::string& header,
                   const std::string& function, const std::string& of_before, const std::string& of_all);
// members: what else the source depends on.
void launch(const warp_linear_call&, const warp_linear_plan&, const std::string& header,
            std::initializer_list<int> members, const std::function<std::string()>& source, int device, void* stream);

}  // namespace onepass::cuda
