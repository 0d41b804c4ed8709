// Errors with PyTorch's type: what the dispatcher passes on as RuntimeError. (STD_TORCH_CHECK would put the source
// file's place in front of the message.)
#pragma once

#include <sstream>
#include <stdexcept>

namespace onepass::binding {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace onepass::binding

// The message's parts are evaluated only where the condition is false.
#define ONEPASS_CHECK(condition, ...)                        \
  do {                                                       \
    if (!(condition)) ::onepass::binding::fail(__VA_ARGS__); \
  } while (false)
