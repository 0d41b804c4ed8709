// Runs a call's arguments on its device.
#include "src/torch/call/run.h"

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <unistd.h>

#include <algorithm>

#include "src/cpu/row/run.h"
#include "src/cuda/row/launch.h"
#include "src/torch/check.h"
#include "src/torch/column_parts.h"

namespace onepass::binding {
namespace {

// Memory for rows taken in parts: four partial statistics of each part, and the combined ones of each row, to which
// `of_rows` points if it is not null.
class row_workspace {
 public:
  row_workspace(frame& f, const cuda::request& request, const std::vector<cuda::plan>& plans, void** of_rows) {
    if (plans.size() == 1) return;
    f.a.task_columns = plans.front().row_columns;
    const std::int64_t parts = (f.a.columns + f.a.task_columns - 1) / f.a.task_columns;
    const std::int64_t combined = cuda::row_numbers(request), size[1] = {f.a.rows * (combined + kPartNumbers * parts)};
    memory_ = empty(size, 1, f.arithmetic(), f.on);
    auto* start = static_cast<char*>(memory_->data_ptr());
    if (of_rows) *of_rows = start;
    f.a.row_parts = start + combined * f.a.rows * size_of(f.arithmetic());
  }

 private:
  std::optional<Tensor> memory_;
};

void forward_on_cuda(frame& f, const cuda::request& request) {
  const torch::stable::accelerator::DeviceGuard guard(f.on.index);
  void* stream = current_stream(f.on.index);
  launch(f, request, cuda::prepare(request, f.a, f.on.index, stream), stream);
}

}  // namespace

void launch(frame& f, const cuda::request& request, const std::vector<cuda::plan>& plans, void* stream) {
  void** of_rows = request.backward ? &f.a.totals : f.a.statistics == nullptr ? &f.a.statistics : nullptr;
  const row_workspace rows(f, request, plans, of_rows);
  cuda::launch(request, plans, f.a, f.on.index, stream);
}

void* current_stream(int device_index) {
  using lookup = AOTITorchError (*)(std::int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    ONEPASS_CHECK(library != nullptr, "onepass: this torch has no CUDA (libtorch_cuda.so is not loaded)");
    auto* found = reinterpret_cast<lookup>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    ONEPASS_CHECK(found != nullptr, "onepass: aoti_torch_get_current_cuda_stream is missing from libtorch_cuda.so");
    return found;
  }();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device_index, &stream));
  return stream;
}

cuda::request request_of(const frame& f, bool backward) {
  return cuda::request_of(f, backward, f.line.type_text(f.boolean_masks, backward));
}

cuda::request request_of(const frame& f, const spec::gradients& plan) {
  return cuda::request_of(f, plan, f.line.type_text(f.boolean_masks, true));
}

cpu::row_call row_call_of(const frame& f) { return {f.line.cpu(f.boolean_masks, f.type), f.a, f.type}; }

int stream_stores(const frame& f, std::int64_t tensors) {
  static const std::int64_t last_level = std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 8 << 20);
  return f.a.rows * f.a.columns * size_of(f.type) * tensors > last_level;
}

void run_forward(frame& f) {
  if (f.on.is_cuda()) {
    forward_on_cuda(f, request_of(f, false));
    return;
  }
  const cpu_kernels& kernels = f.line.cpu(f.boolean_masks, f.type);
  cpu::require_targets(f.line.line, f.a);
  f.a.stream_stores = stream_stores(f, 1 + f.line.line.keeps);
  cpu::partition(f.a, f.line.line.takes_whole_rows());
  cpu::run(cpu::choose(kernels, f.a, f.type, false), f.a);
}

void run_statistics(frame& f) {
  cuda::request request = request_of(f, false);
  request.only_statistics = true;
  forward_on_cuda(f, request);
}

namespace {

// Operands whose column gradients leave no parts: the kernel has whole sums.
std::uint64_t stored_by_kernel(const spec::gradients& plan, bool one_part, std::int64_t group_blocks) {
  const std::uint64_t ungrouped = plan.wants_column & ~plan.grouped;
  return (one_part ? ungrouped : 0) | (group_blocks == 1 ? plan.grouped : 0);
}

}  // namespace

void run_backward(frame& f, const spec::gradients& plan, const std::vector<view>& columns) {
  if (f.on.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(f.on.index);
    cuda::request request = request_of(f, plan);
    request.in_place = f.a.dx.data == f.a.y.data;
    void* stream = current_stream(f.on.index);
    const std::vector<cuda::plan> plans = cuda::prepare(request, f.a, f.on.index, stream);
    const cuda::plan& last = plans.back();
    f.a.parts = last.parts, f.a.groups.blocks = last.group_blocks;
    const std::uint64_t stored = stored_by_kernel(plan, last.with.one_part != 0, last.group_blocks);
    write_sums(f, plan.wants_column, columns, stored);
    const std::vector<view> whole = some_of(plan.wants_column, columns, ~(plan.grouped | stored)),
                            grouped = some_of(plan.wants_column, columns, plan.grouped & ~stored);
    const bool adds = (plan.wants_column & ~stored) != 0;
    const column_parts parts({&f}, adds ? one_for_all(whole) : column_outputs(), f.arithmetic());
    launch(f, request, plans, stream);
    if (!adds) return;
    cuda::reduce_columns(parts.sums(), f.arithmetic(), f.on.index, stream);
    const int slots = static_cast<int>(columns.size());
    cuda::reduce_columns(cuda::sums_of(f.a, f.arithmetic(), last.group_blocks, slots, grouped.data()), f.arithmetic(),
                         f.on.index, stream, f.a.groups.count);
    return;
  }
  const cpu_kernels& kernels = f.line.cpu(f.boolean_masks, f.type);
  f.a.stream_stores = stream_stores(f, 1);
  cpu::partition(f.a, f.line.line.takes_whole_rows());
  const std::uint64_t stored = stored_by_kernel(plan, false, f.a.groups.blocks);
  write_sums(f, plan.wants_column, columns, stored);
  const std::vector<view> whole = some_of(plan.wants_column, columns, ~plan.grouped),
                          grouped = some_of(plan.wants_column, columns, plan.grouped & ~stored);
  const column_parts parts({&f}, one_for_all(whole), dtype::f64);
  cpu::run_backward(kernels, f.a, f.type);
  parts.add_on_cpu();
  for (std::size_t slot = 0; slot < grouped.size(); ++slot)
    if (grouped[slot].data) cpu::reduce_groups(f.a, static_cast<int>(slot), grouped[slot]);
}

}  // namespace onepass::binding
