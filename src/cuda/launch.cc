// Finds or builds a call's kernel, and launches it.
#include "src/cuda/launch.h"

#include <algorithm>
#include <bit>

#include "onepass/skeleton/arguments.h"
#include "src/cuda/known_kernels.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/source.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {
namespace {

// As in onepass/skeleton/column_sum.cuda.h, which only NVRTC reads.
struct column_sum_arguments {
  int64 parts;
  column_sum of[2 * kMaxOperands];
};

const kernel& find_or_build(const request& r, const plan& p, int device, void* stream) {
  static known_kernels known;
  const kernel_key key(device, r.line, p.with, r.x, r.operand, r.backward, r.wants_column, r.wants_tensor, r.wants_dx,
                       r.wants_again);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(r, p.with), kKernelName, device, stream, label(r, p.with, facts(device).arch_name));
  });
}

}  // namespace

std::vector<plan> prepare(const request& r, const arguments& a, int device, void* stream) {
  device_facts chip = facts(device);
  std::vector<plan> plans = choose(r, a, chip);
  // Where the blocks of a cluster stride over rows, one that finds no room at once would come behind all others. A chip
  // may have no room for a cluster of more than eight blocks at all.
  const auto strides = [](const configuration& c) { return c.cluster > 1 && (c.stages > 0 || c.computes_again != 0); };
  while (strides(plans.front().with)) {
    plan& p = plans.front();
    const auto threads = static_cast<unsigned>(p.with.across * p.with.down);
    const int most = active_clusters(find_or_build(r, p, device, stream), p.with.cluster, threads, p.shared_bytes);
    if (most > 0 || p.with.cluster <= 8) {
      const auto clusters = std::min<int64>(p.grid_x / static_cast<unsigned>(p.with.cluster), std::max(most, 1));
      p.grid_x = static_cast<unsigned>(clusters * p.with.cluster);
      if (p.parts > 0) p.parts = clusters;
      break;
    }
    chip.cluster = p.with.cluster / 2;
    plans = choose(r, a, chip);
  }
  return plans;
}

void launch(const request& r, const std::vector<plan>& plans, const arguments& a, int device, void* stream) {
  thread_local std::string packed;
  packed.clear();
  append_packed(packed, r, a);
  for (const plan& p : plans) {
    const kernel& with = find_or_build(r, p, device, stream);
    const bool behind = &p != &plans.front() && facts(device).arch >= 90;
    launch(with, {p.grid_x, p.grid_y}, {static_cast<unsigned>(p.with.across * p.with.down), 1}, p.shared_bytes, behind,
           stream, packed.data());
  }
}

std::vector<column_sum> sums_of(const arguments& a, dtype type, int64 parts, int slots, const view* outputs) {
  std::vector<column_sum> sums;
  for (int slot = 0; slot < slots; ++slot) {
    const char* partial = static_cast<const char*>(a.column_partial) + slot * parts * a.columns * size_of(type);
    sums.push_back({partial, a.columns, outputs[slot].data, outputs[slot].type});
  }
  return sums;
}

void reduce_columns(const std::vector<column_sum>& sums, dtype type, int64 parts, int device, void* stream) {
  if (sums.empty()) return;
  column_sum_arguments with{parts, {}};
  std::copy(sums.begin(), sums.end(), with.of);
  const int64 most = std::max_element(sums.begin(), sums.end(), [](const column_sum& x, const column_sum& y) {
                       return x.columns < y.columns;
                     })->columns;
  static known_kernels known;
  const kernel& sum = known.find_or_build(kernel_key(device, type), [&]() -> const kernel& {
    return load(column_sum_source(type), kKernelName, device, stream, facts(device).arch_name + " column sum");
  });
  // Some four parts a thread, so that their loads are in flight at a time.
  const unsigned down = std::min(std::bit_ceil(static_cast<unsigned>((parts + 3) / 4)), kTuning.column_sum_down);
  const unsigned across = kTuning.column_sum_threads / down, columns = across * kTuning.column_sum_columns;
  const auto blocks = static_cast<unsigned>((most + columns - 1) / columns);
  launch(sum, {blocks, static_cast<unsigned>(sums.size())}, {across, down}, 0, facts(device).arch >= 90, stream, &with);
}

}  // namespace onepass::cuda
