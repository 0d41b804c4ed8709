// CUDA's driver API, as much of it as onepass calls, which runs nothing and says what was asked for: libcuda.so.1 for
// tests of what is launched. Devices 0 to 4 are of compute capability 8.0, 8.6, 8.9, 9.0 and 10.0.
#include <string>

namespace {

constexpr int kInvalidValue = 1, kNotFound = 500;  // CUresult
constexpr int kArch[] = {80, 86, 89, 90, 100}, kShared[] = {166912, 101376, 101376, 232448, 232448},
              kSms[] = {108, 84, 128, 132, 148};
constexpr double kBandwidth[] = {1.35e12, .67e12, .88e12, 4.28e12, 7e12};  // of copies, as src/cuda/runtime/driver.cc

struct configuration {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
};

char context_of_all;
std::string& launched() {
  static std::string names;
  return names;
}

}  // namespace

extern "C" {

// What was launched since the last question: names of kernels, a space before each.
const char* recorded_launches() {
  static std::string last;
  last = launched();
  launched().clear();
  return last.c_str();
}

int cuInit(unsigned) { return 0; }
int cuGetExportTable(const void** table, const void*) { return *table = nullptr, kNotFound; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  constexpr int kSmCount = 16, kMemoryKilohertz = 36, kMemoryWires = 37, kMajor = 75, kMinor = 76,
                kSharedPerBlockOptin = 97;
  if (which == kSmCount) *value = kSms[device];
  else if (which == kMajor) *value = kArch[device] / 10;
  else if (which == kMinor) *value = kArch[device] % 10;
  else if (which == kMemoryKilohertz) *value = static_cast<int>(kBandwidth[device] / .88 * 8 / 2e3 / 4096 + .5);
  else if (which == kMemoryWires) *value = 4096;
  else if (which == kSharedPerBlockOptin) *value = kShared[device];
  else return kInvalidValue;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &context_of_all, 0; }
int cuCtxGetCurrent(void** context) { return *context = &context_of_all, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuStreamIsCapturing(void*, int* capturing) { return *capturing = 0, 0; }

int cuModuleLoadData(void** module, const void*) { return *module = &context_of_all, 0; }
int cuModuleGetFunction(void** function, void*, const char* name) { return *function = new std::string(name), 0; }
int cuFuncGetAttribute(int* value, int, void*) { return *value = 0, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernelEx(const configuration* how, void* function, void**, void**) {
  if (how->grid_x == 0 || how->block_x == 0 || how->block_x > 1024) return kInvalidValue;
  launched() += " " + *static_cast<std::string*>(function);
  return 0;
}
int cuOccupancyMaxActiveClusters(int* count, void*, const void*) { return *count = 15, 0; }
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const void*, const void*, const void*, const void*, int, int,
                           int, int) {
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  static std::string kept;
  kept = "CUresult " + std::to_string(status);
  return *text = kept.c_str(), 0;
}
}
