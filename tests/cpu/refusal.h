// What the public interface for C++ says where it refuses a call.
#pragma once

#include <stdexcept>
#include <string>

namespace onepass {

// The message, or "" where nothing was refused.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

}  // namespace onepass
