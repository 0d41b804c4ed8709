// CUDA C++ to a cubin with NVRTC, which is looked up at run time and needs no device.
#include "src/cuda/runtime/nvrtc.h"

#include <dlfcn.h>

#include <stdexcept>
#include <type_traits>
#include <vector>

#include "src/settings.h"

namespace onepass::cuda {
namespace {

using status = int;  // of nvrtc.h
constexpr status kSuccess = 0;

struct nvrtc {
  status (*version)(int*, int*);
  status (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
  status (*compile)(void*, int, const char* const*);
  status (*destroy)(void**);
  status (*cubin_size)(void*, std::size_t*);
  status (*cubin)(void*, char*);
  status (*log_size)(void*, std::size_t*);
  status (*log)(void*, char*);
  const char* (*error_string)(status);
};

void* open_library() {
  const char* found = settings_now().find_nvrtc ? settings_now().find_nvrtc() : "";
  for (const char* name : {found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (name == nullptr || *name == '\0') continue;
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw std::runtime_error("onepass: NVRTC (libnvrtc.so) was not found; `pip install nvidia-cuda-nvrtc` brings it");
}

const nvrtc& the_nvrtc() {
  static const nvrtc opened = [] {
    void* library = open_library();
    nvrtc n{};
    auto find = [library](auto& entry, const char* name) {
      void* found = dlsym(library, name);
      if (found == nullptr) throw std::runtime_error(std::string("onepass: libnvrtc.so lacks ") + name);
      entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(found);
    };
    find(n.version, "nvrtcVersion");
    find(n.create, "nvrtcCreateProgram");
    find(n.compile, "nvrtcCompileProgram");
    find(n.destroy, "nvrtcDestroyProgram");
    find(n.cubin_size, "nvrtcGetCUBINSize");
    find(n.cubin, "nvrtcGetCUBIN");
    find(n.log_size, "nvrtcGetProgramLogSize");
    find(n.log, "nvrtcGetProgramLog");
    find(n.error_string, "nvrtcGetErrorString");
    return n;
  }();
  return opened;
}

void check(status s, const char* what) {
  if (s != kSuccess)
    throw std::runtime_error(std::string("onepass: ") + what + " failed: " + the_nvrtc().error_string(s));
}

// A fused multiply-add stands only where it is written: what the compiler would fuse differs from kernel to kernel, and
// a result would depend on whether statistics are saved beside it.
std::vector<std::string> options_for(const std::string& arch_name) {
  return {"--std=c++20", "--gpu-architecture=" + arch_name, "--device-as-default-execution-space", "--fmad=false",
          "--generate-line-info"};
}

class program {
 public:
  explicit program(const std::string& source) {
    check(the_nvrtc().create(&handle_, source.c_str(), "onepass_line.cu", 0, nullptr, nullptr), "nvrtcCreateProgram");
  }
  ~program() { the_nvrtc().destroy(&handle_); }
  program(const program&) = delete;
  program& operator=(const program&) = delete;

  std::string log() const {
    std::size_t size = 0;
    if (the_nvrtc().log_size(handle_, &size) != kSuccess) return "";
    std::string text(size, '\0');
    the_nvrtc().log(handle_, text.data());
    return text.substr(0, text.find('\0'));
  }
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

}  // namespace

std::string nvrtc_version() {
  int major = 0, minor = 0;
  check(the_nvrtc().version(&major, &minor), "nvrtcVersion");
  return "nvrtc " + std::to_string(major) + "." + std::to_string(minor);
}

std::string nvrtc_options(const std::string& arch_name) {
  std::string all;
  for (const std::string& option : options_for(arch_name)) all += option + ' ';
  return all;
}

std::string nvrtc_compile(const std::string& source, const std::string& arch_name, std::string* log) {
  const nvrtc& n = the_nvrtc();
  const program p(source);
  std::vector<std::string> options = options_for(arch_name);
  options.push_back("--include-path=" + settings_now().include_dir);
  std::vector<const char*> pointers;
  pointers.reserve(options.size());
  for (const std::string& option : options) pointers.push_back(option.c_str());
  if (n.compile(p.handle(), static_cast<int>(pointers.size()), pointers.data()) != kSuccess) {
    throw std::runtime_error("onepass: NVRTC failed for " + arch_name + ":\n" + p.log().substr(0, 4000));
  }
  if (log) *log = p.log();
  std::size_t size = 0;
  check(n.cubin_size(p.handle(), &size), "nvrtcGetCUBINSize");
  std::string cubin(size, '\0');
  check(n.cubin(p.handle(), cubin.data()), "nvrtcGetCUBIN");
  return cubin;
}

}  // namespace onepass::cuda
