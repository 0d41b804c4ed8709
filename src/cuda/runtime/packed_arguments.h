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

// The bytes of a struct from `begin` to its member `end`.
inline void append_between(std::string& to, const void* begin, const void* end) {
  to.append(static_cast<const char*>(begin), static_cast<const char*>(end));
}

inline void append_packed(std::string& to, const request& r, const arguments& a) {
  const auto add = [&](const auto* from, int count) { append_between(to, from, from + count); };
  append_between(to, &a, a.operand);
  add(a.operand, room_for(r.operands)), add(a.operand_gradient, room_for(r.operands));
  add(a.kept, room_for(r.keeps)), add(a.kept_gradient, room_for(r.keeps));
  append_between(to, &a.statistics, a.parameter);
  add(a.parameter, room_for(r.parameters));
  append_between(to, &a.task_rows, &a.groups);
  if (r.has_groups) append_value(to, a.groups);
}

}  // namespace onepass::cuda
