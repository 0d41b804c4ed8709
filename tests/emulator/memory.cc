// Loads and stores of a thread, each within what it may touch.
#include <atomic>
#include <map>
#include <mutex>

#include "tests/emulator/machine.h"

namespace onepass::emulator {
namespace {

// What tests have allocated.
struct allocations {
  std::mutex mutex;
  std::map<std::uint64_t, std::size_t> known;
  std::atomic<int> changes = 0;
};
allocations& the_allocations() {
  static allocations all;
  return all;
}

enum class space { global, shared, shared_of_cluster, local, parameters };

char* at(thread& t, space of, std::uint64_t address, std::size_t bytes, bool writes) {
  if (address % bytes != 0) throw std::runtime_error("an address that is no multiple of " + std::to_string(bytes));
  switch (of) {
    case space::global:
      if (writes && grid_of(t).unseen.insert(address / 16).second) t.unseen_global.push_back(address / 16);
      return global(address, bytes, writes);
    case space::shared:
      if (address >> kRankShift != 0) throw std::runtime_error("another block's shared memory");
      [[fallthrough]];
    case space::shared_of_cluster: {
      const shared_place place = place_in_shared(block_of(t), address, bytes);
      return writes ? place.to_write(t) : place.to_read(t);
    }
    case space::parameters: return reinterpret_cast<char*>(address);
    default:
      if (address + bytes > t.local.size()) throw std::runtime_error("outside of local memory");
      return t.local.data() + address;
  }
}

template <class T, space kSpace>
void load(thread& t, const instruction& i) {
  const std::size_t count = i.of.size() - 1;
  const char* from = at(t, kSpace, address(t, i, count), count * sizeof(T), false);
  T values[4];
  std::memcpy(values, from, count * sizeof(T));
  for (std::size_t k = 0; k < count; ++k) set<T>(t, i, k, values[k]);
}
template <class T, space kSpace>
void store(thread& t, const instruction& i) {
  const std::size_t count = i.of.size() - 1;
  T values[4];
  for (std::size_t k = 0; k < count; ++k) values[k] = get<T>(t, i, 1 + k);
  std::memcpy(at(t, kSpace, address(t, i, 0), count * sizeof(T), true), values, count * sizeof(T));
}

template <space kSpace>
step find_access(bool loads, const std::string& type) {
  const auto of = [&](auto zero) {
    using T = decltype(zero);
    return loads ? load<T, kSpace> : store<T, kSpace>;
  };
  if (type == "u8" || type == "b8") return of(std::uint8_t{});
  if (type == "u16" || type == "b16") return of(std::uint16_t{});
  if (type == "s16") return of(std::int16_t{});
  if (type == "u32" || type == "b32" || type == "s32" || type == "f32") return of(std::uint32_t{});
  if (type == "u64" || type == "b64" || type == "s64" || type == "f64") return of(std::uint64_t{});
  return nullptr;
}

}  // namespace

bool find_memory(const parts& of, instruction& i) {
  if (of[0] == "fence" && of[1] == "proxy") {
    i.run = of.back().starts_with("shared") ? [](thread& t, const instruction&) { hand_to_copies(t, false); }
                                            : [](thread& t, const instruction&) { hand_to_copies(t, true); };
    return true;
  }
  if (of[0] == "prefetch" || of[0] == "fence" || of[0] == "membar") {
    i.run = [](thread&, const instruction&) {};
    return true;
  }
  if (of[0] == "red" && has(of, "global") && has(of, "add") && of.back() == "u32") {
    i.run = [](thread& t, const instruction& c) {
      std::uint32_t value;
      char* place = at(t, space::global, address(t, c, 0), 4, true);
      std::memcpy(&value, place, 4);
      value += get<std::uint32_t>(t, c, 1);
      std::memcpy(place, &value, 4);
    };
    return true;
  }
  if ((of[0] != "ld" && of[0] != "st") || has(of, "async")) return false;
  const bool loads = of[0] == "ld";
  if (has(of, "global")) i.run = find_access<space::global>(loads, of.back());
  else if (has(of, "shared::cluster")) i.run = find_access<space::shared_of_cluster>(loads, of.back());
  else if (has(of, "shared")) i.run = find_access<space::shared>(loads, of.back());
  else if (has(of, "local")) i.run = find_access<space::local>(loads, of.back());
  else if (has(of, "param")) i.run = find_access<space::parameters>(loads, of.back());
  // Who looks at what others write may have to wait for them.
  i.yields = loads && (has(of, "acquire") || has(of, "volatile"));
  return i.run != nullptr;
}

shared_place place_in_shared(block& b, std::uint64_t address, std::size_t bytes) {
  const std::uint64_t rank = address >> kRankShift, at = address & ((1u << kRankShift) - 1);
  block* of = &b;
  if (rank != 0) {
    const auto found = std::find_if(b.of->resident.begin(), b.of->resident.end(), [&](const auto& other) {
      return other->cluster == b.cluster && other->rank == static_cast<int>(rank) - 1;
    });
    if (found == b.of->resident.end()) throw std::runtime_error("shared memory of a block that has ended");
    of = found->get();
  }
  if (at < kSharedBase || at + bytes > kSharedBase + of->shared.size())
    throw std::runtime_error("outside of shared memory: " + std::to_string(at) + " of " +
                             std::to_string(kSharedBase + of->shared.size()));
  return {of, of->shared.data() + (at - kSharedBase), bytes};
}
char* shared(block& b, std::uint64_t address, std::size_t bytes) { return place_in_shared(b, address, bytes).at; }

std::size_t shared_place::first_piece() const { return static_cast<std::size_t>(at - of->shared.data()) / 16; }
std::size_t shared_place::end_piece() const {
  return (static_cast<std::size_t>(at - of->shared.data()) + bytes + 15) / 16;
}
void shared_place::require_unread() const {
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece)
    if (of->products_reading[piece] != 0) throw std::runtime_error("writes what a product still reads");
}
char* shared_place::to_write() const {
  require_unread();
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece) of->unseen[piece] = 0;
  return at;
}
char* shared_place::to_write_by_copy() const {
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece) {
    if (of->threads_reading[piece] != 0)
      throw std::runtime_error("emulator: a copy writes what a thread read, and no fence.proxy.async after that");
    of->brought[piece] = 1;
  }
  return to_write();
}
char* shared_place::to_write(thread& by) const {
  require_unread();
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece) {
    if (of->unseen[piece] == by.number + 1) continue;
    of->unseen[piece] = static_cast<std::uint16_t>(by.number + 1);
    by.unseen.emplace_back(of, piece);
  }
  return at;
}
char* shared_place::to_read(thread& by) const {
  if (of != &block_of(by)) return at;  // copies bring nothing for other blocks' threads
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece)
    if (of->brought[piece] != 0 && by.reading.insert(static_cast<u32>(piece)).second) ++of->threads_reading[piece];
  return at;
}
const char* shared_place::to_read_by_product() const {
  for (std::size_t piece = first_piece(); piece < end_piece(); ++piece)
    if (of->unseen[piece] != 0) throw std::runtime_error("reads what a thread wrote before fence.proxy.async");
  return at;
}
void hand_to_copies(thread& t, bool global_too) {
  if (global_too) {
    for (const std::uint64_t piece : t.unseen_global) grid_of(t).unseen.erase(piece);
    t.unseen_global.clear();
  }
  for (const auto& [of, piece] : t.unseen)
    if (of->unseen[piece] == t.number + 1) of->unseen[piece] = 0;
  t.unseen.clear();
  for (const u32 piece : t.reading) --block_of(t).threads_reading[piece];
  t.reading.clear();
}

// Where a read ends may be a number's 16 bytes, as whole ones come in aligned windows.
char* global(std::uint64_t address, std::size_t bytes, bool writes) {
  allocations& all = the_allocations();
  thread_local std::uint64_t begin = 0, end = 0;
  thread_local int seen = 0;
  const auto is_within = [&] {
    return seen == all.changes && address >= begin && address + bytes <= (writes ? end : (end + 15) / 16 * 16);
  };
  if (!is_within()) {
    const std::scoped_lock lock(all.mutex);
    auto found = all.known.upper_bound(address);
    if (found == all.known.begin()) throw std::runtime_error("outside of all memory");
    --found;
    begin = found->first, end = begin + found->second, seen = all.changes;
    if (!is_within()) throw std::runtime_error("outside of all memory");
  }
  return reinterpret_cast<char*>(address);
}

void* allocate(std::size_t bytes) {
  allocations& all = the_allocations();
  void* at = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  std::memset(at, 0xff, bytes);  // numbers that are none
  const std::scoped_lock lock(all.mutex);
  all.known[reinterpret_cast<std::uint64_t>(at)] = bytes, ++all.changes;
  return at;
}
void release(void* at) {
  allocations& all = the_allocations();
  const std::scoped_lock lock(all.mutex);
  all.known.erase(reinterpret_cast<std::uint64_t>(at)), ++all.changes;
  std::free(at);
}

}  // namespace onepass::emulator
