// Files that nobody but us and root can have written: what is loaded from the cache runs as part of this process.
//
// A folder is opened once and asked who owns it; all else goes through that descriptor, so that another folder, or a
// link, which somebody puts in its place meanwhile is not looked at.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace onepass::cache {

// A descriptor that is closed at the end; -1: none.
class descriptor_of_file {
 public:
  explicit descriptor_of_file(int number = -1) : number_(number) {}
  descriptor_of_file(descriptor_of_file&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  descriptor_of_file& operator=(descriptor_of_file&& other) noexcept;
  ~descriptor_of_file();
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

bool write_all(int file, std::string_view contents);

class private_folder {
 public:
  // Why it is not to be trusted: "belongs to user 1000", "may be written by others". Empty where it may be.
  static std::string why_not(const std::filesystem::path&);

  // None where it is not there, cannot be opened, or is not to be trusted. `make`: made first, with mode 0700, as are
  // the folders that it is in.
  static std::optional<private_folder> open(const std::filesystem::path&, bool make);

  // One in which others have files too, or which is trusted whoever owns it: nothing is asked of it and of its files.
  static std::optional<private_folder> open_shared(const std::filesystem::path&);

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_.number(); }

  // A whole file. None where it is not there; where it is a link or no file, or somebody else's, `refused` says why.
  std::optional<std::string> read(const std::string& name, std::string* refused) const;

  // Puts a file of mode 0600 in the place of what is there, whole by a rename. False, with errno, where that fails.
  bool write(const std::string& name, std::string_view contents) const;

  // A folder in it that did not exist, of mode 0700. None, with errno, where that fails.
  std::optional<private_folder> make_folder(const std::string& prefix) const;

  // Names a folder of it otherwise.
  bool rename(private_folder& inner, const std::string& name) const;

 private:
  private_folder(std::filesystem::path path, descriptor_of_file descriptor, bool checks_owners)
      : path_(std::move(path)), descriptor_(std::move(descriptor)), checks_owners_(checks_owners) {}

  std::filesystem::path path_;
  descriptor_of_file descriptor_;
  bool checks_owners_;  // of files
};

// While it lives no other holder has the same key of this folder, in this process or another; one that ends lets go.
// Where locks do not work there is none.
class key_lock {
 public:
  // Waits, as long as `waits` says true.
  template <class Waits>
  key_lock(const private_folder& in, std::string_view key, const Waits& waits) : key_lock(in, key, true) {
    while (!try_lock() && waits()) {
    }
  }
  // Held where nobody has it, in a folder that had a lock before.
  static key_lock if_free(const private_folder& in, std::string_view key);
  key_lock(key_lock&& other) noexcept;
  ~key_lock();
  bool is_held() const { return held_; }

 private:
  key_lock(const private_folder& in, std::string_view key, bool make);
  bool try_lock();  // or sleeps a little
  bool set(int type) const;

  descriptor_of_file file_;
  long long place_;
  bool held_ = false;
};

inline constexpr const char* kLockName = ".lock";

}  // namespace onepass::cache
