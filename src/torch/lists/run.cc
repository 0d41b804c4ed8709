// Runs several tensors' calls of a line on their device.
#include <torch/csrc/stable/accelerator.h>

#include "src/cpu/row/run.h"
#include "src/cuda/row/group.h"
#include "src/cuda/row/launch.h"
#include "src/torch/column_parts.h"
#include "src/torch/lists/group.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

std::vector<frame*> with_numbers(frames& all) {
  std::vector<frame*> some;
  for (frame& f : all)
    if (!f.empty()) some.push_back(&f);
  return some;
}

// On CUDA. prepare() comes between the choice of kernels and their launch.
template <class Prepare>
void run_batches(const std::vector<frame*>& all, const cuda::request& request, void* stream, const Prepare& prepare) {
  std::vector<cuda::member> members;
  members.reserve(all.size());
  for (frame* f : all) members.push_back({&f->a, f->is_flat()});
  const int device = all.front()->on.index;
  const std::vector<cuda::batch> batches = cuda::batches(request, members, device, stream);
  prepare();
  for (const cuda::batch& b : batches) {
    if (b.members.size() > 1) cuda::launch(request, b, members, device, stream);
    else launch(*all[static_cast<std::size_t>(b.members.front())], request, b.plans, stream);
  }
}

}  // namespace

void run_forward(frames& all) {
  const std::vector<frame*> some = with_numbers(all);
  if (some.empty()) return;
  const frame& first = *some.front();
  if (!first.on.is_cuda()) {
    for (frame* f : some) run_forward(*f);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(first.on.index);
  run_batches(some, request_of(first, false), current_stream(first.on.index), [] {});
}

void run_backward(frames& all, const spec::gradients& plan, const column_views& columns) {
  const std::vector<frame*> some = with_numbers(all);
  std::vector<frame*> every;
  for (frame& f : all) every.push_back(&f);
  const column_outputs outputs(columns.begin(), columns.end());
  const frame& first = some.empty() ? all.front() : *some.front();
  if (!first.on.is_cuda()) {
    for (frame* f : some) cpu::partition(f->a, f->line.line.takes_whole_rows());
    const column_parts parts(every, outputs, dtype::f64);
    for (frame* f : some) {
      f->a.stream_stores = stream_stores(*f, 1);
      cpu::run_backward(f->line.cpu(f->boolean_masks, f->type), f->a, f->type);
    }
    parts.add_on_cpu();
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(first.on.index);
  void* stream = current_stream(first.on.index);
  std::optional<column_parts> parts;
  const auto prepare = [&] {
    for (frame* f : some) f->a.parts = f->a.blocks;
    parts.emplace(every, outputs, first.arithmetic());
  };
  if (some.empty()) prepare();
  else run_batches(some, request_of(first, plan), stream, prepare);
  cuda::reduce_columns(parts->sums(), first.arithmetic(), first.on.index, stream);
}

}  // namespace onepass::binding
