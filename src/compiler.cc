// Compiles C++ for this machine with the system's compiler at first use, and opens the result.
#include "src/compiler.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <optional>
#include <sstream>
#include <system_error>
#include <vector>

#include "src/cache/disk_cache.h"
#include "src/process.h"
#include "src/settings.h"

namespace onepass {
namespace fs = std::filesystem;
namespace {

using cache::private_folder;

constexpr std::size_t kMostMessage = 4000;
constexpr const char* kInput = "onepass.cc";
constexpr const char* kOutput = "onepass.so";
std::string piece_name(std::size_t i) { return "piece-" + std::to_string(i) + ".cc"; }

// A folder of its own for one compilation, removed at the end, and locked until then: what a killed process has left is
// not, and the next one removes it.
class work_folder {
 public:
  // None, with errno, where it cannot be made.
  static std::optional<work_folder> in(const private_folder& place) {
    remove_leftovers(place);
    std::optional<private_folder> made = place.make_folder(kNew);
    if (!made) return {};
    work_folder folder(std::move(*made));
    const std::string name = folder.path().filename().string();
    if (!place.rename(folder.folder_, cache::kWorkFolders + name.substr(std::strlen(kNew)))) return {};
    return folder;
  }
  work_folder(work_folder&&) = default;
  work_folder& operator=(work_folder&&) = delete;
  ~work_folder() {
    std::error_code ignored;
    if (folder_.descriptor() >= 0) fs::remove_all(folder_.path(), ignored);
  }

  const fs::path& path() const { return folder_.path(); }
  bool write(const char* name, const std::string& text) const { return folder_.write(name, text); }
  std::optional<std::string> read(const char* name) const { return folder_.read(name, nullptr); }

 private:
  static constexpr const char* kNew = ".onepass-new";  // as long as it is not locked

  explicit work_folder(private_folder folder)
      : folder_(std::move(folder)), lock_(folder_, kInput, [] { return false; }) {}

  static void remove_leftovers(const private_folder& place) {
    std::error_code error;
    std::vector<fs::path> found;
    for (const fs::directory_entry& file : fs::directory_iterator(place.path(), error)) {
      if (file.path().filename().string().starts_with(cache::kWorkFolders)) found.push_back(file.path());
    }
    for (const fs::path& path : found) {
      fs::remove(path, error);  // where it is empty; nothing may be made in one that is being removed
      const std::optional<private_folder> folder = private_folder::open(path, false);
      if (folder && cache::key_lock::if_free(*folder, kInput).is_held()) fs::remove_all(path, error);
    }
  }

  private_folder folder_;
  cache::key_lock lock_;
};

// Where work folders may be: in the cache, where others of this user find what is left, else with temporary files.
std::vector<private_folder> places() {
  std::vector<private_folder> all;
  if (std::optional<private_folder> cached = cache::folder()) all.push_back(std::move(*cached));
  std::error_code error;
  const fs::path temporary = fs::temp_directory_path(error);
  if (std::optional<private_folder> shared = private_folder::open_shared(temporary); !error && shared)
    all.push_back(std::move(*shared));
  return all;
}

constexpr const char* kPlacesHelp = "ONEPASS_CACHE_DIR or TMPDIR names a folder with room";

struct compiler {
  std::string program;
  std::string version;  // what --version prints: a new compiler means new kernels
};

const compiler& find_compiler() {
  static const compiler found = [] {
    std::vector<std::string> candidates;
    const char* own = std::getenv("ONEPASS_CXX");
    const char* cxx = std::getenv("CXX");
    if (own && *own) candidates = {own};
    else if (cxx && *cxx) candidates = {cxx, "c++", "g++", "clang++"};
    else candidates = {"c++", "g++", "clang++"};
    for (const std::string& program : candidates) {
      const run_result asked = run_program({program, "--version"});
      if (asked.status == 0) return compiler{program, asked.output};
    }
    return compiler{};
  }();
  return found;
}

// -march=native depends on the CPU: its flags are part of the key.
const std::string& cpu_flags() {
  static const std::string flags = [] {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return line;
    }
    return std::string();
  }();
  return flags;
}

// Of what a compiler prints, what a warning has room for.
std::string errors_in(const std::string& output) {
  std::istringstream in(output);
  std::string all, first;
  int count = 0;
  for (std::string line; std::getline(in, line) && count < 3;) {
    if (first.size() < 500) first += "\n  " + line;
    if (line.find("error") != std::string::npos) all += "\n  " + line, ++count;
  }
  return all.empty() ? first : all;
}

struct attempt {
  std::optional<std::string> library;
  run_result run{0, {}};
  bool has_room = true;
};

// Compilers put files of their own beside ours, in the folder that is removed. what: "-shared" or "-c".
run_result run_compiler(const work_folder& folder, const compiler& with, const program& of, const char* what,
                        const std::vector<std::string>& inputs, const std::string& output) {
  std::vector<std::string> command{with.program, "-std=c++20", "-fPIC", what, "-fvisibility=hidden"};
  command.insert(command.end(), {"-I", settings_now().include_dir});
  for (const std::string& input : inputs) command.push_back((folder.path() / input).string());
  command.insert(command.end(), {"-o", (folder.path() / output).string()});
  command.insert(command.end(), of.options.begin(), of.options.end());
  return run_program(command, {{"TMPDIR", folder.path().string()}, {"LC_ALL", "C"}});
}

// All at once, then linked; the first that fails.
run_result run_compilers(const work_folder& folder, const compiler& with, const program& what, std::size_t count) {
  std::vector<std::string> objects;
  std::vector<std::future<run_result>> running;
  for (std::size_t i = 0; i < count; ++i) {
    objects.push_back("piece-" + std::to_string(i) + ".o");
    const auto run = [&, i, object = objects.back()] {
      return run_compiler(folder, with, what, "-c", {piece_name(i)}, object);
    };
    try {
      running.push_back(std::async(std::launch::async, run));
    } catch (const std::system_error&) {  // there is no thread to be had
      running.push_back(std::async(std::launch::deferred, run));
    }
  }
  for (const auto& each : running) each.wait();  // also where one is interrupted
  for (auto& each : running)
    if (const run_result result = each.get(); result.status != 0) return result;
  return run_compiler(folder, with, what, "-shared", objects, kOutput);
}

attempt compile_in(const work_folder& folder, const compiler& with, const program& what, const std::string& source,
                   const std::vector<std::string>& pieces = {}) {
  attempt made;
  bool written = folder.write(kInput, source);
  for (std::size_t i = 0; written && i < pieces.size(); ++i) written = folder.write(piece_name(i).c_str(), pieces[i]);
  if (!written) {
    made.has_room = false, made.run.output = std::strerror(errno);
    return made;
  }
  made.run = pieces.empty() ? run_compiler(folder, with, what, "-shared", {kInput}, kOutput)
                            : run_compilers(folder, with, what, pieces.size());
  if (made.run.status == 0) made.library = folder.read(kOutput);
  for (const char* full : {"No space left on device", "Disk quota exceeded", "File too large", "Read-only file system"})
    if (!made.library && made.run.output.find(full) != std::string::npos) made.has_room = false;
  return made;
}

std::string said_of(const compiler& with, const run_result& run) {
  const std::string version = with.version.substr(0, with.version.find('\n'));
  return with.program + " (" + version + ") failed with " +
         (run.status > 128 ? "signal " + std::to_string(run.status - 128) : "status " + std::to_string(run.status));
}

std::string compile(const compiler& with, const program& what) {
  std::string why = "there is none";
  for (const private_folder& place : places()) {
    const std::optional<work_folder> folder = work_folder::in(place);
    if (!folder) {
      why = place.path().string() + ": " + std::strerror(errno);
      continue;
    }
    attempt made = compile_in(*folder, with, what, what.source, what.pieces);
    if (made.run.status > 128 && !what.pieces.empty())  // one of them was ended: there may be memory for one alone
      made = compile_in(*folder, with, what, what.source);
    if (made.library) return *made.library;
    if (!made.has_room) {
      why = place.path().string() + ":" + errors_in(made.run.output);
      continue;
    }
    if (!what.probe.empty() && compile_in(*folder, with, what, what.probe).library)
      throw std::runtime_error("onepass: " + said_of(with, made.run) + ":\n" + made.run.output.substr(0, kMostMessage));
    throw cannot_compile(said_of(with, made.run) + (made.run.status > 128 ? ", for want of memory perhaps" : "") +
                         "; ONEPASS_CXX names a compiler of C++20, such as GCC 11 or Clang 14 and newer ones:" +
                         errors_in(made.run.output));
  }
  throw cannot_compile("no folder to compile in, " + why + "\n" + kPlacesHelp);
}

// The dynamic linker knows a library by its path, and takes a second one of the same path for the first; this is
// another one for every library, of the same file.
std::string path_of(int file) {
  static std::atomic<unsigned> counter{0};
  std::string path = "/proc/self/fd";
  for (unsigned bits = counter++; bits != 0; bits >>= 1) path += (bits & 1) != 0 ? "/." : "//.";
  return path + "/" + std::to_string(file);
}

// Of memory, where no other process can put something else in its place, and wherever files may not be executed.
void* open_in_memory(const std::string& library) {
#ifdef MFD_CLOEXEC
  const cache::descriptor_of_file file(memfd_create("onepass", MFD_CLOEXEC));
  if (!file || !cache::write_all(file.number(), library)) return nullptr;
  return dlopen(path_of(file.number()).c_str(), RTLD_NOW | RTLD_LOCAL);
#else
  return nullptr;
#endif
}

// dlopen wants a file of nothing but the library; it may go once it is mapped.
void* open(const std::string& library) {
  if (void* handle = open_in_memory(library)) return handle;
  std::string why = "there is no folder for it";
  for (const private_folder& place : places()) {
    const std::optional<work_folder> folder = work_folder::in(place);
    if (!folder || !folder->write(kOutput, library)) {
      why = place.path().string() + ": " + std::strerror(errno);
      continue;
    }
    if (void* handle = dlopen((folder->path() / kOutput).c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    why = dlerror();
  }
  throw cannot_compile("what was compiled cannot be opened: " + why + "\n" + kPlacesHelp +
                       " whose files may be executed");
}

// That a container's processes may use at a time; 0 where there is no limit.
std::size_t processors_of_container() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");  // "max 100000", or microseconds of each so many
  double used = 0, of = 0;
  return file >> used >> of && of > 0 ? static_cast<std::size_t>(std::ceil(used / of)) : 0;
}

}  // namespace

std::size_t compilers_at_once() {
  cpu_set_t ours;
  CPU_ZERO(&ours);
  const bool known = sched_getaffinity(0, sizeof ours, &ours) == 0;
  std::size_t processors = known ? static_cast<std::size_t>(CPU_COUNT(&ours)) : 1;
  if (const std::size_t quota = processors_of_container(); quota > 0) processors = std::min(processors, quota);
  const char* most = std::getenv("MAX_JOBS");
  const std::size_t limit = most != nullptr ? std::strtoul(most, nullptr, 10) : 0;
  return std::max<std::size_t>(limit > 0 ? std::min(limit, processors) : processors, 1);
}

const std::string& compiler_program() { return find_compiler().program; }

void* compile_and_open(const program& what) {
  const interruption now;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  now.check();
  const compiler& with = find_compiler();
  if (with.program.empty()) throw cannot_compile("no C++ compiler was found (ONEPASS_CXX, CXX, c++, g++, clang++)");
  std::string key = what.source + '\n' + cache::headers_digest() + '\n' + with.version + cpu_flags();
  for (const std::string& option : what.options) key += '\n' + option;
  if (const std::optional<std::string> library = cache::read(key, "so")) return open(*library);
  const std::optional<cache::key_lock> alone = cache::lock(key, [&] { now.check(); });
  if (const std::optional<std::string> library = cache::read(key, "so")) return open(*library);
  const std::string library = compile(with, what);
  cache::write(key, "so", what.label, library);
  return open(library);
}

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("onepass: what was compiled lacks ") + name);
  return found;
}

}  // namespace onepass
