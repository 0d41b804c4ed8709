// Compiled kernels on disk, safe with many processes: entries appear whole by a rename, carry their key and a
// checksum, and are built again when either does not fit. A cache that cannot be written is no error: one warning.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace onepass::cache {

// $ONEPASS_CACHE_DIR, else the platform's place: $XDG_CACHE_HOME/onepass, ~/.cache/onepass, ~/Library/Caches/onepass.
std::filesystem::path directory();

// What came with the library, an entry each as in a cache: looked at second, never written, listed or cleared.
// Empty where nothing says where the library lies.
std::filesystem::path prebuilt_directory();

std::optional<std::string> read(const std::string& key, const char* extension);
// False where it could not be written.
bool write(const std::string& key, const char* extension, const std::string& label, const std::string& payload);

struct entry {
  std::string label, kind;
  std::uint64_t bytes;
  double age_seconds;
};
std::vector<entry> list();
std::size_t clear();

// Digest of every header of ours that something is compiled from at first use, computed once.
const std::string& headers_digest();

}  // namespace onepass::cache
