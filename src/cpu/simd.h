// The SIMD instructions that the CPU's kernels were compiled for.
#pragma once

namespace onepass::cpu {

const char* simd_target();  // the chosen one's name

// Throws where this CPU lacks what all kernels were compiled for: a build for one machine alone that runs on another.
void require_simd();

}  // namespace onepass::cpu
