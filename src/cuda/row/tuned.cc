// Ways that were measured: by key, in memory and on disk.
#include "src/cuda/row/tuned.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "src/cache/disk_cache.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

constexpr const char* kExtension = "way";

way rows_of(row_tuning tuned) {
  row_tuning only{.numbers = tuned.numbers, .stages = tuned.stages};
  only.block = tuned.block, only.threads = tuned.threads, only.resident = tuned.resident;
  only.recomputes = tuned.recomputes, only.ahead = tuned.ahead;
  only.cluster = tuned.cluster, only.across = tuned.across;
  return {.kind = way_kind::rows, .row = only};
}

// Of other kernels, or beside another table, a way may be none.
std::string key_on_disk(const std::string& key) {
  static const std::string version = [] {
    std::string all = '\n' + cache::headers_digest();
    for (const bool backward : {false, true}) {
      each_row_tuning(backward, [&](const row_tuning& tuned) {
        all += '\n' + text_of(rows_of(tuned));
        return false;
      });
    }
    return all;
  }();
  return key + version;
}

class known_ways {
 public:
  // Most processes have none, and ask nothing.
  bool any() {
    const int now = any_.load(std::memory_order_relaxed);
    if (now >= 0) return now != 0;
    const bool found = cache::has_any(kExtension);
    any_.store(found ? 1 : 0, std::memory_order_relaxed);
    return found;
  }

  std::optional<way> find(const std::string& key) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = known_.find(key); found != known_.end()) return found->second;
    }
    const std::optional<std::string> text = cache::read(key_on_disk(key), kExtension);
    const std::unique_lock lock(mutex_);
    return known_.emplace(key, text ? way_of(*text) : std::nullopt).first->second;
  }

  void set(const std::string& key, const std::optional<way>& to) {
    const std::unique_lock lock(mutex_);
    known_[key] = to;
    any_.store(1, std::memory_order_relaxed);
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::optional<way>> known_;
  std::atomic<int> any_{-1};  // not known yet
};

known_ways& known() {
  static auto* const all = new known_ways;  // threads may run at the very end
  return *all;
}

std::atomic<bool> listening{false};
std::mutex hearing;
std::vector<heard_call> calls;
std::vector<launched_kernel> launches;

// Of an SM: as registers, shared memory and warps leave room for blocks.
int resident_threads(const plan& p, const kernel& with, const device_facts& chip) {
  constexpr int kRegisters = 1 << 16, kOfBlock = 1024;  // kOfBlock: bytes that the system has in each
  const int most = chip.arch == 80 || chip.arch == 90 || chip.arch == 100 ? 2048 : 1536;
  const int threads = static_cast<int>(ceil_div(p.with.across * p.with.down, 32) * 32);
  const int by_registers = kRegisters / (std::max(static_cast<int>(ceil_div(with.registers, 8)), 1) * 8 * threads);
  const int by_memory = (chip.shared_per_block + kOfBlock) / (static_cast<int>(p.shared_bytes) + kOfBlock);
  return std::min({most / threads, by_registers, by_memory}) * threads;
}

void hear(const std::string& key, const request& r, const arguments& a, const device_facts& chip,
          const configuration& described) {
  const std::lock_guard lock(hearing);
  if (std::any_of(calls.begin(), calls.end(), [&](const heard_call& c) { return c.key == key; })) return;
  calls.push_back({key, r, a, chip, described});
}

// The least number of four bits and zeros behind them that is not less.
int64 class_of(int64 columns) {
  const auto n = static_cast<std::uint64_t>(columns);
  const int zeros = std::max(static_cast<int>(std::bit_width(n)) - 4, 0);
  return static_cast<int64>(((n + (std::uint64_t{1} << zeros) - 1) >> zeros) << zeros);
}

bool are_same(const std::vector<plan>& a, const std::vector<plan>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const plan& one, const plan& other) {
    return std::memcmp(&one.with, &other.with, sizeof one.with) == 0 && one.grid_x == other.grid_x &&
           one.grid_y == other.grid_y && one.shared_bytes == other.shared_bytes;
  });
}

way tiles_of(way_kind kind, const elementwise_tuning& tuned) { return {.kind = kind, .tile = tuned}; }

std::vector<way> ways_of_table(const request& r) {
  std::vector<way> all;
  const auto add_tiles = [&](way_kind kind) {
    elementwise_tuning tuned = r.backward ? kTuning.backward : kTuning.forward;
    for (const int threads : {64, 128, 256}) {
      for (const int unroll : {1, 2, 4}) {
        for (const int resident : {768, 1280, 2048}) {
          tuned.threads = threads, tuned.unroll = unroll, tuned.resident = resident;
          all.push_back(tiles_of(kind, tuned));
        }
      }
    }
  };
  if (!r.rowwise) {
    add_tiles(way_kind::tiles);
    return all;
  }
  if (!r.backward) {
    for (const int threads : {128, 256, 512})
      for (const int vectors : {2, 4})
        all.push_back({.kind = way_kind::streamed,
                       .stream = {.threads = threads, .steps = 14, .vectors = vectors, .resident = 1024}});
  }
  each_row_tuning(r.backward, [&](const row_tuning& tuned) {
    all.push_back(rows_of(tuned));
    return false;
  });
  if (r.summed == 0 && r.backward) add_tiles(way_kind::parts);
  else all.push_back(tiles_of(way_kind::parts, {}));
  return all;
}

std::vector<way> ways_near(const way& at) {
  std::vector<way> all;
  way w = at;
  const auto with = [&](int& number_of_w, std::initializer_list<double> factors) {
    const int own = number_of_w;
    for (const double factor : factors) {
      number_of_w = static_cast<int>(std::lround(own * factor));
      if (number_of_w > 0) all.push_back(w);
    }
    number_of_w = own;
  };
  switch (at.kind) {
    case way_kind::rows:
      with(w.row.numbers, {.5, .75, 1.5, 2}), with(w.row.block, {.5, 2});
      with(w.row.resident, {.5, .75, 1.5, 2}), with(w.row.threads, {.5, 2});
      for (const int stages : {0, 2, 3}) {
        w.row.stages = stages;
        all.push_back(w);
      }
      break;
    case way_kind::streamed:
      with(w.stream.vectors, {.5, 2}), with(w.stream.steps, {.5, 2}), with(w.stream.resident, {.75, 1.5});
      break;
    case way_kind::parts:
    case way_kind::tiles:
      with(w.tile.resident, {.75, 1.25}), with(w.tile.unroll, {.5, 2}), with(w.tile.blocks_per_sm, {.5, 2});
      break;
  }
  return all;
}

}  // namespace

std::string tuning_key(const request& r, const arguments& a, const device_facts& chip, const configuration& described) {
  const auto tenths = static_cast<int>(std::lround(chip.bytes_per_second / 1e11));  // of a terabyte a second
  std::string key = chip.arch_name + ' ' + std::to_string(chip.sm_count) + ' ' + std::to_string(tenths);
  key += r.backward ? " backward " : " forward ";
  key += name_of(r.x);
  key += ' ' + std::to_string(class_of(a.columns));
  key += described.ragged != 0 ? " ragged" : described.access == described.vector_size ? " whole" : " split";
  key += r.wants_column != 0 ? " sums " : " ";
  return key + r.line;
}

std::vector<plan> choose_tuned(const request& r, const arguments& a, const device_facts& chip,
                               const configuration& described) {
  const bool listens = is_listening() && described.members == 0;
  if (!listens && !known().any()) return {};
  const std::string key = tuning_key(r, a, chip, described);
  if (listens) hear(key, r, a, chip, described);
  const std::optional<way> own = known().find(key);
  return own ? lay_out(*own, r, a, chip, described) : std::vector<plan>();
}

void listen(bool now) {
  const std::lock_guard lock(hearing);
  if (now) calls.clear(), launches.clear();
  listening.store(now);
}

bool is_listening() { return listening.load(std::memory_order_relaxed); }

std::vector<heard_call> heard() {
  const std::lock_guard lock(hearing);
  return calls;
}

std::vector<launched_kernel> launched_kernels() {
  const std::lock_guard lock(hearing);
  return launches;
}

void hear_launch(const request& r, const plan& p, const kernel& with, const device_facts& chip) {
  const std::lock_guard lock(hearing);
  launches.push_back(
      {function_of(r, p.with), r.backward, with.registers, with.spilled, resident_threads(p, with, chip), r.flops});
}

std::vector<way> other_ways(const heard_call& of, const std::optional<way>& near) {
  std::vector<std::vector<plan>> found{near ? lay_out(*near, of.r, of.a, of.chip, of.described)
                                            : choose(of.r, of.a, of.chip, of.described)};
  std::vector<way> ways;
  for (const way& w : near ? ways_near(*near) : ways_of_table(of.r)) {
    if (!way_of(text_of(w))) continue;  // out of bounds
    std::vector<plan> plans = lay_out(w, of.r, of.a, of.chip, of.described);
    const bool is_new = !plans.empty() && std::none_of(found.begin(), found.end(), [&](const std::vector<plan>& other) {
      return are_same(plans, other);
    });
    if (!is_new) continue;
    found.push_back(std::move(plans));
    ways.push_back(w);
  }
  return ways;
}

void build_way(const heard_call& of, const way& w) {
  for (const plan& p : lay_out(w, of.r, of.a, of.chip, of.described))
    build(source(of.r, p.with), of.chip.arch_name, label(of.r, p.with, of.chip.arch_name));
}

void use_way(const std::string& key, const std::optional<way>& to) { known().set(key, to); }

bool keep_way(const std::string& key, const std::optional<way>& to, const std::string& label) {
  if (!cache::write(key_on_disk(key), kExtension, label, to ? text_of(*to) : "")) return false;
  use_way(key, to);
  return true;
}

}  // namespace onepass::cuda
