// NVRTC that compiles nothing, for the driver that runs nothing.
#include <cstddef>

extern "C" {
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcCreateProgram(void** p, const char*, const char*, int, const char* const*, const char* const*) {
  static char program;
  return *p = &program, 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcGetProgramLogSize(void*, std::size_t* size) { return *size = 0, 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
int nvrtcGetCUBINSize(void*, std::size_t* size) { return *size = 1, 0; }
int nvrtcGetCUBIN(void*, char* text) { return *text = 'x', 0; }
const char* nvrtcGetErrorString(int) { return ""; }
}
