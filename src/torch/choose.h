// The choice of a way (src/choose/choose.h) for a call's tensors.
#pragma once

#include <string>

#include "src/choose/choose.h"
#include "src/torch/check.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

// Tries ways, best first, until `take` accepts one; it refuses where the kernel cannot read the tensors' layout or
// cannot be compiled. The library's way is not tried. `word`: where the way that a line names cannot run, the word that
// an error names; null: such a line takes the library's.
template <class Take>
choice::implementation take_way(choice::call of, const device& on, const char* word, const Take& take) {
  if (of.named == spec::strategy::unfused) return choice::implementation::library;
  const cuda::device_facts* chip = on.is_cuda() ? &cuda::facts(on.index) : nullptr;
  for (;;) {
    const choice::decision found = choose(of, chip);
    const choice::way& way = found.chosen();
    if (!way.serves()) {
      ONEPASS_CHECK(word == nullptr, "onepass: '", std::string(word), "(", std::string(spec::name_of(of.named)),
                    ")' cannot take this call: ", found.of(of.named).why_not);
      return choice::implementation::library;
    }
    if (way.by == choice::implementation::library || take(way)) return way.by;
    of.unfit |= std::uint32_t{1} << static_cast<int>(way.by);
  }
}

}  // namespace onepass::binding
