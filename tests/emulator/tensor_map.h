// What TMA knows of a tensor, in a CUtensorMap's 128 bytes: numbers of 16 bits, in tiles of rows of 128
// bytes whose pieces are exchanged.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace onepass::emulator {

struct tensor_map {
  std::uint64_t data;
  std::array<std::int64_t, 5> sizes;
  std::array<std::int64_t, 4> strides;  // in bytes
  std::array<std::uint16_t, 5> box;
  std::uint16_t rank;

  static tensor_map at(std::uint64_t address) {
    if (address % 64 != 0) throw std::runtime_error("a tensor map that is not aligned");
    tensor_map map;
    std::memcpy(&map, reinterpret_cast<const void*>(address), sizeof map);
    return map;
  }
  std::size_t bytes() const {
    std::size_t all = 2;
    for (std::size_t k = 0; k < rank; ++k) all *= box[k];
    return all;
  }
  // place: of the tile in shared memory, which the exchange of pieces depends on.
  // may_read: throws where an address may not be read.
  template <class Check>
  void bring(const std::array<std::int64_t, 5>& first, char* tile, std::uint64_t place, const Check& may_read) const {
    for (std::size_t n = 0; n < bytes() / 2; ++n) {
      const char* from = number(first, n);
      if (from != nullptr && n % 8 == 0) may_read(from);
      const std::uint16_t zero = 0;
      std::memcpy(tile + in_tile(n, place), from ? from : reinterpret_cast<const char*>(&zero), 2);
    }
  }
  void store(const std::array<std::int64_t, 5>& first, const char* tile, std::uint64_t place) const {
    for (std::size_t n = 0; n < bytes() / 2; ++n)
      if (char* to = number(first, n)) std::memcpy(to, tile + in_tile(n, place), 2);
  }

 private:
  static std::int64_t in_tile(std::size_t n, std::uint64_t place) {
    return static_cast<std::int64_t>(swizzled(place + 2 * n)) - static_cast<std::int64_t>(place);
  }
  // Null outside of the tensor.
  char* number(const std::array<std::int64_t, 5>& first, std::size_t n) const {
    std::int64_t at = 0;
    for (std::size_t k = 0; k < rank; ++k) {
      const std::int64_t place = first[k] + static_cast<std::int64_t>(n % box[k]);
      n /= box[k];
      if (place < 0 || place >= sizes[k]) return nullptr;
      at += place * (k == 0 ? 2 : strides[k - 1]);
    }
    return reinterpret_cast<char*>(data) + at;
  }
};
static_assert(sizeof(tensor_map) <= 128);

}  // namespace onepass::emulator
