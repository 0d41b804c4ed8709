// NVRTC as the emulator wants it: what it gives as a cubin is PTX. EMULATED_NVRTC: where the real one is.
#include <dlfcn.h>

#include <cstddef>

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
ONEPASS_FORWARD(nvrtcCompileProgram, (void* p, int count, const char* const* options), p, count, options)
ONEPASS_FORWARD(nvrtcDestroyProgram, (void** p), p)
ONEPASS_FORWARD(nvrtcGetProgramLogSize, (void* p, std::size_t* size), p, size)
ONEPASS_FORWARD(nvrtcGetProgramLog, (void* p, char* log), p, log)
int nvrtcGetCUBINSize(void* p, std::size_t* size) {
  return real<int (*)(void*, std::size_t*)>("nvrtcGetPTXSize")(p, size);
}
int nvrtcGetCUBIN(void* p, char* text) { return real<int (*)(void*, char*)>("nvrtcGetPTX")(p, text); }
const char* nvrtcGetErrorString(int status) { return real<const char* (*)(int)>("nvrtcGetErrorString")(status); }
}
