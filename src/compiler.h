// Compiles C++ for this machine with the system's compiler at first use, and opens the result.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace onepass {

// There is no compiler, or not one that does here: what it was to make has to be done without. The message says what
// happened and what to set.
class cannot_compile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct program {
  std::string source;
  std::string label;                 // what `onepass cache list` calls it
  std::vector<std::string> options;  // beside those that every program is compiled with
  std::string probe = {};  // not empty: the source is a user's too, and this is the same without what is theirs
  std::vector<std::string> pieces = {};  // not empty: sources that give the same library, each to a compiler of its own
};

// The opened library, from the disk cache where it is there; of several processes that want it one compiles. The
// compiler is $ONEPASS_CXX, else $CXX, else c++, g++ or clang++. Throws cannot_compile; where the probe compiles and
// the program does not, std::runtime_error with the compiler's message; interrupted (src/process.h).
void* compile_and_open(const program& what);

// As many as this process, or its container, has processors, or $MAX_JOBS where that is fewer.
std::size_t compilers_at_once();

void* symbol(void* library, const char* name);

// Which of them it is; empty where there is none.
const std::string& compiler_program();

}  // namespace onepass
