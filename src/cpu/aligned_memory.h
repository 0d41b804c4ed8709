// Memory of a thread's own, from the start of a cache line on.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "onepass/lane/types.h"

namespace onepass::cpu {

class aligned_memory {
 public:
  explicit aligned_memory(int64 bytes = 0) { at_least(bytes); }
  // So many bytes; where there were fewer, with nothing in them.
  void* at_least(int64 bytes) {
    if (bytes > bytes_) {
      data_.reset(::operator new(static_cast<std::size_t>(bytes), kLine));
      bytes_ = bytes;
    }
    return data();
  }
  void* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct release {
    void operator()(void* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<void, release> data_;
  int64 bytes_ = 0;
};

}  // namespace onepass::cpu
