// Runs another program, here a compiler, which does not outlive this process and can be given up.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace onepass {

struct run_result {
  int status;  // the exit status; 128 and a signal's number where one ended it; 126, 127: it could not be started
  std::string output;  // what it printed, the first 64 KB of it
};

// The program and its arguments, without their being read by a shell; `variables` are added to its environment. It and
// all that it starts are a process group of their own, which Ctrl-C does not reach, and end with this process, however
// that ends. Throws interrupted.
run_result run_program(const std::vector<std::string>& command,
                       const std::vector<std::pair<std::string, std::string>>& variables = {});

// What is given up.
class interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "onepass: a compilation was interrupted"; }
};

// From any thread: programs that run now, and those that wait for one of another process, end with `interrupted`.
void interrupt_programs();

// Throws interrupted where interrupt_programs was called since this began.
class interruption {
 public:
  interruption();
  void check() const;

 private:
  unsigned began_;
};

}  // namespace onepass
