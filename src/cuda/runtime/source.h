// The text that NVRTC compiles: a kernel's header, a line's type and a Config.
#pragma once

#include <string>

#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

// Parts of a source: its macros with the include of onepass/kernel/<header>.cuda.h, and the members of a Config.
std::string heading(const request&, const std::string& header);
std::string fields(const request&, const configuration&);
std::string type_field(const char* name, dtype);
std::string number_field(const char* name, int);

// What NVRTC compiles.
std::string source(const request&, const configuration&);
inline constexpr int kFewSums = 2 * kMaxOperands;                            // that one call has
std::string column_sum_source(dtype parts, int sums, bool grouped = false);  // at most so many at a time

std::string function_of(const request&, const configuration&);  // the kernel's function, for kernel_name
// The name by which drivers, profilers and sanitizers show a function's kernel. Throws where kKernels lacks it.
std::string kernel_name(const std::string& function);
// Of a kernel's threads, the blocks of an SM that registers must leave room for, and the blocks of a cluster, or 0.
std::string bounds(int threads, int blocks_per_sm = 0, int cluster = 0);
std::string bounds(const configuration&);
// The entry point, behind the types: it calls function<types>(given).
std::string kernel_text(const std::string& function, const std::string& types, const std::string& bounds,
                        const std::string& arguments_type, const std::string& given = "a");

// The kernel of such a source (driver.h).
const kernel& load(const std::string& source, int device, void* stream, const std::string& label);

std::string label(const request&, const configuration&, const std::string& arch);

}  // namespace onepass::cuda
