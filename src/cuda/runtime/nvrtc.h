// CUDA C++ to a cubin with NVRTC, which is looked up at run time and needs no device.
#pragma once

#include <string>

namespace onepass::cuda {

std::string nvrtc_version();
std::string nvrtc_options(const std::string& arch_name);  // as text, for a kernel's key
// Throws with the compiler's log where the source does not compile.
std::string nvrtc_compile(const std::string& source, const std::string& arch_name, std::string* log = nullptr);

}  // namespace onepass::cuda
