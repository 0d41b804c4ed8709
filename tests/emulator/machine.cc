// Who goes next, until all have ended.
#include "tests/emulator/machine.h"

#include <algorithm>
#include <cstdlib>
#include <set>

namespace onepass::emulator {
namespace {

constexpr int kSlice = 4000;          // instructions that a thread may run at a time
constexpr int kRoundsWithout = 3000;  // in which nothing ends before all is given up

std::uint64_t value_of(special which, const grid& g, const block& b, int thread) {
  switch (which) {
    case special::tid_x: return static_cast<std::uint64_t>(thread % g.size.block_x);
    case special::tid_y: return static_cast<std::uint64_t>(thread / g.size.block_x);
    case special::ntid_x: return static_cast<std::uint64_t>(g.size.block_x);
    case special::ntid_y: return static_cast<std::uint64_t>(g.size.block_y);
    case special::ctaid_x: return static_cast<std::uint64_t>(b.x);
    case special::ctaid_y: return static_cast<std::uint64_t>(b.y);
    case special::nctaid_x: return static_cast<std::uint64_t>(g.size.grid_x);
    case special::nctaid_y: return static_cast<std::uint64_t>(g.size.grid_y);
    case special::laneid: return static_cast<std::uint64_t>(thread % 32);
    default: return static_cast<std::uint64_t>(b.rank);
  }
}

std::unique_ptr<block> make_block(grid& g, int number) {
  const program& p = *g.of;
  auto b = std::make_unique<block>();
  b->of = &g;
  b->x = number % g.size.grid_x, b->y = number / g.size.grid_x;
  b->cluster = number / static_cast<int>(p.cluster), b->rank = number % static_cast<int>(p.cluster);
  const std::uint32_t dynamic = (p.static_shared + p.dynamic_align - 1) / p.dynamic_align * p.dynamic_align;
  b->shared.assign(dynamic + g.size.dynamic_shared, static_cast<char>(0xff));
  b->products_reading.assign(b->shared.size() / 16 + 1, 0);
  b->unseen = b->brought = b->threads_reading = b->products_reading;
  const int threads = g.size.block_x * g.size.block_y;
  b->threads.resize(static_cast<std::size_t>(threads));
  b->alive = threads;
  for (int first = 0; first < threads; first += 32) {
    warp& w = b->warps.emplace_back();
    w.of = b.get(), w.first = first, w.count = std::min(32, threads - first);
  }
  for (int n = 0; n < threads; ++n) {
    thread& t = b->threads[static_cast<std::size_t>(n)];
    t.number = n, t.of = &b->warps[static_cast<std::size_t>(n / 32)];
    t.r.assign(static_cast<std::size_t>(p.registers), 0x7ff7'ffff'7fff'7fffu);
    t.local.assign(static_cast<std::size_t>(p.thread_bytes), static_cast<char>(0xff));
    for (const auto& [reg, value] : p.constants) t.r[static_cast<std::size_t>(reg)] = value;
    for (const auto& [reg, which] : p.specials) t.r[static_cast<std::size_t>(reg)] = value_of(which, g, *b, n);
    for (const int reg : p.dynamic_shared) t.r[static_cast<std::size_t>(reg)] = kSharedBase + dynamic;
    for (const auto& [reg, at] : p.parameters)
      t.r[static_cast<std::size_t>(reg)] = reinterpret_cast<std::uint64_t>(g.parameters.data()) + at;
  }
  return b;
}

std::runtime_error failure(const block& b, int thread, const instruction& i, const std::string& what) {
  return std::runtime_error("emulator: block " + std::to_string(b.x) + "," + std::to_string(b.y) + " thread " +
                            std::to_string(thread) + ", PTX line " + std::to_string(i.line) + " (" + i.name +
                            "): " + what);
}

// Until it waits for others, or others should go on.
void run_thread(thread& t) {
  block& b = block_of(t);
  const std::vector<instruction>& code = b.of->of->code;
  t.is = state::runs;
  for (int n = 0; n < kSlice && t.is == state::runs; ++n) {
    const instruction& i = code[static_cast<std::size_t>(t.at)];
    if (i.guard >= 0 && (static_cast<std::uint16_t>(t.r[static_cast<std::size_t>(i.guard)]) != 0) != i.guard_is) {
      ++t.at;
      continue;
    }
    if (i.run_together != nullptr) {
      t.is = state::at_joint_step;
      return;
    }
    ++t.at;
    try {
      i.run(t, i);
    } catch (const std::exception& e) {
      throw failure(b, t.number, i, e.what());
    }
    if (i.yields && t.is == state::runs) t.is = state::looks_again;
  }
  if (t.is == state::done) {
    t.copies.close(), t.copies.finish_but(0), t.stores.close(), t.stores.finish_but(0);
    --b.alive, ++b.of->progress;
  }
}

bool of_four_is_there(const warp& w, int at) {
  const std::vector<thread>& all = w.of->threads;
  const auto first = static_cast<std::size_t>(w.first / 128 * 128);
  if (first + 128 > all.size()) throw std::runtime_error("emulator: a product of fewer than four warps");
  return std::all_of(all.begin() + static_cast<std::ptrdiff_t>(first),
                     all.begin() + static_cast<std::ptrdiff_t>(first + 128),
                     [&](const thread& t) { return t.is == state::at_joint_step && t.at == at; });
}

// The threads that have come to a step that they take together take it, if all of it are there.
void run_together(warp& w) {
  const std::vector<instruction>& code = w.of->of->of->code;
  std::uint32_t there = 0, alive = 0;
  for (int lane = 0; lane < w.count; ++lane) {
    there |= std::uint32_t{w.lane(lane).is == state::at_joint_step} << lane;
    alive |= std::uint32_t{w.lane(lane).is != state::done} << lane;
  }
  while (there != 0) {
    const int first = std::countr_zero(there), at = w.lane(first).at;
    const instruction& i = code[static_cast<std::size_t>(at)];
    std::uint32_t with = ~0u;
    if (i.mask >= 0) with = get<std::uint32_t>(w.lane(first), i, static_cast<std::size_t>(i.mask));
    with &= alive;
    std::uint32_t same = 0;
    for (int lane = 0; lane < w.count; ++lane)
      same |= std::uint32_t{(there >> lane & 1) != 0 && w.lane(lane).at == at} << lane;
    there &= ~same;
    if ((same & with) != with) continue;
    if (i.of_four_warps && !of_four_is_there(w, at)) return;
    warp& told = i.of_four_warps ? w.of->warps[static_cast<std::size_t>(w.first / 128 * 4)] : w;
    try {
      i.run_together(told, with, i);
    } catch (const std::exception& e) {
      throw failure(*w.of, w.first + first, i, e.what());
    }
    for (int lane = 0; lane < (i.of_four_warps ? 128 : w.count); ++lane)
      if (with >> lane % 32 & 1) ++told.lane(lane).at, told.lane(lane).is = state::runs;
  }
}

// As far as its threads come.
void run_warp(warp& w) {
  for (int round = 0; round < 200; ++round) {
    bool runs = false;
    for (int lane = 0; lane < w.count; ++lane) {
      thread& t = w.lane(lane);
      if (t.is != state::runs && (t.is != state::looks_again || round > 0)) continue;
      run_thread(t);
      runs = true;
    }
    run_together(w);
    if (!runs) break;
  }
}

void arrive(grid& g, std::size_t which) {
  auto& all = g.on_their_way;
  const auto arrives = std::move(all[which]);
  all[which] = std::move(all.back()), all.pop_back();
  arrives();
  ++g.progress;
}
void let_some_arrive(grid& g) {
  for (std::size_t n = g.on_their_way.size(); n > 0; --n)
    if (g.draw(0.3)) arrive(g, g.random() % g.on_their_way.size());
}

// One block's shared memory is there for the others of its cluster until all end, and for what is on its way there.
void let_clusters_end(grid& g) {
  std::set<int> unfinished;
  for (const auto& b : g.resident)
    if (b->alive > 0) unfinished.insert(b->cluster);
  const auto has_ended = [&](const auto& b) { return !unfinished.contains(b->cluster); };
  if (std::none_of(g.resident.begin(), g.resident.end(), has_ended)) return;
  while (!g.on_their_way.empty()) arrive(g, g.random() % g.on_their_way.size());
  std::erase_if(g.resident, has_ended);
}

// At a multiple of 64, as tensor maps need.
void place_parameters(grid& g, program& p, const void* parameters) {
  g.parameters.resize(p.parameter_bytes / 8 + 16);
  auto* const begin = reinterpret_cast<char*>(g.parameters.data());
  const auto shift = static_cast<std::uint32_t>(-reinterpret_cast<std::uint64_t>(begin) & 63);
  std::memcpy(begin + shift, parameters, p.parameter_bytes);
  for (auto& [reg, offset] : p.parameters) offset += shift;
}

std::string where_all_are(const grid& g) {
  std::set<std::string> places;
  for (const auto& b : g.resident)
    for (const thread& t : b->threads) {
      if (t.is == state::done) continue;
      const instruction& i = g.of->code[static_cast<std::size_t>(
          std::min<std::size_t>(static_cast<std::size_t>(t.at), g.of->code.size() - 1))];
      places.insert("block " + std::to_string(b->x) + " warp " + std::to_string(t.number / 32) + " PTX line " +
                    std::to_string(i.line) + " " + i.name);
    }
  std::string text;
  for (const std::string& place : places)
    if (text.size() < 4000) text += "\n  " + place;
  return text;
}

}  // namespace

thread& warp::lane(int i) const { return of->threads[static_cast<std::size_t>(first + i)]; }

void run(const program& p, const extents& size, const void* parameters, std::uint64_t seed, int resident_blocks) {
  grid g;
  program placed = p;
  g.of = &placed, g.size = size;
  g.random.seed(seed);
  place_parameters(g, placed, parameters);
  const int blocks = size.grid_x * size.grid_y, cluster = static_cast<int>(p.cluster);
  if (blocks % cluster != 0) throw std::runtime_error("emulator: a grid of no whole clusters");
  g.clusters.resize(static_cast<std::size_t>(blocks / cluster));
  int next = 0, without = 0;
  for (std::uint64_t seen = 0; true; seen = g.progress) {
    let_clusters_end(g);
    while (next < blocks && static_cast<int>(g.resident.size()) + cluster <= std::max(resident_blocks, cluster))
      for (int k = 0; k < cluster; ++k) g.resident.push_back(make_block(g, next++));
    if (g.resident.empty()) return;
    let_some_arrive(g);
    for (auto& b : g.resident)
      for (warp& w : b->warps) {
        if (g.draw(0.02)) w.readiness = std::uniform_real_distribution<>(0.05, 1)(g.random);
        if (g.draw(w.readiness)) run_warp(w);
      }
    without = g.progress == seen ? without + 1 : 0;
    if (without > kRoundsWithout) throw std::runtime_error("emulator: nothing goes on:" + where_all_are(g));
  }
}

}  // namespace onepass::emulator
