// What the binding asks of a tensor, in the core's terms.
#include "src/torch/tensor.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "src/cpu/page_pool.h"

namespace onepass::binding {
namespace {

struct dtype_codes {
#define ONEPASS_CODE(name, torch_name, scalar_type, storage) std::int32_t name = aoti_torch_dtype_##torch_name();
  ONEPASS_DTYPES(ONEPASS_CODE)
#undef ONEPASS_CODE
};
const dtype_codes& codes() {
  static const dtype_codes all;
  return all;
}

std::int32_t code_of(dtype type) {
#define ONEPASS_CODE(name, torch_name, scalar_type, storage) \
  if (type == dtype::name) return codes().name;
  ONEPASS_DTYPES(ONEPASS_CODE)
#undef ONEPASS_CODE
  return codes().f32;
}

// torch_from_blob, of torch 2.11 and later.
using from_blob = AOTITorchError (*)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t,
                                     std::int32_t, std::int32_t, std::int32_t, AtenTensorHandle*, std::int32_t,
                                     const std::uint8_t*, std::int64_t, void (*)(void*, void*), void*);
from_blob find_from_blob() {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  return library ? reinterpret_cast<from_blob>(dlsym(library, "torch_from_blob")) : nullptr;
}

std::atomic<void (*)(void*)> let_storage_resize = nullptr;

// A tensor in pages of our own; none where there are no pages, or torch cannot be told to give them back, or to resize.
std::optional<Tensor> in_own_pages(const std::int64_t* sizes, const std::int64_t* strides, int dim, dtype type,
                                   const device& on, std::int64_t bytes) {
  static const from_blob create = find_from_blob();
  const auto let_resize = let_storage_resize.load(std::memory_order_acquire);
  void* pages = create && let_resize ? cpu::take_pages(static_cast<std::size_t>(bytes)) : nullptr;
  if (pages == nullptr) return {};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(create(
      pages, dim, sizes, strides, 0, code_of(type), on.type, on.index, &handle, aoti_torch_layout_strided(), nullptr, 0,
      [](void* data, void*) { cpu::give_pages(data); }, nullptr));
  let_resize(handle);
  return Tensor(handle);
}

// Writing a fresh tensor costs a page fault for every 4 KB; with 2 MB pages it is a quarter of that time or less.
void advise_huge_pages(void* data, std::int64_t bytes) {
  const auto first = (reinterpret_cast<std::uintptr_t>(data) + cpu::kHugePage - 1) & ~(cpu::kHugePage - 1);
  const auto last =
      (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) & ~(cpu::kHugePage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

dtype dtype_of(const Tensor& t) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  const dtype_codes& all = codes();
#define ONEPASS_DTYPE(name, torch_name, scalar_type, storage) \
  if (code == all.name) return dtype::name;
  ONEPASS_DTYPES(ONEPASS_DTYPE)
#undef ONEPASS_DTYPE
  return dtype::none;
}

// By the numbers of torch's ScalarType, which stay as they are.
std::string dtype_text(const Tensor& t) {
  static constexpr const char* kNames[] = {"uint8",
                                           "int8",
                                           "int16",
                                           "int32",
                                           "int64",
                                           "float16",
                                           "float32",
                                           "float64",
                                           "complex32",
                                           "complex64",
                                           "complex128",
                                           "bool",
                                           "qint8",
                                           "quint8",
                                           "qint32",
                                           "bfloat16",
                                           "quint4x2",
                                           "quint2x4",
                                           "bits1x8",
                                           "bits2x4",
                                           "bits4x2",
                                           "bits8",
                                           "bits16",
                                           "float8_e5m2",
                                           "float8_e4m3fn",
                                           "float8_e5m2fnuz",
                                           "float8_e4m3fnuz",
                                           "uint16",
                                           "uint32",
                                           "uint64",
                                           "uint1",
                                           "uint2",
                                           "uint3",
                                           "uint4",
                                           "uint5",
                                           "uint6",
                                           "uint7",
                                           "int1",
                                           "int2",
                                           "int3",
                                           "int4",
                                           "int5",
                                           "int6",
                                           "int7",
                                           "float8_e8m0fnu",
                                           "float4_e2m1fn_x2",
                                           "bcomplex32"};
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  if (code >= 0 && static_cast<std::size_t>(code) < std::size(kNames))
    return std::string("torch.") + kNames[static_cast<std::size_t>(code)];
  return "dtype number " + std::to_string(code);
}

std::string shape_text(const Tensor& t) { return shape_text(t.sizes().data(), static_cast<int>(t.dim())); }

spec::strided strided_of(const Tensor& t, view* out) {
  return {t.data_ptr(), dtype_of(t), static_cast<int>(t.dim()), t.sizes().data(), t.strides().data(), out};
}

spec::shape shape_of(const Tensor& t) { return {static_cast<int>(t.dim()), t.sizes().data()}; }

bool device::is_cuda() const {
  static const std::int32_t cuda = aoti_torch_device_type_cuda();
  return type == cuda;
}

std::string device::text() const { return is_cuda() ? "cuda:" + std::to_string(index) : "cpu"; }

device device_of(const Tensor& t) {
  device d;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &d.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &d.index));
  return d;
}

void let_storages_resize(void (*let)(void* tensor)) { let_storage_resize.store(let, std::memory_order_release); }

Tensor empty(const std::int64_t* sizes, int dim, dtype type, const device& on) {
  constexpr int kInline = 16;
  std::int64_t inline_strides[kInline];
  std::vector<std::int64_t> more(dim > kInline ? static_cast<std::size_t>(dim) : 0);
  std::int64_t* strides = dim > kInline ? more.data() : inline_strides;
  std::int64_t stride = 1;
  for (int d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return empty_strided(sizes, strides, dim, type, on);
}

Tensor empty_strided(const std::int64_t* sizes, const std::int64_t* strides, int dim, dtype type, const device& on) {
  std::int64_t numel = 1;
  for (int d = 0; d < dim; ++d) numel *= sizes[d];
  const std::int64_t bytes = numel * size_of(type);
  const bool large = !on.is_cuda() && bytes >= (3 << 20);
  if (large) {
    if (std::optional<Tensor> own = in_own_pages(sizes, strides, dim, type, on, bytes)) return *own;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, code_of(type), on.type, on.index, &handle));
  Tensor result(handle);
  if (large) advise_huge_pages(result.data_ptr(), bytes);
  return result;
}

Tensor empty_like(const spec::shape& shape, dtype type, const device& on) {
  return empty(shape.sizes, shape.dim, type, on);
}

Tensor matrix_at(void* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                 std::int64_t column_stride, dtype type, const device& on) {
  const std::int64_t sizes[2] = {rows, columns}, strides[2] = {row_stride, column_stride};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, code_of(type), on.type, on.index, &handle));
  return Tensor(handle);
}

Tensor view_of(const Tensor& t, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
               std::int64_t offset) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), offset, &handle));
  return Tensor(handle);
}

Tensor in_dtype(const Tensor& t, dtype type) {
  using torch::headeronly::ScalarType;
  if (dtype_of(t) == type) return t;
#define ONEPASS_CAST(name, torch_name, scalar_type, storage) \
  if (type == dtype::name) return torch::stable::to(t, ScalarType::scalar_type);
  ONEPASS_DTYPES(ONEPASS_CAST)
#undef ONEPASS_CAST
  return t;
}

Tensor expanded(const Tensor& t, const spec::shape& shape) {
  StableIValue stack[3] = {torch::stable::detail::from(t),
                           torch::stable::detail::from(torch::headeronly::IntHeaderOnlyArrayRef(
                               shape.sizes, static_cast<std::size_t>(shape.dim))),
                           torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::expand", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor expanded_copy(const Tensor& t, const spec::shape& shape) {
  return torch::stable::contiguous(expanded(t, shape));
}

}  // namespace onepass::binding
