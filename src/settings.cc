// What the host program tells the library once: where the shipped files lie, and how to ask or warn.
#include "src/settings.h"

#include <cstdio>

namespace onepass {

settings& settings_now() {
  static settings now;
  return now;
}

void warn(const std::string& message) {
  if (settings_now().warn) settings_now().warn(message.c_str());
  else std::fprintf(stderr, "onepass: %s\n", message.c_str());
}

}  // namespace onepass
