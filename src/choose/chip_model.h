// What a chip does beside the H200, on which the rates of our kernels were measured: what is predicted for the others.
// docs/measured-facts.md, "Chips that were not measured".
#pragma once

#include "src/cuda/runtime/driver.h"

namespace onepass::choice {

struct chip_model {
  // How many times as long as on the H200: one thread's instructions; those of all SMs; products of warps on all SMs;
  // bytes that all SMs have on their way.
  double clock = 1, issue = 1, products = 1, on_their_way = 1;
  double flops, flops_wide;  // a second, of the library's product of 16 bits and of float32
  double margin = 1;         // by which a kernel of ours must be predicted to be faster
  bool measured = true;
};
chip_model model_of(const cuda::device_facts&);

}  // namespace onepass::choice
