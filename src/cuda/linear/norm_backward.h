// Backward of a norm and a `linear` of few features in one pass (onepass/kernel/linear/norm_backward_sm90.cuda.h):
// where it serves, and its launches.
#pragma once

#include <string>

#include "onepass/lane/types.h"
#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

inline constexpr int kNarrowFeatures = 64;

// How blocks share x: `slices` of them have a tile of rows, `teams` of so many run at a time.
struct narrow_plan {
  int slices, teams;
  int64 tiles, stride;  // tiles of rows; numbers of a feature in the products
  // Of the floats and counters that the kernels need beside their inputs and results.
  int64 shares() const { return tiles * slices * 64; }
  int64 part() const { return kNarrowFeatures * stride + 2 * kNarrowFeatures; }
};
narrow_plan plan_narrow(int64 rows, int64 depth, const device_facts&);

struct narrow_call {
  const void *x, *folded, *gradient;  // [rows, depth]; the matrix that a norm is folded into; [rows, features]
  void* dx;                           // [rows, depth], dense
  int64 rows, depth, features, x_stride, gradient_stride;
  const float* statistics;
  bool centres;
  dtype type;
  float* shares;    // plan.shares()
  unsigned* ready;  // [plan.tiles], 0
  float* products;  // [plan.teams][plan.part()]
};
std::string source(const narrow_call&);
void launch(const narrow_call&, const narrow_plan&, int device, void* stream);

struct narrow_gradients_call {
  float *parts, *products;            // [plan.teams][plan.part()]; [plan.part()]
  const void *matrix, *scale, *bias;  // [features, depth]; [depth], or null
  void *matrix_gradient, *scale_gradient, *bias_gradient, *result_bias_gradient;  // or null
  int64 depth, features, matrix_stride;
  dtype type, scale_type, bias_type, result_bias_type;  // none: there is none
};
std::string source(const narrow_gradients_call&);
void launch(const narrow_gradients_call&, const narrow_plan&, int device, void* stream);

}  // namespace onepass::cuda
