// The autograd function in C++, which takes more of torch than its stable ABI: compiled at first use.
#pragma once

#include <string>

namespace onepass::binding {

struct torch_here {
  std::string root, version, python_include;
};

// Opens src/torch/autograd/autograd_function.h for this torch, compiled with the library or, where it may be, now; null
// where it may not. Once in a process; throws as compile_and_open does.
void* open_autograd(const torch_here&, bool may_compile);

}  // namespace onepass::binding
