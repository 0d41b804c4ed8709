// What threads do together: those of a warp, which exchange and multiply, and those of a block, which wait.
#include <algorithm>

#include "tests/emulator/machine.h"

namespace onepass::emulator {
namespace {

template <class F>
void each_lane(u32 mask, const F& f) {
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) f(lane);
}

// PTX ISA, "shfl.sync": the last lane to read from, and a lane of a segment's own, are in one operand.
template <class Source>
void shuffle(warp& w, u32 mask, const instruction& i, const Source& source) {
  const std::size_t at = i.of.size() - 4;  // a predicate may stand before
  u32 values[32];
  each_lane(mask, [&](int lane) { values[lane] = get<u32>(w.lane(lane), i, at); });
  each_lane(mask, [&](int lane) {
    thread& t = w.lane(lane);
    const u32 by = get<u32>(t, i, at + 1) & 31, c = get<u32>(t, i, at + 2), segment = c >> 8 & 31, clamp = c & 31;
    const int most = static_cast<int>((static_cast<u32>(lane) & segment) | (clamp & ~segment));
    const int least = static_cast<int>(static_cast<u32>(lane) & segment);
    auto [from, is_there] = source(lane, static_cast<int>(by), most, least, segment);
    if (!is_there) from = lane;
    if ((mask >> from & 1) == 0) throw std::runtime_error("a shuffle reads from a thread that is not there");
    set<u32>(t, i, 0, values[from]);
    if (at == 2) set<u16>(t, i, 1, is_there);
  });
}
using source = std::pair<int, bool>;

joint_step find_shuffle(const std::string& how) {
  if (how == "bfly")
    return [](warp& w, u32 mask, const instruction& i) {
      shuffle(w, mask, i, [](int lane, int by, int most, int, u32) { return source(lane ^ by, (lane ^ by) <= most); });
    };
  if (how == "down")
    return [](warp& w, u32 mask, const instruction& i) {
      shuffle(w, mask, i, [](int lane, int by, int most, int, u32) { return source(lane + by, lane + by <= most); });
    };
  if (how == "up")
    return [](warp& w, u32 mask, const instruction& i) {
      shuffle(w, mask, i, [](int lane, int by, int most, int, u32) { return source(lane - by, lane - by >= most); });
    };
  if (how == "idx")
    return [](warp& w, u32 mask, const instruction& i) {
      shuffle(w, mask, i, [](int, int by, int most, int least, u32 segment) {
        const int from = least | (by & ~static_cast<int>(segment));
        return source(from, from <= most);
      });
    };
  return nullptr;
}

template <class Combine>
void vote(warp& w, u32 mask, const instruction& i, const Combine& combine) {
  u32 yes = 0;
  each_lane(mask, [&](int lane) { yes |= u32{get<u16>(w.lane(lane), i, 1) != 0} << lane; });
  each_lane(mask, [&](int lane) { set<u32>(w.lane(lane), i, 0, combine(yes, mask)); });
}
joint_step find_vote(const std::string& how) {
  if (how == "all")
    return
        [](warp& w, u32 m, const instruction& i) { vote(w, m, i, [](u32 yes, u32 of) -> u32 { return yes == of; }); };
  if (how == "any")
    return [](warp& w, u32 m, const instruction& i) { vote(w, m, i, [](u32 yes, u32) -> u32 { return yes != 0; }); };
  if (how == "ballot")
    return [](warp& w, u32 m, const instruction& i) { vote(w, m, i, [](u32 yes, u32) { return yes; }); };
  return nullptr;
}

// --- products. Where a thread has which numbers: lane/device: warp_matrix.cuda.h, matrix.cuda.h.

struct small_matrix {
  float of[256][16];
};

// A thread's part of a left factor (16 x 16), from four registers.
template <bool kIsBf16>
void fragment_of(const thread& t, const instruction& i, std::size_t first, int lane, int row, small_matrix& a) {
  for (int k = 0; k < 4; ++k) {
    const u32 pair = get<u32>(t, i, first + static_cast<std::size_t>(k));
    for (int half = 0; half < 2; ++half)
      a.of[row + lane / 4 + k % 2 * 8][lane % 4 * 2 + k / 2 * 8 + half] =
          from_half(static_cast<u16>(pair >> 16 * half), kIsBf16);
  }
}

template <bool kIsBf16>
void warp_product(warp& w, u32, const instruction& i) {  // m16n8k16
  small_matrix a, b;
  for (int lane = 0; lane < 32; ++lane) {
    fragment_of<kIsBf16>(w.lane(lane), i, 4, lane, 0, a);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int k = 0; k < 2; ++k) {
      const u32 pair = get<u32>(w.lane(lane), i, static_cast<std::size_t>(8 + k));
      for (int half = 0; half < 2; ++half)
        b.of[row][column + k * 8 + half] = from_half(static_cast<u16>(pair >> 16 * half), kIsBf16);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int k = 0; k < 4; ++k) {
      const float *x = a.of[lane / 4 + k / 2 * 8], *y = b.of[lane % 4 * 2 + k % 2];
      float sum = 0;
      for (int n = 0; n < 16; ++n) sum += x[n] * y[n];
      thread& t = w.lane(lane);
      set<float>(t, i, static_cast<std::size_t>(k), get<float>(t, i, static_cast<std::size_t>(10 + k)) + sum);
    }
  }
}

// Sixteen numbers of each row of a tile that a descriptor says the place of, or, turned, of each column. It is read
// until the product is waited for.
void read_tile(warp& w, u64 descriptor, bool turned, bool is_bf16, int rows, small_matrix& to) {
  const u64 start = (descriptor & 0x3fff) << 4, next_tile = (descriptor >> 16 & 0x3fff) << 4,
            eight = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) throw std::runtime_error("a tile whose pieces are not exchanged as the copy engine does");
  block& b = *w.of;
  for (int r = 0; r < rows; ++r) {
    const auto row = static_cast<u64>(r);
    for (u64 k = 0; k < 16; ++k) {
      const u64 at = turned ? start + row / 64 * next_tile + k / 8 * eight + k % 8 * 128 + row % 64 * 2
                            : start + row / 8 * eight + row % 8 * 128 + k * 2;
      const shared_place place = place_in_shared(b, swizzled(at), 2);
      const char* from = place.to_read_by_product();
      u16 bits;
      std::memcpy(&bits, from, 2);
      to.of[r][k] = from_half(bits, is_bf16);
      if ((turned ? row : k) % 8 != 0) continue;
      const auto piece = static_cast<u32>((from - b.shared.data()) / 16);
      w.products.open.push_back(piece);
      ++b.products_reading[piece];
    }
  }
}

// All four warps take it at once, so that one of them knows by waiting that none reads its factors any more.
template <bool kIsBf16>
void group_product(warp& first, u32 mask, const instruction& i) {
  if (mask != ~0u) throw std::runtime_error("a product of threads that are not all there");
  const auto columns = static_cast<int>(i.number);
  const auto results = static_cast<std::size_t>(columns / 2);
  const bool in_registers = i.of.size() == results + 9;
  const std::size_t b_at = results + (in_registers ? 4 : 1);
  const thread& any = first.lane(0);
  const bool adds = get<u16>(any, i, b_at + 1) != 0, turns_b = get<u16>(any, i, i.of.size() - 1) != 0;
  static thread_local small_matrix a, b;
  read_tile(first, get<u64>(any, i, b_at), turns_b, kIsBf16, columns, b);
  if (!in_registers) read_tile(first, get<u64>(any, i, results), get<u16>(any, i, b_at + 4) != 0, kIsBf16, 64, a);
  for (int thread_of_group = 0; thread_of_group < 128; ++thread_of_group) {
    const int lane = thread_of_group % 32, row = thread_of_group / 32 * 16;
    thread& t = first.lane(thread_of_group);
    if (in_registers && lane == 0)
      for (int of = 0; of < 32; ++of) fragment_of<kIsBf16>(first.lane(thread_of_group + of), i, results, of, row, a);
    for (std::size_t d = 0; d < results; ++d) {
      const float *x = a.of[row + lane / 4 + static_cast<int>(d) / 2 % 2 * 8],
                  *y = b.of[d / 4 * 8 + lane % 4 * 2 + d % 2];
      float sum = adds ? get<float>(t, i, d) : 0.0f;
      for (int n = 0; n < 16; ++n) sum += x[n] * y[n];
      set<float>(t, i, d, sum);
    }
  }
}

void close_products(warp& first, u32, const instruction&) {
  first.products.closed.push_back(std::move(first.products.open));
  first.products.open.clear();
}
void wait_for_products(warp& w, u32, const instruction& i) {
  auto& closed = w.of->warps[static_cast<std::size_t>(w.first / 128 * 4)].products.closed;
  for (const auto pending = get<u32>(w.lane(0), i, 0); closed.size() > pending; closed.pop_front())
    for (const u32 piece : closed.front()) --w.of->products_reading[piece];
}

joint_step find_group_product(const parts& of, instruction& i) {
  if (of[1] == "fence") return [](warp&, u32, const instruction&) {};
  i.of_four_warps = of[1] == "commit_group" || of[1] == "mma_async";
  if (of[1] == "commit_group") return close_products;
  if (of[1] == "wait_group") return wait_for_products;
  if (of[1] != "mma_async") return nullptr;
  const std::string& shape = of[4];  // m64n128k16
  i.number = std::stoi(shape.substr(shape.find('n') + 1));
  return of.back() == "bf16" ? group_product<true> : group_product<false>;
}

// Four matrices of 8 x 8; a thread has two neighbours of a row of each.
template <bool kStores, bool kTurns>
void move_matrices(warp& w, u32, const instruction& i) {
  const std::size_t count = i.of.size() - 1, at = kStores ? 0 : count, first = kStores ? 1 : 0;
  for (int lane = 0; lane < 32; ++lane) {
    for (std::size_t m = 0; m < count; ++m) {
      u32 pair = kStores ? get<u32>(w.lane(lane), i, first + m) : 0;
      for (int half = 0; half < 2; ++half) {
        const int row = kTurns ? lane % 4 * 2 + half : lane / 4, column = kTurns ? lane / 4 : lane % 4 * 2 + half;
        const u64 begin = address(w.lane(static_cast<int>(m) * 8 + row), i, at);
        if (begin % 16 != 0) throw std::runtime_error("a matrix's row that is not aligned");
        const shared_place place = place_in_shared(*w.of, begin + static_cast<u64>(column) * 2, 2);
        u16 bits = static_cast<u16>(pair >> 16 * half);
        if (kStores) std::memcpy(place.to_write(w.lane(lane)), &bits, 2);
        else std::memcpy(&bits, place.to_read(w.lane(lane)), 2), pair |= u32{bits} << 16 * half;
      }
      if (!kStores) set<u32>(w.lane(lane), i, first + m, pair);
    }
  }
}

joint_step find_together(const parts& of, instruction& i) {
  if (of[0] == "shfl") return i.mask = static_cast<int>(i.of.size()) - 1, find_shuffle(of[2]);
  if (of[0] == "vote") return i.mask = static_cast<int>(i.of.size()) - 1, find_vote(of[2]);
  if (of[0] == "bar" && of[1] == "warp") return i.mask = 0, [](warp&, u32, const instruction&) {};
  if (of[0] == "mma" && of[3] == "m16n8k16")
    return of.back() == "f32" && of[7] == "bf16" ? warp_product<true> : warp_product<false>;
  if (of[0] == "wgmma") return find_group_product(of, i);
  const bool turns = has(of, "trans");
  if (of[0] == "stmatrix") return turns ? move_matrices<true, true> : move_matrices<true, false>;
  if (of[0] == "ldmatrix") return turns ? move_matrices<false, true> : move_matrices<false, false>;
  return nullptr;
}

// --- the threads of a block

void arrive_at_barrier(thread& t, const instruction& i, bool waits) {
  block& b = block_of(t);
  const auto number = get<u32>(t, i, 0);
  const int count = i.of.size() > 1 ? get<int>(t, i, 1) : static_cast<int>(b.threads.size());
  if (number > 15) throw std::runtime_error("barrier " + std::to_string(number));
  int& arrived = b.arrived[number];
  if (waits) t.is = state::at_barrier, t.barrier = static_cast<int>(number);
  if (++arrived < count) return;
  arrived = 0;
  ++b.of->progress;
  for (thread& other : b.threads)
    if (other.is == state::at_barrier && other.barrier == static_cast<int>(number)) other.is = state::runs;
}

}  // namespace

bool find_joint(const parts& of, instruction& i) {
  if (of[0] == "bar" || (of[0] == "barrier" && of[1] != "cluster")) {
    if (of[1] == "sync") return i.run = [](thread& t, const instruction& c) { arrive_at_barrier(t, c, true); }, true;
    if (of[1] == "arrive") return i.run = [](thread& t, const instruction& c) { arrive_at_barrier(t, c, false); }, true;
  }
  return (i.run_together = find_together(of, i)) != nullptr;
}

}  // namespace onepass::emulator
