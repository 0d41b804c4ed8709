// Several tensors' calls of a line in one launch: which of them share one, and who has how many of its blocks.
#include "src/cuda/row/group.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "src/cuda/row/launch.h"
#include "src/cuda/runtime/packed_arguments.h"

namespace onepass::cuda {
namespace {

int64 packed_bytes(const request& r) {
  std::string packed;
  append_packed(packed, r, arguments{});
  return static_cast<int64>(packed.size());
}

// The one with the most rows.
const arguments* longest(const std::vector<const arguments*>& some) {
  return *std::max_element(some.begin(), some.end(),
                           [](const arguments* a, const arguments* b) { return a->rows < b->rows; });
}

// As if the members were one tensor, which lies as the longest of them does.
arguments together(const std::vector<member>& all, const std::vector<int>& of) {
  std::vector<const arguments*> some;
  some.reserve(of.size());
  for (const int i : of) some.push_back(all[static_cast<std::size_t>(i)].a);
  const bool flat = all[static_cast<std::size_t>(of.front())].flat;
  arguments a = *longest(some);
  a.rows = flat ? 1 : 0, a.columns = flat ? 0 : a.columns;
  for (const arguments* own : some) (flat ? a.columns : a.rows) += flat ? own->columns : own->rows;
  return a;
}

void give_blocks(const request& r, const std::vector<member>& all, const std::vector<int>& of, plan& p) {
  configuration& c = p.with;
  const auto member_at = [&](int i) -> const member& { return all[static_cast<std::size_t>(i)]; };
  const bool rows = has_whole_rows(r, c);
  const int64 across = int64{c.across} * std::max(c.unroll, 1) * c.vector_size;
  std::vector<int64> steps;
  for (const int i : of) {
    const arguments& a = *member_at(i).a;
    steps.push_back(rows     ? ceil_div(a.rows, c.down)
                    : c.flat ? ceil_div(a.columns, across)
                             : ceil_div(a.rows, int64{c.down} * c.unroll));
  }
  if (c.flat) c.exact = std::all_of(of.begin(), of.end(), [&](int i) { return member_at(i).a->columns % across == 0; });
  const bool tiles = !rows && !c.flat;
  unsigned& grid = tiles ? p.grid_y : p.grid_x;
  constexpr int64 kMostY = 65535, kMostX = (1LL << 31) - 1;
  const std::vector<unsigned> blocks = share(steps, grid / c.cluster, tiles ? kMostY : kMostX / c.cluster);
  grid = 0;
  for (std::size_t i = 0; i < of.size(); ++i) {
    arguments& a = *member_at(of[i]).a;
    a.first_block = grid, a.blocks = blocks[i];
    grid += blocks[i];
  }
  grid *= static_cast<unsigned>(c.cluster);
}

}  // namespace

std::vector<std::vector<int>> alike(const std::vector<std::string>& keys, int64 most) {
  std::vector<std::vector<int>> groups;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto takes = [&](const std::vector<int>& group) {
      return static_cast<int64>(group.size()) < most && keys[static_cast<std::size_t>(group.front())] == keys[i];
    };
    const auto found = std::find_if(groups.begin(), groups.end(), takes);
    (found == groups.end() ? groups.emplace_back() : *found).push_back(static_cast<int>(i));
  }
  return groups;
}

int64 room_for_members(std::size_t count, int64 most) {
  return std::min(static_cast<int64>(std::bit_ceil(count)), most);
}

void lay_out_single_rows(const std::vector<arguments*>& some) {
  const arguments& all = *longest({some.begin(), some.end()});
  for (arguments* a : some) {
    if (a->rows != 1) continue;
    const auto as = [](const view& from, view& to) { std::copy_n(from.stride, kMaxDims, to.stride); };
    as(all.x, a->x), as(all.y, a->y), as(all.dx, a->dx), as(all.recomputed, a->recomputed);
    for (int i = 0; i < kMaxOperands; ++i) {
      as(all.operand[i], a->operand[i]), as(all.operand_gradient[i], a->operand_gradient[i]);
    }
    for (int k = 0; k < kMaxKeeps; ++k) as(all.kept[k], a->kept[k]), as(all.kept_gradient[k], a->kept_gradient[k]);
  }
}

std::string key_of(configuration c) {
  c.small = 0;
  return {reinterpret_cast<const char*>(&c), sizeof c};
}

std::vector<unsigned> share(const std::vector<int64>& steps, int64 blocks, int64 most) {
  const int64 all = std::accumulate(steps.begin(), steps.end(), int64{0});
  const auto taken = [&](int64 each) {
    return std::accumulate(steps.begin(), steps.end(), int64{0},
                           [&](int64 sum, int64 own) { return sum + ceil_div(own, each); });
  };
  const auto members = static_cast<int64>(steps.size());
  // A step each, where nothing but the members' last steps is more than there are blocks.
  int64 each = all <= blocks + members ? 1 : ceil_div(all, std::max<int64>(blocks, 1));
  // Where blocks stride, one more than the machine holds would come behind all others.
  const int64 limit = each == 1 ? most : std::max(blocks, members);
  while (taken(each) > limit) each += std::max<int64>(each / 32, 1);
  std::vector<unsigned> shares;
  shares.reserve(steps.size());
  for (const int64 own : steps) shares.push_back(static_cast<unsigned>(ceil_div(own, each)));
  return shares;
}

arguments no_member() {
  arguments none{};
  none.first_block = std::numeric_limits<unsigned>::max();
  return none;
}

std::vector<batch> batches(const request& r, const std::vector<member>& all, int device, void* stream) {
  const int64 most = facts(device).parameter_bytes / packed_bytes(r);
  std::vector<arguments*> in_rows;
  for (const member& m : all)
    if (!m.flat) in_rows.push_back(m.a);
  if (!in_rows.empty()) lay_out_single_rows(in_rows);
  std::vector<configuration> described;
  std::vector<std::string> keys;
  for (const member& m : all) {
    described.push_back(describe(r, *m.a));
    keys.push_back(key_of(described.back()) + (m.flat ? "flat" : ""));
  }
  std::vector<batch> result;
  for (std::vector<int>& group : alike(keys, most)) {
    configuration c = described[static_cast<std::size_t>(group.front())];
    for (const int i : group) c.small &= described[static_cast<std::size_t>(i)].small;
    std::vector<plan> plans;
    if (group.size() > 1) {
      c.members = room_for_members(group.size(), most);
      plans = prepare(r, together(all, group), c, device, stream);
    }
    if (plans.size() == 1) {
      give_blocks(r, all, group, plans.front());
      result.push_back({std::move(group), std::move(plans)});
      continue;
    }
    for (const int i : group) {  // alone, or in several kernels
      const auto at = static_cast<std::size_t>(i);
      plans = prepare(r, *all[at].a, described[at], device, stream);
      plans.back().with.one_part = 0, plans.back().built = nullptr;
      all[at].a->blocks = static_cast<unsigned>(plans.back().parts);
      result.push_back({{i}, std::move(plans)});
    }
  }
  return result;
}

void launch(const request& r, const batch& of, const std::vector<member>& all, int device, void* stream) {
  std::vector<const arguments*> members;
  for (const int i : of.members) members.push_back(all[static_cast<std::size_t>(i)].a);
  launch(r, of.plans, members.data(), members.size(), device, stream);
}

}  // namespace onepass::cuda
