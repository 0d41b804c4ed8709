// Compiles C++ for this machine with the system's compiler at first use, and opens the result.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace onepass {

class compiler_missing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct program {
  std::string source;
  std::string label;                 // what `onepass cache list` calls it
  std::vector<std::string> options;  // beside those that every program is compiled with
};

// The opened library, from the disk cache where it is there. The compiler is $ONEPASS_CXX, else $CXX, else c++, g++
// or clang++. Throws compiler_missing, or std::runtime_error with the compiler's message.
void* compile_and_open(const program& what);

void* symbol(void* library, const char* name);

// Which of them it is; empty where there is none.
const std::string& compiler_program();

}  // namespace onepass
