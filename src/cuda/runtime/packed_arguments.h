// A kernel's arguments with room for what its line has, as it is compiled to take them.
#pragma once

#include <algorithm>
#include <string>

#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

template <class T>
void append_value(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

inline void append_bytes(std::string& to, const void* from, std::size_t count) {
  to.append(static_cast<const char*>(from), count);
}

inline void append_packed(std::string& to, const request& r, const arguments& a) {
  const auto add = [&](const auto* from, int count) {
    append_bytes(to, from, sizeof *from * static_cast<std::size_t>(count));
  };
  const auto between = [&](const void* begin, const void* end) {
    append_bytes(to, begin, static_cast<std::size_t>(static_cast<const char*>(end) - static_cast<const char*>(begin)));
  };
  between(&a, a.operand);
  add(a.operand, room_for(r.operands)), add(a.operand_gradient, room_for(r.operands));
  add(a.kept, room_for(r.keeps)), add(a.kept_gradient, room_for(r.keeps));
  between(&a.statistics, a.parameter);
  add(a.parameter, room_for(r.parameters));
  between(&a.task_rows, &a + 1);
}

}  // namespace onepass::cuda
