// Compiled kernels on disk, safe with many processes: entries appear whole by a rename, carry their key and a
// checksum, and are built again when either does not fit. A cache that cannot be written is no error: one warning.
// Entries run in this process: a directory or file that somebody but us or root owns or may write is not read
// (private_files.h), with one warning.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/cache/private_files.h"

namespace onepass::cache {

// $ONEPASS_CACHE_DIR, else the platform's place: $XDG_CACHE_HOME/onepass, $HOME/.cache/onepass or
// $HOME/Library/Caches/onepass. Where that is not to be trusted, or $HOME is not set, the one in the home directory
// that the system knows for the user. Empty where there is none.
std::filesystem::path directory();

// It, made and opened for writing. None, with one warning, where that cannot be.
std::optional<private_folder> folder();

inline constexpr const char* kWorkFolders = ".onepass-build";  // of compilations under way: how their names begin

// What came with the library, an entry each as in a cache: looked at second, never written, listed or cleared.
// Empty where nothing says where the library lies.
std::filesystem::path prebuilt_directory();

std::optional<std::string> read(const std::string& key, const char* extension);
// False where it could not be written.
bool write(const std::string& key, const char* extension, const std::string& label, const std::string& payload);

// Until it goes, no other process builds what has this key, so that of several that want it at once one does: read
// again behind it. None where there is no cache, or no lock to be had in some minutes. `check` is called while it
// waits, and may throw.
std::optional<key_lock> lock(const std::string& key, const std::function<void()>& check);

struct entry {
  std::string label, kind;
  std::uint64_t bytes;
  double age_seconds;
};
std::vector<entry> list();
bool has_any(const char* extension);  // one's own, or of what came with the library
std::size_t clear();

// Digest of every header of ours that something is compiled from at first use, computed once.
const std::string& headers_digest();

}  // namespace onepass::cache
