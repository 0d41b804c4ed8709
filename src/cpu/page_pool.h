// Memory for large results on the CPU: huge pages, of which some are kept when a result is gone. A fresh page costs a
// fault and the system's zeros, a good part of the time in which a line passes over memory.
#pragma once

#include <cstddef>

#include "src/cpu/aligned_memory.h"

namespace onepass::cpu {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// At least so many bytes, from a huge page's start on; what is there is anything. nullptr where the system has none.
void* take_pages(std::size_t bytes);

// What take_pages gave. Pages that were given back first leave first, when all together would be more than
// ONEPASS_CPU_KEEP_MB, or else 1 GiB or a sixteenth of the machine's memory, whichever is less.
void give_pages(void* pages);

// Memory for a call: pages where it is large.
class large_memory {
 public:
  explicit large_memory(int64 bytes)
      : pages_(bytes >= static_cast<int64>(kHugePage) ? take_pages(static_cast<std::size_t>(bytes)) : nullptr),
        other_(pages_ ? 0 : bytes) {}
  ~large_memory() {
    if (pages_) give_pages(pages_);
  }
  large_memory(const large_memory&) = delete;
  large_memory& operator=(const large_memory&) = delete;
  void* data() const { return pages_ ? pages_ : other_.data(); }

 private:
  void* pages_;
  aligned_memory other_;
};

// Bytes that are kept, and all that are kept go.
std::size_t pages_kept();
void release_pages();

}  // namespace onepass::cpu
