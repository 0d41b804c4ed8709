// Compiled kernels on disk, safe with many processes.
//
// An entry is one file: a text head (magic, label, key length, payload length, checksum), the key, the payload.
#include "src/cache/disk_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "src/cache/hash.h"
#include "src/settings.h"

namespace onepass::cache {
namespace fs = std::filesystem;
namespace {

constexpr const char* kMagic = "onepass-cache-1";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

fs::path path_in(const fs::path& folder, const std::string& key, const char* extension) {
  return folder / (hash().add(key).hex() + "." + extension);
}

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

std::optional<std::string> read_from(const fs::path& folder, const std::string& key, const char* extension) {
  std::ifstream in(path_in(folder, key, extension), std::ios::binary);
  if (!in) return {};
  const std::optional<head> h = read_head(in);
  if (!h || h->key_bytes != key.size() || h->payload_bytes > (std::size_t{1} << 30)) return {};
  std::string own_key(h->key_bytes, '\0'), payload(h->payload_bytes, '\0');
  if (!in.read(own_key.data(), static_cast<std::streamsize>(own_key.size())) || own_key != key) return {};
  if (!in.read(payload.data(), static_cast<std::streamsize>(payload.size())) || in.get() != EOF) return {};
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
  return file.is_regular_file() && (extension == ".cubin" || extension == ".so") &&
         file.path().stem().string().size() == 32;
}

void warn_once(const std::string& why) {
  static std::once_flag once;
  std::call_once(once, [&] { warn("compiled kernels are kept in memory only: " + why); });
}

}  // namespace

fs::path directory() {
  if (const std::string own = variable("ONEPASS_CACHE_DIR"); !own.empty()) return own;
#ifdef __APPLE__
  return fs::path(variable("HOME")) / "Library" / "Caches" / "onepass";
#else
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return fs::path(xdg) / "onepass";
  return fs::path(variable("HOME")) / ".cache" / "onepass";
#endif
}

fs::path prebuilt_directory() {
  const fs::path beside = settings_now().library_dir;
  return beside.empty() ? beside : beside / "prebuilt";
}

// One's own first: what is prebuilt may be damaged, or refused by this driver, and was then built again.
std::optional<std::string> read(const std::string& key, const char* extension) {
  if (std::optional<std::string> own = read_from(directory(), key, extension)) return own;
  const fs::path prebuilt = prebuilt_directory();
  return prebuilt.empty() ? std::nullopt : read_from(prebuilt, key, extension);
}

bool write(const std::string& key, const char* extension, const std::string& label, const std::string& payload) {
  static std::atomic<unsigned> counter{0};
  const fs::path target = path_in(directory(), key, extension);
  std::error_code error;
  fs::create_directories(target.parent_path(), error);
  fs::path temporary = target;
  temporary += "." + std::to_string(getpid()) + "." + std::to_string(counter++) + ".tmp";
  {
    std::ofstream out(temporary, std::ios::binary);
    out << kMagic << '\n'
        << one_line(label) << '\n'
        << key.size() << ' ' << payload.size() << ' ' << hash().add(payload).hex() << '\n'
        << key << payload;
    out.flush();
    if (!out) {
      fs::remove(temporary, error);
      warn_once(target.parent_path().string() + " cannot be written (ONEPASS_CACHE_DIR names another place)");
      return false;
    }
  }
  fs::rename(temporary, target, error);
  if (error) {
    const std::string why = error.message();
    fs::remove(temporary, error);
    warn_once(why);
    return false;
  }
  return true;
}

std::vector<entry> list() {
  std::vector<entry> entries;
  std::error_code error;
  for (const fs::directory_entry& file : fs::directory_iterator(directory(), error)) {
    if (!is_entry(file)) continue;
    std::ifstream in(file.path(), std::ios::binary);
    const std::optional<head> h = read_head(in);
    const auto age = fs::file_time_type::clock::now() - fs::last_write_time(file.path(), error);
    entries.push_back({h ? h->label : "(damaged)", file.path().extension() == ".so" ? "cpu" : "cuda",
                       static_cast<std::uint64_t>(fs::file_size(file.path(), error)),
                       std::chrono::duration<double>(age).count()});
  }
  std::sort(entries.begin(), entries.end(), [](const entry& a, const entry& b) { return a.label < b.label; });
  return entries;
}

std::size_t clear() {
  std::size_t removed = 0;
  std::error_code error;
  std::vector<fs::path> files;
  for (const fs::directory_entry& file : fs::directory_iterator(directory(), error)) {
    if (is_entry(file) || file.path().extension() == ".tmp") files.push_back(file.path());
  }
  for (const fs::path& file : files) removed += fs::remove(file, error) && file.extension() != ".tmp";
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
