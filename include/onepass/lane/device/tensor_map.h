// What TMA knows of a tensor in global memory (CUtensorMap): made by the driver, passed to kernels as it is.
#pragma once

#include "onepass/lane/types.h"

namespace onepass {

struct alignas(64) tensor_map {
  uint64 words[16];
};
static_assert(sizeof(tensor_map) == 128);

}  // namespace onepass
