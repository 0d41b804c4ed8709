// Compiles C++ for this machine with the system's compiler at first use, and opens the result.
#include "src/compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <vector>

#include "src/cache/disk_cache.h"
#include "src/settings.h"

extern char** environ;

namespace onepass {
namespace fs = std::filesystem;
namespace {

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A folder of its own for one compilation, removed at the end.
class temporary_folder {
 public:
  temporary_folder() {
    std::string pattern = (fs::temp_directory_path() / "onepass-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("onepass: no temporary folder could be made");
    path = pattern;
  }
  ~temporary_folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

// Runs a program without a shell; its output goes to the file. Returns its exit status, -1 where it cannot start.
int run(const std::vector<std::string>& command, const fs::path& output) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed) return -1;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

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
    const temporary_folder folder;
    for (const std::string& program : candidates) {
      if (run({program, "--version"}, folder.path / "version") == 0)
        return compiler{program, contents(folder.path / "version")};
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

std::string compile(const compiler& with, const program& what) {
  const temporary_folder folder;
  const fs::path input = folder.path / "onepass.cc", output = folder.path / "onepass.so", log = folder.path / "log";
  std::ofstream(input) << what.source;
  std::vector<std::string> command{
      with.program,   "-std=c++20", "-fPIC",        "-shared", "-fvisibility=hidden", "-I", settings_now().include_dir,
      input.string(), "-o",         output.string()};
  command.insert(command.end(), what.options.begin(), what.options.end());
  if (const int status = run(command, log); status != 0) {
    throw std::runtime_error("onepass: " + with.program + " failed (" + std::to_string(status) + "):\n" +
                             contents(log).substr(0, 4000));
  }
  return contents(output);
}

// dlopen wants a file of nothing but the library; the file may go once it is mapped.
void* open(const std::string& library) {
  const temporary_folder folder;
  const fs::path file = folder.path / "onepass.so";
  std::ofstream(file, std::ios::binary) << library;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw std::runtime_error(std::string("onepass: what was compiled cannot be opened: ") + dlerror());
  return handle;
}

}  // namespace

const std::string& compiler_program() { return find_compiler().program; }

void* compile_and_open(const program& what) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const compiler& with = find_compiler();
  if (with.program.empty()) {
    throw compiler_missing("no C++ compiler was found (ONEPASS_CXX, CXX, c++, g++, clang++)");
  }
  std::string key = what.source + '\n' + cache::headers_digest() + '\n' + with.version + cpu_flags();
  for (const std::string& option : what.options) key += '\n' + option;
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
