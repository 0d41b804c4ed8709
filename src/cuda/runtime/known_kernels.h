// Kernels by keys, which are quicker to write than a kernel's source.
#pragma once

#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "src/cuda/runtime/driver.h"

namespace onepass::cuda {

// The bytes of plain values and of texts.
class kernel_key {
 public:
  template <class... Values>
  explicit kernel_key(const Values&... values) {
    (add(values), ...);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  template <class T>
  void add(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>, "padding would be part of the key");
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string bytes_;
};

class known_kernels {
 public:
  // build() gives a kernel that stays valid.
  template <class Build>
  const kernel& find_or_build(const kernel_key& key, const Build& build) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = known_.find(key.bytes()); found != known_.end()) return *found->second;
    }
    const kernel& built = build();
    const std::unique_lock lock(mutex_);
    return *known_.emplace(key.bytes(), &built).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, const kernel*> known_;
};

}  // namespace onepass::cuda
