// Compiles a line for this CPU with the system's C++ compiler, and opens the result.
#pragma once

#include <stdexcept>
#include <string>

namespace onepass::cpu {

class compiler_missing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The opened library, from the disk cache where it is there. The compiler is $ONEPASS_CXX, else $CXX, else c++, g++
// or clang++. Throws compiler_missing, or std::runtime_error with the compiler's message.
void* compile_and_open(const std::string& source, const std::string& label);

void* symbol(void* library, const char* name);

// Which of them it is; empty where there is none.
const std::string& compiler_program();

}  // namespace onepass::cpu
