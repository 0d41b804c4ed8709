// Predicts rates for other chips from those measured on the H200. docs/measured-facts.md, "Chips that were not
// measured".
#pragma once

#include "src/cuda/runtime/driver.h"

namespace onepass::choice {

struct chip_model {
  // Times relative to the H200's: of one thread's instructions; of instructions on all SMs; of mma on all SMs; and of
  // loads, by the bytes that all SMs have in flight.
  double clock = 1, issue = 1, mma = 1, in_flight = 1;
  double flops, flops_wide;  // flops a second of the library's GEMM in 16 bits and in float32
  double margin = 1;         // predicted seconds of our kernels are multiplied by it
  bool measured = true;
};
chip_model model_of(const cuda::device_facts&);

}  // namespace onepass::choice
