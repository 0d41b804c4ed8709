// CUDA's driver API, as much of it as onepass calls, over a chip that is not there: libcuda.so.1 for tests.
//
// Devices 0, 1 and 2 are of compute capability 9.0, 8.0 and 12.0. Of the environment:
//   EMULATED_SMS    how many each has, 4 if not set: grids that stride over the chip are small
//   EMULATED_SEED   what is drawn at random begins with
#include <cstdlib>
#include <iostream>

#include "tests/emulator/machine.h"
#include "tests/emulator/tensor_map.h"

using onepass::emulator::program;

namespace {

constexpr int kInvalidValue = 1, kInvalidImage = 200, kNotFound = 500, kLaunchFailed = 719;  // CUresult

int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}
int sms() { return setting("EMULATED_SMS", 4); }
constexpr int kArch[] = {90, 80, 120}, kShared[] = {232448, 166912, 101376};

std::string& last_failure() {
  static std::string text;
  return text;
}
thread_local void* current = nullptr;
char context_of_all;

struct attribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    unsigned size[3];
    char bytes[64];
  };
};
struct configuration {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  const attribute* attributes;
  unsigned count;
};

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetExportTable(const void** table, const void*) { return *table = nullptr, kNotFound; }  // NVRTC asks
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  constexpr int kSmCount = 16, kMemoryKilohertz = 36, kMemoryWires = 37, kMajor = 75, kMinor = 76,
                kSharedPerBlockOptin = 97;
  if (which == kSmCount) *value = sms();
  else if (which == kMajor) *value = kArch[device] / 10;
  else if (which == kMinor) *value = kArch[device] % 10;
  else if (which == kMemoryKilohertz || which == kMemoryWires) *value = 0;
  else if (which == kSharedPerBlockOptin) *value = kShared[device];
  else return kInvalidValue;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &context_of_all, 0; }
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) { return current = context, 0; }
int cuCtxPushCurrent_v2(void* context) { return current = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, 0; }
int cuStreamIsCapturing(void*, int* capturing) { return *capturing = 0, 0; }

int cuMemAlloc_v2(unsigned long long* at, std::size_t bytes) {
  *at = reinterpret_cast<unsigned long long>(onepass::emulator::allocate(bytes));
  return 0;
}
int cuMemFree_v2(unsigned long long at) {
  onepass::emulator::release(reinterpret_cast<void*>(at));
  return 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuCtxSynchronize() { return 0; }

// Of PTX, which NVRTC's stand-in gives for a cubin.
int cuModuleLoadData(void** module, const void* image) {
  try {
    *module = new program(onepass::emulator::read_program(static_cast<const char*>(image)));
  } catch (const std::exception& e) {
    last_failure() = e.what();
    std::cerr << e.what() << '\n';
    return kInvalidImage;
  }
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return static_cast<program*>(module)->name == name ? 0 : kNotFound;
}
int cuFuncGetAttribute(int* value, int which, void* function) {
  constexpr int kStaticShared = 1;
  return *value = which == kStaticShared ? static_cast<int>(static_cast<program*>(function)->static_shared) : 0, 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }

int cuLaunchKernelEx(const configuration* how, void* function, void** parameters, void**) {
  const onepass::emulator::extents size{static_cast<int>(how->grid_x), static_cast<int>(how->grid_y),
                                        static_cast<int>(how->block_x), static_cast<int>(how->block_y),
                                        how->shared_bytes};
  static int launches = 0;
  try {
    onepass::emulator::run(*static_cast<program*>(function), size, parameters[0],
                           static_cast<std::uint64_t>(setting("EMULATED_SEED", 0) + launches++), sms());
  } catch (const std::exception& e) {
    last_failure() = e.what();
    return kLaunchFailed;
  }
  return 0;
}
int cuOccupancyMaxActiveClusters(int* count, void*, const configuration* how) {
  const unsigned blocks = how->count > 0 ? how->attributes[0].size[0] : 1;
  return *count = static_cast<int>(std::max(1u, static_cast<unsigned>(sms()) / blocks)), 0;
}

int cuTensorMapEncodeTiled(void* to, int, unsigned rank, void* data, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const unsigned* box, const unsigned*, int, int, int, int) {
  onepass::emulator::tensor_map map{};
  map.data = reinterpret_cast<std::uint64_t>(data);
  map.rank = static_cast<std::uint16_t>(rank);
  if (map.data % 16 != 0 || box[0] * 2 > 128) return kInvalidValue;
  for (unsigned k = 0; k < rank; ++k) {
    map.sizes[k] = static_cast<std::int64_t>(sizes[k]), map.box[k] = static_cast<std::uint16_t>(box[k]);
    if (sizes[k] == 0 || box[k] == 0 || box[k] > 256) return kInvalidValue;
    if (k + 1 < rank) map.strides[k] = static_cast<std::int64_t>(strides[k]);
    if (k + 1 < rank && (strides[k] % 16 != 0)) return kInvalidValue;
  }
  std::memcpy(to, &map, sizeof map);
  return 0;
}

int cuGetErrorString(int status, const char** text) {
  static thread_local std::string kept;
  kept = status == kLaunchFailed || status == kInvalidImage ? last_failure() : "CUresult " + std::to_string(status);
  return *text = kept.c_str(), 0;
}

}  // extern "C"
