// FNV-1a, 128 bits: names cache entries. Entries carry their whole key, so a collision costs a rebuild, nothing more.
#pragma once

#include <string>
#include <string_view>

namespace onepass::cache {

class hash {
 public:
  hash& add(std::string_view text) {
    for (unsigned char c : text) state_ = (state_ ^ c) * kPrime;
    return *this;
  }
  std::string hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4) text += kDigits[static_cast<unsigned>(state_ >> shift) & 15];
    return text;
  }

 private:
  using word = unsigned __int128;
  static constexpr word kPrime = (word{1} << 88) + 0x13b;
  word state_ = (word{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;
};

}  // namespace onepass::cache
