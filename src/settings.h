// What the host program tells the library once: where the shipped files lie, and how to ask or warn.
#pragma once

#include <string>

namespace onepass {

struct settings {
  std::string include_dir;                // holds onepass/ and hwy/
  std::string library_dir;                // holds what was built with the library
  const char* (*find_nvrtc)() = nullptr;  // a path, or "" where there is none
  void (*warn)(const char*) = nullptr;
};

settings& settings_now();
void warn(const std::string& message);

}  // namespace onepass
