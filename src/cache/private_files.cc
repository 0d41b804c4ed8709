// Files that nobody but us and root can have written: what is loaded from the cache runs as part of this process.
#include "src/cache/private_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "src/cache/hash.h"

namespace onepass::cache {
namespace fs = std::filesystem;
namespace {

constexpr off_t kMostBytes = off_t{1} << 30;

std::string why_not(const struct stat& of) {
  if (of.st_uid != geteuid() && of.st_uid != 0) return "belongs to user " + std::to_string(of.st_uid);
  if ((of.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "may be written by others";
  return {};
}

// The folder and those that it is in: our own, where they were not there.
void make_folders(const fs::path& path) {
  fs::path so_far;
  for (const fs::path& part : path) {
    so_far /= part;
    mkdir(so_far.c_str(), S_IRWXU);  // fails where it is there; what else is wrong, opening it says
  }
}

std::optional<std::string> read_all(int file, off_t bytes) {
  std::string contents(static_cast<std::size_t>(bytes), '\0');
  std::size_t at = 0;
  while (at < contents.size()) {
    const ssize_t got = ::read(file, contents.data() + at, contents.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return {};
    at += static_cast<std::size_t>(got);
  }
  return contents;
}

std::string unique_name(const std::string& prefix) {
  static std::atomic<unsigned> counter{0};
  return prefix + "." + std::to_string(getpid()) + "." + std::to_string(counter++);
}

}  // namespace

bool write_all(int file, std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t wrote = ::write(file, contents.data(), contents.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    contents.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return true;
}

descriptor_of_file& descriptor_of_file::operator=(descriptor_of_file&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

descriptor_of_file::~descriptor_of_file() {
  if (number_ >= 0) close(number_);
}

std::string private_folder::why_not(const fs::path& path) {
  struct stat found {};
  const descriptor_of_file folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder || fstat(folder.number(), &found) != 0) return {};
  return cache::why_not(found);
}

std::optional<private_folder> private_folder::open(const fs::path& path, bool make) {
  if (make) make_folders(path);
  descriptor_of_file folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat found {};
  if (!folder || fstat(folder.number(), &found) != 0 || !cache::why_not(found).empty()) return {};
  return private_folder(path, std::move(folder), true);
}

std::optional<private_folder> private_folder::open_shared(const fs::path& path) {
  descriptor_of_file folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return {};
  return private_folder(path, std::move(folder), false);
}

std::optional<std::string> private_folder::read(const std::string& name, std::string* refused) const {
  const int links = checks_owners_ ? O_NOFOLLOW : 0;
  const descriptor_of_file file(openat(descriptor(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | links));
  if (!file) {
    if (errno == ELOOP && refused != nullptr) *refused = "is a link";
    return {};
  }
  struct stat found {};
  if (fstat(file.number(), &found) != 0 || !S_ISREG(found.st_mode) || found.st_size > kMostBytes) return {};
  if (const std::string why = cache::why_not(found); checks_owners_ && !why.empty()) {
    if (refused != nullptr) *refused = why;
    return {};
  }
  return read_all(file.number(), found.st_size);
}

bool private_folder::write(const std::string& name, std::string_view contents) const {
  const std::string temporary = unique_name(name) + ".tmp";
  const auto failed = [&] {
    const int why = errno;
    unlinkat(descriptor(), temporary.c_str(), 0);
    errno = why;
    return false;
  };
  {
    const int how = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const descriptor_of_file file(openat(descriptor(), temporary.c_str(), how, S_IRUSR | S_IWUSR));
    if (!file) return false;
    if (!write_all(file.number(), contents)) return failed();
  }
  return renameat(descriptor(), temporary.c_str(), descriptor(), name.c_str()) == 0 || failed();
}

std::optional<private_folder> private_folder::make_folder(const std::string& prefix) const {
  const std::string name = unique_name(prefix);
  if (mkdirat(descriptor(), name.c_str(), S_IRWXU) != 0) return {};
  descriptor_of_file made(openat(descriptor(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found {};
  if (!made || fstat(made.number(), &found) != 0 || !cache::why_not(found).empty()) return {};
  return private_folder(path_ / name, std::move(made), true);
}

bool private_folder::rename(private_folder& inner, const std::string& name) const {
  if (renameat(descriptor(), inner.path_.filename().c_str(), descriptor(), name.c_str()) != 0) return false;
  inner.path_ = path_ / name;
  return true;
}

// A byte of one file for each key: nothing is left behind, and two keys that share a byte only wait for each other.
key_lock::key_lock(const private_folder& in, std::string_view key, bool make)
    : file_(openat(in.descriptor(), kLockName, O_RDWR | (make ? O_CREAT : 0) | O_NOFOLLOW | O_CLOEXEC,
                   S_IRUSR | S_IWUSR)),
      place_(static_cast<long long>(std::stoull(hash().add(key).hex().substr(0, 15), nullptr, 16))) {}

key_lock key_lock::if_free(const private_folder& in, std::string_view key) {
  key_lock made(in, key, false);
  made.held_ = made.file_ && made.set(F_WRLCK);
  return made;
}

key_lock::key_lock(key_lock&& other) noexcept
    : file_(std::move(other.file_)), place_(other.place_), held_(std::exchange(other.held_, false)) {}

key_lock::~key_lock() {
  if (held_) set(F_UNLCK);  // to close it is not enough where this process has been forked meanwhile
}

bool key_lock::set(int type) const {
#ifdef F_OFD_SETLK
  struct flock all {};
  all.l_type = static_cast<short>(type), all.l_whence = SEEK_SET, all.l_start = place_, all.l_len = 1;
  return fcntl(file_.number(), F_OFD_SETLK, &all) == 0;
#else
  errno = ENOSYS;
  return false;
#endif
}

bool key_lock::try_lock() {
  held_ = file_ && set(F_WRLCK);
  if (held_ || !file_ || (errno != EAGAIN && errno != EACCES && errno != EINTR)) return true;
  usleep(10000);
  return false;
}

}  // namespace onepass::cache
