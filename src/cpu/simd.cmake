# ONEPASS_SIMD: for which of Highway's targets the CPU's kernels are compiled. Sets SIMD_DEFINITIONS.
set(ONEPASS_SIMD native CACHE STRING "SIMD targets of the CPU's kernels: native (this machine's best alone), or all")
set_property(CACHE ONEPASS_SIMD PROPERTY STRINGS native all)

set(SIMD_DEFINITIONS "")
if(ONEPASS_SIMD STREQUAL native)
  # Each time anew: a build folder may have come from another machine.
  try_run(ran compiled SOURCE_FROM_CONTENT best_target.cc [[
#include <hwy/highway.h>
#include <cstdio>
int main() {
  const auto targets = hwy::SupportedTargets() & HWY_TARGETS;
  std::puts(hwy::TargetName(targets & -targets));
}
]]
    COMPILE_DEFINITIONS "-D${HWY_DISABLED}" LINK_LIBRARIES ${HWY_LIBRARY}
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${HWY_INCLUDE}" RUN_OUTPUT_VARIABLE SIMD_TARGET)
  if(NOT compiled OR NOT ran EQUAL 0)
    message(FATAL_ERROR "What SIMD instructions this machine has is not to be found out; say -DONEPASS_SIMD=all.\n${SIMD_TARGET}")
  endif()
  string(STRIP "${SIMD_TARGET}" SIMD_TARGET)
  message(STATUS "ONEPASS_SIMD=native: ${SIMD_TARGET}")
  # The target is the lowest that Highway reckons with, and the only one. Its functions have attributes for it, all others
  # have not, as -march=native would give them: what says that the CPU is another runs on that, too.
  set(SIMD_DEFINITIONS "HWY_BASELINE_TARGETS=HWY_${SIMD_TARGET};HWY_COMPILE_ONLY_STATIC")
elseif(NOT ONEPASS_SIMD STREQUAL all)
  message(FATAL_ERROR "ONEPASS_SIMD is native or all, not ${ONEPASS_SIMD}")
endif()
