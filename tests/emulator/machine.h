// A chip that is not there: blocks of threads, each with registers and a place in the program, what they share, and
// what is on its way. Who goes next, and when what is on its way arrives, is drawn at random.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "tests/emulator/program.h"

namespace onepass::emulator {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct block;
struct grid;

enum class state { runs, looks_again, at_joint_step, at_barrier, done };

// Copies of a thread that end together.
struct copy_groups {
  std::deque<std::vector<std::function<void()>>> closed;
  std::vector<std::function<void()>> open;
  void close();
  void finish_but(std::size_t pending);
};

struct thread {
  std::vector<std::uint64_t> r;
  std::vector<char> local;
  int at = 0, number = 0;  // number: in its block
  state is = state::runs;
  int barrier = 0;
  std::uint64_t cluster_phase = 0;
  copy_groups copies, stores;
  std::vector<std::pair<block*, std::size_t>> unseen;  // pieces of shared memory
  std::vector<std::uint64_t> unseen_global;            // likewise, of 16 bytes
  std::unordered_set<std::uint32_t> reading;           // pieces of its block's that a copy brought
  emulator::warp* of = nullptr;
};

// What a group of products reads of shared memory, in pieces of 16 bytes, until it is waited for. Its results are there
// at once: PTX may move them before, which the assembler sees through.
struct product_groups {
  std::deque<std::vector<std::uint32_t>> closed;
  std::vector<std::uint32_t> open;
};

struct warp {
  block* of = nullptr;
  int first = 0, count = 0;  // threads of its block
  product_groups products;   // of the first of four
  double readiness = 1;      // how often it is drawn
  thread& lane(int i) const;
};

struct block {
  emulator::grid* of = nullptr;
  int x = 0, y = 0, rank = 0, cluster = 0;
  std::vector<char> shared;
  // Of each piece of 16 bytes: how many products read it, the number of the thread, from 1, whose writes copies and
  // products do not see yet, whether a copy brought it, and how many threads have read it since, which a copy does not
  // wait for: what a thread reads may be on its way to it while it arrives at a mailbox.
  std::vector<std::uint16_t> products_reading, unseen, brought, threads_reading;
  std::vector<thread> threads;
  std::vector<warp> warps;
  int arrived[16] = {};  // at each barrier
  int alive = 0;
};

struct cluster_barrier {
  std::uint64_t phase = 0;
  int arrived = 0;
};

struct extents {
  int grid_x, grid_y, block_x, block_y;
  std::uint32_t dynamic_shared;
};

struct grid {
  const program* of = nullptr;
  extents size{};
  std::vector<std::uint64_t> parameters;
  std::vector<std::unique_ptr<block>> resident;
  std::vector<cluster_barrier> clusters;
  std::vector<std::function<void()>> on_their_way;  // copies, each at any time
  std::unordered_set<std::uint64_t> unseen;         // pieces of global memory, as a block's of shared memory
  std::mt19937_64 random;
  std::uint64_t progress = 0;

  bool draw(double probability) { return std::uniform_real_distribution<>(0, 1)(random) < probability; }
  // From now on it may happen at any time.
  void send(std::function<void()> what) { on_their_way.push_back(std::move(what)); }
};

inline block& block_of(const thread& t) { return *t.of->of; }
inline grid& grid_of(const thread& t) { return *t.of->of->of; }

// --- registers

template <class T>
T from_register(std::uint64_t bits) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<T>(bits);
  else if constexpr (sizeof(T) == 4) return std::bit_cast<T>(static_cast<std::uint32_t>(bits));
  else return static_cast<T>(bits);
}
template <class T>
std::uint64_t to_register(T value) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<std::uint64_t>(value);
  else if constexpr (sizeof(T) == 4) return std::bit_cast<std::uint32_t>(value);
  else return static_cast<std::make_unsigned_t<T>>(value);
}
template <class T>
T get(const thread& t, const instruction& i, std::size_t k) {
  return from_register<T>(t.r[static_cast<std::size_t>(i.of[k].reg)]);
}
template <class T>
void set(thread& t, const instruction& i, std::size_t k, T value) {
  t.r[static_cast<std::size_t>(i.of[k].reg)] = to_register(value);
}
inline std::uint64_t address(const thread& t, const instruction& i, std::size_t k) {
  return t.r[static_cast<std::size_t>(i.of[k].reg)] + static_cast<std::uint64_t>(i.of[k].offset);
}

// --- memory; each throws where a kernel may not read or write

// An address in shared memory: of this block, or, from in_block on, of another one of its cluster.
inline constexpr int kRankShift = 24;
char* shared(block&, std::uint64_t address, std::size_t bytes);
// The same, of whichever block, and how to tell that it is written now: no product may still read it.
struct shared_place {
  block* of;
  char* at;
  std::size_t bytes;
  std::size_t first_piece() const;
  std::size_t end_piece() const;
  char* to_write() const;  // by whoever needs no fence
  char* to_write_by_copy() const;
  char* to_write(thread& by) const;  // by a thread
  char* to_read(thread& by) const;
  const char* to_read_by_product() const;  // or by a copy
  void require_unread() const;
};
void hand_to_copies(thread&, bool global_too);  // what it wrote and read
shared_place place_in_shared(block&, std::uint64_t address, std::size_t bytes);
char* global(std::uint64_t address, std::size_t bytes, bool writes);
void* allocate(std::size_t bytes);
void release(void*);

// Of bytes in rows of 128 whose pieces of 16 are exchanged within eight rows, as TMA has them.
inline std::uint64_t swizzled(std::uint64_t address) { return address ^ ((address >> 7 & 7) << 4); }

// Numbers of 16 bits.
float from_half(std::uint16_t bits, bool is_bf16);
std::uint16_t to_half(float, bool is_bf16);

// A mailbox, in 8 bytes of shared memory.
struct mailbox {
  std::uint64_t phase : 1, arrivals : 15, missing : 16;
  std::int64_t bytes : 32;
};
void change_mailbox(grid&, char* at, int arrivals, std::int64_t bytes);

// Runs a kernel to its end. Throws std::runtime_error for what a chip would not do either, and where nothing goes on.
void run(const program&, const extents&, const void* parameters, std::uint64_t seed, int resident_blocks);

}  // namespace onepass::emulator
