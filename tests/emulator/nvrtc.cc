// NVRTC as the emulator wants it: what it gives as a cubin is PTX, and it is asked for no more, so that the assembler
// does not run. EMULATED_NVRTC: where the real one is.
#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <vector>

namespace {

template <class Function>
Function real(const char* name) {
  static void* library = dlopen(EMULATED_NVRTC, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

#define ONEPASS_FORWARD(name, parameters, ...) \
  int name parameters { return real<int(*) parameters>(#name)(__VA_ARGS__); }

extern "C" {
ONEPASS_FORWARD(nvrtcVersion, (int* major, int* minor), major, minor)
ONEPASS_FORWARD(nvrtcCreateProgram,
                (void** p, const char* source, const char* name, int count, const char* const* headers,
                 const char* const* names),
                p, source, name, count, headers, names)
int nvrtcCompileProgram(void* p, int count, const char* const* options) {
  const std::string chip = "--gpu-architecture=sm_", architecture = "--gpu-architecture=compute_";
  std::vector<std::string> given(options, options + count);
  std::vector<const char*> to;
  for (std::string& option : given) {
    if (option.starts_with(chip)) option.replace(0, chip.size(), architecture);
    to.push_back(option.c_str());
  }
  return real<int (*)(void*, int, const char* const*)>("nvrtcCompileProgram")(p, count, to.data());
}
ONEPASS_FORWARD(nvrtcDestroyProgram, (void** p), p)
ONEPASS_FORWARD(nvrtcGetProgramLogSize, (void* p, std::size_t* size), p, size)
ONEPASS_FORWARD(nvrtcGetProgramLog, (void* p, char* log), p, log)
int nvrtcGetCUBINSize(void* p, std::size_t* size) {
  return real<int (*)(void*, std::size_t*)>("nvrtcGetPTXSize")(p, size);
}
int nvrtcGetCUBIN(void* p, char* text) { return real<int (*)(void*, char*)>("nvrtcGetPTX")(p, text); }
const char* nvrtcGetErrorString(int status) { return real<const char* (*)(int)>("nvrtcGetErrorString")(status); }
}
