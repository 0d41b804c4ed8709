// The choice of a way for a chip that is not here.
#pragma once

#include "src/choose/choose.h"

namespace onepass::cuda {

inline choice::decision chosen_on(const char* chip, const choice::call& call) {
  const device_facts facts = facts_of(chip);
  return choice::choose(call, &facts);
}

}  // namespace onepass::cuda
