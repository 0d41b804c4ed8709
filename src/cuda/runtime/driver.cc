// Kernels on a device, through CUDA's driver API, which is looked up at run time.
#include "src/cuda/runtime/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "src/cache/disk_cache.h"
#include "src/cuda/runtime/nvrtc.h"
#include "src/line/defined.h"

namespace onepass::cuda {
namespace {

// Of cuda.h, whose types are handles and numbers.
using status = int;
constexpr status kSuccess = 0;
constexpr int kSmCount = 16, kMemoryKilohertz = 36, kMemoryWires = 37, kMajor = 75, kMinor = 76;  // CUdevice_attribute
constexpr int kSharedPerBlockOptin = 97;
constexpr int kStaticShared = 1, kLocal = 3, kRegisters = 4, kMaxDynamicShared = 8,
              kNonPortableCluster = 14;  // CUfunction_attribute

struct driver {
  status (*init)(unsigned);
  status (*driver_version)(int*);
  status (*device_get)(int*, int);
  status (*device_get_attribute)(int*, int, int);
  status (*primary_context_retain)(void**, int);
  status (*context_get_current)(void**);
  status (*context_set_current)(void*);
  status (*context_push)(void*);
  status (*context_pop)(void**);
  status (*module_load)(void**, const void*);
  status (*module_get_function)(void**, void*, const char*);
  status (*function_get_attribute)(int*, int, void*);
  status (*function_set_attribute)(void*, int, int);
  status (*stream_is_capturing)(void*, int*);
  status (*launch_kernel_ex)(const struct launch_configuration*, void*, void**, void**);
  status (*max_active_clusters)(int*, void*, const struct launch_configuration*);
  status (*get_error_string)(status, const char**);
  // Null where the driver is older than tensor maps.
  status (*encode_tiled)(tensor_map*, int type, unsigned rank, const void*, const std::uint64_t* sizes,
                         const std::uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                         int interleave, int swizzle, int promotion, int fill);
};

struct launch_attribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    int allowed;
    unsigned size[3];
    char bytes[64];
  };
};
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;

struct launch_configuration {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  const launch_attribute* attributes;
  unsigned count;
};

driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("onepass: CUDA's driver (libcuda.so.1) cannot be opened");
  driver d{};
  auto find = [library](auto& entry, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) throw std::runtime_error(std::string("onepass: libcuda.so.1 lacks ") + name);
    entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(found);
  };
  find(d.init, "cuInit");
  find(d.driver_version, "cuDriverGetVersion");
  find(d.device_get, "cuDeviceGet");
  find(d.device_get_attribute, "cuDeviceGetAttribute");
  find(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(d.context_get_current, "cuCtxGetCurrent");
  find(d.context_push, "cuCtxPushCurrent_v2");
  find(d.context_pop, "cuCtxPopCurrent_v2");
  find(d.context_set_current, "cuCtxSetCurrent");
  find(d.module_load, "cuModuleLoadData");
  find(d.module_get_function, "cuModuleGetFunction");
  find(d.function_get_attribute, "cuFuncGetAttribute");
  find(d.function_set_attribute, "cuFuncSetAttribute");
  find(d.stream_is_capturing, "cuStreamIsCapturing");
  find(d.launch_kernel_ex, "cuLaunchKernelEx");
  find(d.max_active_clusters, "cuOccupancyMaxActiveClusters");
  find(d.get_error_string, "cuGetErrorString");
  d.encode_tiled = reinterpret_cast<decltype(d.encode_tiled)>(dlsym(library, "cuTensorMapEncodeTiled"));
  return d;
}

const driver& the_driver() {
  static const driver opened = open_driver();
  return opened;
}

void check(status s, const char* what) {
  if (s == kSuccess) return;
  const char* text = nullptr;
  the_driver().get_error_string(s, &text);
  throw std::runtime_error(std::string("onepass: ") + what +
                           " failed: " + (text ? text : "unknown CUDA error " + std::to_string(s)));
}

int attribute(int device, int which) {
  int value = 0;
  check(the_driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

struct device_state {
  int handle = 0;
  void* context = nullptr;  // the primary one, which torch uses; retained for good
  device_facts about;
};

// Chips whose newest instructions need the suffix; a cubin for them runs on no other chip.
std::string name_of_arch(int arch) {
  return "sm_" + std::to_string(arch) + (arch == 90 || (arch >= 100 && arch < 120) ? "a" : "");
}

// Where the driver allows more than the eight that all chips have (prepare asks it for each kernel).
int cluster_of_arch(int arch) { return arch < 90 ? 1 : arch < 120 ? 16 : 8; }

// Of two bits a clock and wire. Some virtual machines say nothing.
double bytes_of_copies(int kilohertz, int wires) {
  constexpr double kReached = .88, kUnknown = 2e12;  // .87 on the H200, .90 on the H100
  const double most = 2e3 * kilohertz * wires / 8;
  return most > 0 ? kReached * most : kUnknown;
}

const device_state& state_of(int device) {
  static std::mutex mutex;
  static std::map<int, device_state> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  const driver& d = the_driver();
  device_state s;
  check(d.init(0), "cuInit");
  check(d.device_get(&s.handle, device), "cuDeviceGet");
  check(d.primary_context_retain(&s.context, s.handle), "cuDevicePrimaryCtxRetain");
  const int arch = attribute(s.handle, kMajor) * 10 + attribute(s.handle, kMinor);
  s.about = {attribute(s.handle, kSmCount),
             attribute(s.handle, kSharedPerBlockOptin),
             arch,
             name_of_arch(arch),
             cluster_of_arch(arch),
             bytes_of_copies(attribute(s.handle, kMemoryKilohertz), attribute(s.handle, kMemoryWires))};
  int version = 0;
  check(d.driver_version(&version), "cuDriverGetVersion");
  if (version < 12010) s.about.parameter_bytes = 4096;
  return known.emplace(device, std::move(s)).first->second;
}

// Makes the device's context current on this thread while it lives, where another one is. A thread without any
// (autograd's own, say) keeps it, as with the CUDA runtime: to push and pop it took 10 us for each launch.
class current_context {
 public:
  explicit current_context(void* context) {
    void* now = nullptr;
    check(the_driver().context_get_current(&now), "cuCtxGetCurrent");
    if (now == context) return;
    if (now == nullptr) {
      check(the_driver().context_set_current(context), "cuCtxSetCurrent");
    } else {
      check(the_driver().context_push(context), "cuCtxPushCurrent");
      pushed_ = true;
    }
  }
  ~current_context() {
    void* popped = nullptr;
    if (pushed_) the_driver().context_pop(&popped);
  }
  current_context(const current_context&) = delete;
  current_context& operator=(const current_context&) = delete;

 private:
  bool pushed_ = false;
};

// Any NVRTC's cubin serves, if only this driver loads it: what came with the library needs none.
std::string key_of(const std::string& source, const std::string& arch_name) {
  return source + '\n' + cache::headers_digest() + '\n' + nvrtc_options(arch_name);
}

std::string build_and_write(const std::string& key, const std::string& source, const std::string& arch_name,
                            const std::string& label) {
  std::string cubin = nvrtc_compile(source, arch_name);
  cache::write(key, "cubin", label, cubin);
  return cubin;
}

// Of the processes that want it at once, one builds it.
std::string read_or_build(const std::string& key, const std::string& source, const std::string& arch_name,
                          const std::string& label) {
  const std::optional<cache::key_lock> alone = cache::lock(key, [] {});
  if (std::optional<std::string> cubin = cache::read(key, "cubin")) return *cubin;
  return build_and_write(key, source, arch_name, label);
}

std::optional<kernel> open_cubin(const std::string& cubin, const char* name, void* context) {
  const driver& d = the_driver();
  void* module = nullptr;
  kernel opened{nullptr, context};
  if (d.module_load(&module, cubin.data()) != kSuccess) return {};
  if (d.module_get_function(&opened.function, module, name) != kSuccess) return {};
  return opened;
}

kernel open_or_build(const std::string& line_source, const char* name, const device_state& on,
                     const std::string& label) {
  const current_context context(on.context);
  const std::string source = spec::with_definitions(line_source);
  const std::string key = key_of(source, on.about.arch_name);
  std::optional<kernel> opened;
  if (const std::optional<std::string> cubin = cache::read(key, "cubin")) opened = open_cubin(*cubin, name, on.context);
  else opened = open_cubin(read_or_build(key, source, on.about.arch_name, label), name, on.context);
  if (!opened) opened = open_cubin(build_and_write(key, source, on.about.arch_name, label), name, on.context);
  if (!opened)
    throw std::runtime_error("onepass: the driver refused a kernel compiled for " + on.about.arch_name + ": " + label);
  const driver& d = the_driver();
  int own = 0;
  check(d.function_get_attribute(&opened->registers, kRegisters, opened->function), "cuFuncGetAttribute");
  check(d.function_get_attribute(&opened->spilled, kLocal, opened->function), "cuFuncGetAttribute");
  check(d.function_get_attribute(&own, kStaticShared, opened->function), "cuFuncGetAttribute");
  check(d.function_set_attribute(opened->function, kMaxDynamicShared, on.about.shared_per_block - own),
        "cuFuncSetAttribute");
  if (on.about.arch >= 90)
    check(d.function_set_attribute(opened->function, kNonPortableCluster, 1), "cuFuncSetAttribute");
  return *opened;
}

}  // namespace

const device_facts& facts(int device) { return state_of(device).about; }

device_facts facts_of(const std::string& arch_name) {
  static const device_facts kKnown[] = {
      // CUDA C++ programming guide, technical specifications; A100, RTX A6000, RTX 4090, H200, B200, RTX 5090
      {108, 166912, 80, "sm_80", cluster_of_arch(80), 1.35e12},
      {84, 101376, 86, "sm_86", cluster_of_arch(86), .67e12},
      {128, 101376, 89, "sm_89", cluster_of_arch(89), .88e12},
      {132, 232448, 90, "sm_90a", cluster_of_arch(90), 4.28e12},
      {148, 232448, 100, "sm_100a", cluster_of_arch(100), 7e12},
      {188, 101376, 120, "sm_120", cluster_of_arch(120), 1.56e12}};
  const auto* found = std::find_if(std::begin(kKnown), std::end(kKnown),
                                   [&](const device_facts& f) { return f.arch_name == arch_name; });
  if (found != std::end(kKnown)) return *found;
  std::string names;
  for (const device_facts& f : kKnown) names += (names.empty() ? "" : ", ") + f.arch_name;
  throw std::invalid_argument("onepass: unknown arch '" + arch_name + "', expected one of " + names);
}

device_facts facts_named(const std::string& chip) {
  constexpr std::string_view kDevice = "cuda:";
  if (!chip.starts_with(kDevice)) return facts_of(chip);
  int number = -1;
  const char* const end = chip.data() + chip.size();
  const auto [stop, error] = std::from_chars(chip.data() + kDevice.size(), end, number);
  if (error != std::errc{} || stop != end || number < 0)
    throw std::invalid_argument("onepass: expected a device such as 'cuda:0', got '" + chip + "'");
  return facts(number);
}

const kernel& load(const std::string& source, const char* name, int device, void* stream, const std::string& label) {
  static std::mutex mutex;  // one build at a time: two threads that want the same kernel build it once
  static std::unordered_map<std::string, std::unique_ptr<kernel>> known;
  const device_state& on = state_of(device);
  const std::string key = std::to_string(device) + source;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return *found->second;
  int capturing = 0;
  if (stream != nullptr && the_driver().stream_is_capturing(stream, &capturing) == kSuccess && capturing != 0) {
    throw std::runtime_error(
        "onepass: this line has not run on this device before CUDA-graph capture; run it once before capturing");
  }
  const kernel opened = open_or_build(source, name, on, label);
  return *known.emplace(key, std::make_unique<kernel>(opened)).first->second;
}

bool build(const std::string& line_source, const std::string& arch_name, const std::string& label) {
  const std::string source = spec::with_definitions(line_source);
  const std::string key = key_of(source, arch_name);
  if (cache::read(key, "cubin")) return false;
  read_or_build(key, source, arch_name, label);
  return true;
}

void launch(const kernel& with, extent grid, extent block, unsigned shared_bytes, bool behind, void* stream,
            const void* parameters) {
  const current_context context(with.context);
  void* all[] = {const_cast<void*>(parameters)};
  launch_attribute early{.id = kProgrammaticStreamSerialization, .padding = {}, .bytes = {}};
  early.allowed = 1;
  const launch_configuration how{grid.x, grid.y, 1, block.x, block.y, 1, shared_bytes, stream, &early, behind};
  check(the_driver().launch_kernel_ex(&how, with.function, all, nullptr), "a kernel launch");
}

namespace {

tensor_map encode(const kernel& with, const void* data, bool is_bf16, unsigned rank, const std::uint64_t* sizes,
                  const std::uint64_t* strides, const unsigned* tile) {
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3, kPromoteTo256 = 3;  // CUtensorMap...
  constexpr unsigned kOnes[] = {1, 1, 1, 1, 1};
  if (the_driver().encode_tiled == nullptr) throw std::runtime_error("onepass: libcuda.so.1 has no tensor maps");
  const current_context context(with.context);  // the driver asks for one
  tensor_map map;
  check(the_driver().encode_tiled(&map, is_bf16 ? kBfloat16 : kFloat16, rank, data, sizes, strides, tile, kOnes, 0,
                                  kSwizzle128, kPromoteTo256, 0),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

tensor_map describe_matrix(const kernel& with, const matrix_facts& of) {
  const std::uint64_t sizes[] = {static_cast<std::uint64_t>(of.columns), static_cast<std::uint64_t>(of.rows)};
  const std::uint64_t strides[] = {static_cast<std::uint64_t>(of.stride) * 2};
  const unsigned tile[] = {of.tile_columns, of.tile_rows};
  return encode(with, of.data, of.is_bf16, 2, sizes, strides, tile);
}

tensor_map describe_tensor(const kernel& with, const tensor_facts& of) {
  std::uint64_t sizes[5], strides[4];
  for (int i = 0; i < 5; ++i) sizes[i] = static_cast<std::uint64_t>(of.sizes[i]);
  for (int i = 0; i < 4; ++i) strides[i] = static_cast<std::uint64_t>(of.strides[i]) * 2;
  return encode(with, of.data, of.is_bf16, 5, sizes, strides, of.tile);
}

int active_clusters(const kernel& with, int blocks, unsigned threads, unsigned shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<const kernel*, int, unsigned, unsigned>, int> known;
  const std::scoped_lock lock(mutex);
  const std::tuple key(&with, blocks, threads, shared_bytes);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const current_context context(with.context);
  launch_attribute cluster{.id = kClusterDimension, .padding = {}, .bytes = {}};
  cluster.size[0] = static_cast<unsigned>(blocks), cluster.size[1] = 1, cluster.size[2] = 1;
  const launch_configuration how{
      static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, shared_bytes, nullptr, &cluster, 1};
  int count = 0;
  check(the_driver().max_active_clusters(&count, with.function, &how), "cuOccupancyMaxActiveClusters");
  return known[key] = count;
}

}  // namespace onepass::cuda
