#include "src/cpu/simd.h"

#include <hwy/highway.h>

#include <stdexcept>
#include <string>

namespace onepass::cpu {

const char* simd_target() {
  const auto ours = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(ours ? ours & -ours : HWY_STATIC_TARGET);
}

void require_simd() {
#if defined(HWY_COMPILE_ONLY_STATIC)
  if (hwy::SupportedTargets() & HWY_TARGETS) return;
  throw std::runtime_error(std::string("onepass was built for ") + simd_target() +
                           " alone (ONEPASS_SIMD=native), which this CPU does not have: build it on this machine, or "
                           "for every CPU with cmake -DONEPASS_SIMD=all");
#endif
}

}  // namespace onepass::cpu
