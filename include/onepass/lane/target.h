// Opens and closes the code that is compiled once for each machine target.
//
// Three readers include the lane, word and kernel headers:
//   the CPU kernels (ONEPASS_HIGHWAY): once for each SIMD target, through Highway's foreach_target;
//   NVRTC: once, everything a device function;
//   src/line (neither): once, for the descriptors alone.
// A header read more than once guards itself with Highway's toggle idiom:
//   #if defined(ONEPASS_STAGE_AFFINE_H_) == defined(HWY_TARGET_TOGGLE)
// HWY_TARGET_TOGGLE is never defined for the other two readers, so there it is an ordinary guard.
#pragma once

#include "onepass/lane/types.h"

#if defined(ONEPASS_HIGHWAY)
#include <hwy/highway.h>
#define ONEPASS_TARGET HWY_NAMESPACE
#define ONEPASS_BEGIN     \
  HWY_BEFORE_NAMESPACE(); \
  namespace onepass {     \
  namespace ONEPASS_TARGET {
#define ONEPASS_END \
  }                 \
  }                 \
  HWY_AFTER_NAMESPACE();
#define ONEPASS_FUNCTION HWY_INLINE                             // in front of every function of a lane, stage or chain
#define ONEPASS_LAMBDA __attribute__((always_inline)) HWY_ATTR  // behind the parameters of every lambda
#elif defined(__CUDACC__)
#define ONEPASS_TARGET device
#define ONEPASS_BEGIN \
  namespace onepass { \
  inline namespace device {
#define ONEPASS_END \
  }                 \
  }
#define ONEPASS_FUNCTION __device__ __forceinline__
#define ONEPASS_LAMBDA
#else
#define ONEPASS_TARGET host
#define ONEPASS_BEGIN \
  namespace onepass { \
  inline namespace host {
#define ONEPASS_END \
  }                 \
  }
#define ONEPASS_FUNCTION inline
#define ONEPASS_LAMBDA
ONEPASS_BEGIN  // named by the stages, never called here
template <class L>
L tanh(L);
template <class L>
L sigmoid(L);
ONEPASS_END
#endif
