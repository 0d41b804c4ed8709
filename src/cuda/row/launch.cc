// Finds or builds a call's kernel, and launches it.
#include "src/cuda/row/launch.h"

#include <algorithm>
#include <bit>

#include "onepass/kernel/arguments.h"
#include "src/cuda/row/group.h"
#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/row/spills.h"
#include "src/cuda/row/tuned.h"
#include "src/cuda/row/tuning.h"

namespace onepass::cuda {
namespace {

// Of one launch of many, in 4096 bytes of parameters.
constexpr std::size_t kManySums = 100;

const kernel& find_or_build(const request& r, const plan& p, int device, void* stream) {
  static known_kernels known;
  const kernel_key key(device, r.line, p.with, r.x, r.operand, r.kept, r.backward, r.wants_column, r.wants_tensor,
                       r.wants_dx, r.wants_recompute);
  return known.find_or_build(key, [&]() -> const kernel& {
    return load(source(r, p.with), device, stream, label(r, p.with, facts(device).arch_name));
  });
}

// As it was tuned, else by the table, where its kernel's registers do.
std::vector<plan> choose_here(const request& r, const arguments& a, const device_facts& chip,
                              const configuration& described, int device, void* stream) {
  std::vector<plan> tuned = choose_tuned(r, a, chip, described);
  if (!tuned.empty()) return tuned;
  return without_spills(r, a, chip, described, choose(r, a, chip, described),
                        [&](const plan& p) -> const kernel& { return find_or_build(r, p, device, stream); });
}

}  // namespace

std::vector<plan> prepare(const request& r, const arguments& a, int device, void* stream) {
  return prepare(r, a, describe(r, a, true), device, stream);
}

std::vector<plan> prepare(const request& r, const arguments& a, const configuration& described, int device,
                          void* stream) {
  device_facts chip = facts(device);
  std::vector<plan> plans = choose_here(r, a, chip, described, device, stream);
  // Where the blocks of a cluster stride over rows, a cluster without room at first would run after all others. A chip
  // may have no room for a cluster of more than eight blocks at all.
  const auto strides = [](const configuration& c) { return c.cluster > 1 && (c.stages > 0 || c.recomputes != 0); };
  while (strides(plans.front().with)) {
    plan& p = plans.front();
    const auto threads = static_cast<unsigned>(p.with.across * p.with.down);
    const int most = active_clusters(find_or_build(r, p, device, stream), p.with.cluster, threads, p.shared_bytes);
    if (most > 0 || p.with.cluster <= 8) {
      if (r.has_groups) {
        share_groups(a.groups, std::max(most, 1), p);
        break;
      }
      const auto clusters = std::min<int64>(p.grid_x / static_cast<unsigned>(p.with.cluster), std::max(most, 1));
      p.grid_x = static_cast<unsigned>(clusters * p.with.cluster);
      if (p.parts > 0) p.parts = clusters;
      break;
    }
    chip.cluster = p.with.cluster / 2;
    plans = choose_here(r, a, chip, described, device, stream);
  }
  return plans;
}

void launch(const request& r, const std::vector<plan>& plans, const arguments& a, int device, void* stream) {
  const arguments* const one = &a;
  launch(r, plans, &one, 1, device, stream);
}

void launch(const request& r, const std::vector<plan>& plans, const arguments* const* members, std::size_t count,
            int device, void* stream) {
  thread_local std::string packed;
  packed.clear();
  for (std::size_t i = 0; i < count; ++i) append_packed(packed, r, *members[i]);
  for (auto i = static_cast<int>(count); i < plans.front().with.members; ++i) append_packed(packed, r, no_member());
  for (const plan& p : plans) {
    const kernel& with = p.built != nullptr ? *p.built : find_or_build(r, p, device, stream);
    if (is_listening()) hear_launch(r, p, with, facts(device));
    const bool behind = &p != &plans.front() && facts(device).arch >= 90;
    launch(with, {p.grid_x, p.grid_y}, {static_cast<unsigned>(p.with.across * p.with.down), 1}, p.shared_bytes, behind,
           stream, packed.data());
  }
}

std::vector<column_sum> sums_of(const arguments& a, dtype type, int64 parts, int slots, const view* outputs) {
  std::vector<column_sum> sums;
  for (int slot = 0; slot < slots; ++slot) {
    const char* partial = static_cast<const char*>(a.column_partial) + slot * a.parts * a.columns * size_of(type);
    const view& to = outputs[slot];
    if (to.data)
      sums.push_back({partial, parts, a.columns / std::max(to.column_stride, 1), a.columns, to.data, to.type});
  }
  return sums;
}

void reduce_columns(const std::vector<column_sum>& sums, dtype type, int device, void* stream, int64 groups) {
  if (sums.size() > kManySums) {
    const auto middle = sums.begin() + kManySums;
    reduce_columns({sums.begin(), middle}, type, device, stream, groups);
    reduce_columns({middle, sums.end()}, type, device, stream, groups);
    return;
  }
  int64 parts = 0, most = 0;
  for (const column_sum& s : sums) parts = std::max(parts, s.parts), most = std::max(most, s.columns);
  if (most == 0) return;
  const device_facts& chip = facts(device);
  const std::size_t room = sums.size() <= kFewSums ? kFewSums : kManySums;
  std::vector<column_sum> with(room);  // column_sum_arguments
  std::copy(sums.begin(), sums.end(), with.begin());
  static known_kernels known;
  const kernel& sum = known.find_or_build(kernel_key(device, type, room, groups > 0), [&]() -> const kernel& {
    return load(column_sum_source(type, static_cast<int>(room), groups > 0), device, stream,
                chip.arch_name + " column sum" + (groups > 0 ? " of groups" : ""));
  });
  // Some four parts a thread, so that their loads are in flight at a time.
  const unsigned down = std::min(std::bit_ceil(static_cast<unsigned>((parts + 3) / 4)), kTuning.column_sum_down);
  const unsigned across = kTuning.column_sum_threads / down, columns = across * kTuning.column_sum_columns;
  const auto blocks = static_cast<unsigned>((most + columns - 1) / columns);
  const auto each = static_cast<unsigned>(std::max<int64>(groups, 1));
  launch(sum, {blocks * each, static_cast<unsigned>(sums.size())}, {across, down}, 0, chip.arch >= 90, stream,
         with.data());
}

}  // namespace onepass::cuda
