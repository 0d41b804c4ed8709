// What NVRTC compiles: a skeleton, a line's type and a Config.
#pragma once

#include <string>

#include "src/cuda/configuration.h"

namespace onepass::cuda {

const char* name_of(dtype);  // as the sources write it

// Parts of a source: what stands before the skeleton's types, and the members of a Config.
std::string heading(const request&, const std::string& skeleton);
std::string fields(const request&, const configuration&);
int result_bits(const request&);  // significant ones of the results, at most
std::string type_field(const char* name, dtype);
std::string number_field(const char* name, int);

// What NVRTC compiles; the kernel is called kKernelName.
inline constexpr const char* kKernelName = "onepass_kernel";
std::string source(const request&, const configuration&);
inline constexpr int kFewSums = 2 * kMaxOperands;      // that one call has
std::string column_sum_source(dtype parts, int sums);  // at most so many at a time

// The kernel itself, behind the types: it calls `body` with its arguments, or with those of the tensor that has the
// block, where several share the launch.
std::string kernel_text(const configuration&, const std::string& arguments_type, const std::string& block,
                        const std::string& body);

std::string label(const request&, const configuration&, const std::string& arch);

}  // namespace onepass::cuda
