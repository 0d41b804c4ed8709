// Compiled kernels on disk, safe with many processes.
//
// An entry is one file: a text head (magic, label, key length, payload length, checksum), the key, the payload.
#include "src/cache/disk_cache.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "src/cache/hash.h"
#include "src/settings.h"

namespace onepass::cache {
namespace fs = std::filesystem;
namespace {

constexpr const char* kMagic = "onepass-cache-1";
constexpr std::chrono::minutes kLongestBuild{5};  // of another process, which may be stopped

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string name_of(const std::string& key, const char* extension) { return hash().add(key).hex() + "." + extension; }

struct head {
  std::string label, checksum;
  std::size_t key_bytes = 0, payload_bytes = 0;
};

std::optional<head> read_head(std::istream& in) {
  std::string magic, lengths;
  head h;
  if (!std::getline(in, magic) || magic != kMagic || !std::getline(in, h.label) || !std::getline(in, lengths))
    return {};
  std::istringstream numbers(lengths);
  if (!(numbers >> h.key_bytes >> h.payload_bytes >> h.checksum)) return {};
  return h;
}

void warn_once(const std::string& about, const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string> said;
  {
    const std::lock_guard lock(mutex);
    if (!said.insert(about).second) return;
  }
  warn(message);
}

void warn_of_memory(const std::string& why) { warn_once("memory", "compiled kernels are kept in memory only: " + why); }

std::optional<std::string> read_from(const std::optional<private_folder>& folder, const std::string& key,
                                     const char* extension) {
  if (!folder) return {};
  std::string refused;
  const std::optional<std::string> file = folder->read(name_of(key, extension), &refused);
  if (!refused.empty()) {
    const std::string name = (folder->path() / name_of(key, extension)).string();
    warn_once(folder->path().string() + "/",
              "the cache's file " + name + " is not used, since it " + refused + "; it is compiled again");
  }
  if (!file) return {};
  std::istringstream in(*file);
  const std::optional<head> h = read_head(in);
  if (!h || in.tellg() < 0) return {};
  const auto begin = static_cast<std::size_t>(in.tellg());
  if (h->key_bytes != key.size() || file->size() - begin < key.size()) return {};
  if (file->size() - begin - key.size() != h->payload_bytes || file->compare(begin, key.size(), key) != 0) return {};
  std::string payload = file->substr(begin + key.size());
  if (hash().add(payload).hex() != h->checksum) return {};
  return payload;
}

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

bool is_entry(const fs::directory_entry& file) {
  const std::string extension = file.path().extension().string();
  return file.is_regular_file() && (extension == ".cubin" || extension == ".so" || extension == ".way") &&
         file.path().stem().string().size() == 32;
}

const char* kind_of(const std::string& extension) {
  return extension == ".so" ? "cpu" : extension == ".way" ? "tuned" : "cuda";
}

// Nothing where no folder is named, or one that depends on where the process happens to be.
fs::path absolute_of(const char* name) {
  const fs::path path = variable(name);
  return path.is_absolute() ? path : fs::path();
}

// As the system knows it, whatever $HOME says.
fs::path home_of_user() {
  std::vector<char> room(16384);
  passwd entry{};
  passwd* found = nullptr;
  const fs::path home = getpwuid_r(geteuid(), &entry, room.data(), room.size(), &found) == 0 && found != nullptr &&
                                found->pw_dir != nullptr
                            ? fs::path(found->pw_dir)
                            : fs::path();
  return home.is_absolute() ? home : fs::path();
}

#ifdef __APPLE__
constexpr const char* kPlace = "Library/Caches/onepass";
#else
constexpr const char* kPlace = ".cache/onepass";
#endif

// As the environment names it; empty where it names none.
fs::path named_place() {
  if (const std::string own = variable("ONEPASS_CACHE_DIR"); !own.empty()) return own;
#ifndef __APPLE__
  if (const fs::path xdg = absolute_of("XDG_CACHE_HOME"); !xdg.empty()) return xdg / "onepass";
#endif
  const fs::path home = absolute_of("HOME");
  return home.empty() ? home : home / kPlace;
}

bool is_trusted(const fs::path& place) {
  const std::string why_not = private_folder::why_not(place);
  if (why_not.empty()) return true;
  warn_once(place.string(), "the cache directory " + place.string() + " is not used, since it " + why_not +
                                " (ONEPASS_CACHE_DIR names another place)");
  return false;
}

bool is_leftover(const fs::path& file) { return file.extension() == ".tmp" || file.filename() == kLockName; }

}  // namespace

fs::path directory() {
  if (const fs::path named = named_place(); !named.empty() && is_trusted(named)) return named;
  const fs::path home = home_of_user();
  return !home.empty() && is_trusted(home / kPlace) ? home / kPlace : fs::path();
}

std::optional<private_folder> folder() {
  const fs::path path = directory();
  if (path.empty()) {
    warn_of_memory("no directory is to be trusted with them (ONEPASS_CACHE_DIR names one)");
    return {};
  }
  std::optional<private_folder> opened = private_folder::open(path, true);
  if (!opened) warn_of_memory(path.string() + " cannot be made (ONEPASS_CACHE_DIR names another place)");
  return opened;
}

fs::path prebuilt_directory() {
  const fs::path beside = settings_now().library_dir;
  return beside.empty() ? beside : beside / "prebuilt";
}

// One's own first: what is prebuilt may be damaged, or refused by this driver, and was then built again.
std::optional<std::string> read(const std::string& key, const char* extension) {
  const fs::path path = directory();
  if (!path.empty()) {
    if (std::optional<std::string> own = read_from(private_folder::open(path, false), key, extension)) return own;
  }
  const fs::path prebuilt = prebuilt_directory();
  return prebuilt.empty() ? std::nullopt : read_from(private_folder::open_shared(prebuilt), key, extension);
}

bool write(const std::string& key, const char* extension, const std::string& label, const std::string& payload) {
  const std::optional<private_folder> into = folder();
  if (!into) return false;
  std::ostringstream text;
  text << kMagic << '\n'
       << one_line(label) << '\n'
       << key.size() << ' ' << payload.size() << ' ' << hash().add(payload).hex() << '\n'
       << key << payload;
  if (into->write(name_of(key, extension), text.str())) return true;
  const std::string why = std::strerror(errno);
  warn_of_memory(into->path().string() + " cannot be written: " + why + " (ONEPASS_CACHE_DIR names another place)");
  return false;
}

std::optional<key_lock> lock(const std::string& key, const std::function<void()>& check) {
  const std::optional<private_folder> in = folder();
  if (!in) return {};
  using clock = std::chrono::steady_clock;
  const clock::time_point end = clock::now() + kLongestBuild;
  key_lock made(*in, key, [&] {
    check();
    return clock::now() < end;
  });
  return std::optional<key_lock>(std::move(made));
}

std::vector<entry> list() {
  std::vector<entry> entries;
  std::error_code error;
  for (const fs::directory_entry& file : fs::directory_iterator(directory(), error)) {
    if (!is_entry(file)) continue;
    std::ifstream in(file.path(), std::ios::binary);
    const std::optional<head> h = read_head(in);
    const auto age = fs::file_time_type::clock::now() - fs::last_write_time(file.path(), error);
    entries.push_back({h ? h->label : "(damaged)", kind_of(file.path().extension().string()),
                       static_cast<std::uint64_t>(fs::file_size(file.path(), error)),
                       std::chrono::duration<double>(age).count()});
  }
  std::sort(entries.begin(), entries.end(), [](const entry& a, const entry& b) { return a.label < b.label; });
  return entries;
}

bool has_any(const char* extension) {
  std::error_code error;
  for (const fs::path& folder : {directory(), prebuilt_directory()}) {
    for (const fs::directory_entry& file : fs::directory_iterator(folder, error))
      if (file.path().extension() == std::string(".") + extension && is_entry(file)) return true;
  }
  return false;
}

std::size_t clear() {
  std::size_t removed = 0;
  std::error_code error;
  std::vector<fs::path> files;
  for (const fs::directory_entry& file : fs::directory_iterator(directory(), error)) {
    if (is_entry(file) || is_leftover(file.path())) files.push_back(file.path());
  }
  for (const fs::path& file : files) removed += fs::remove(file, error) && !is_leftover(file);
  return removed;
}

const std::string& headers_digest() {
  static const std::string digest = [] {
    std::vector<fs::path> files;
    std::error_code error;
    for (const char* folder : {"onepass", "src"}) {  // not hwy/
      for (const fs::directory_entry& file :
           fs::recursive_directory_iterator(fs::path(settings_now().include_dir) / folder, error)) {
        if (file.is_regular_file()) files.push_back(file.path());
      }
    }
    std::sort(files.begin(), files.end());
    hash all;
    for (const fs::path& file : files) {
      std::ifstream in(file, std::ios::binary);
      all.add(file.filename().string()).add(std::string(std::istreambuf_iterator<char>(in), {}));
    }
    return all.hex();
  }();
  return digest;
}

}  // namespace onepass::cache
