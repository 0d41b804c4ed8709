// The autograd function in C++, which takes more of torch than its stable ABI: compiled at first use.
#pragma once

#include <string>

namespace onepass::binding {

// Opens src/torch/autograd_function.h for the torch in this folder, compiled with the library or now. Once in a
// process; throws as compile_and_open does.
void open_autograd(const std::string& torch_root, const std::string& torch_version);

}  // namespace onepass::binding
