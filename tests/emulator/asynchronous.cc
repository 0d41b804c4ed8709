// Copies that arrive later, and mailboxes that tell of it; barriers of clusters.

#include "tests/emulator/machine.h"
#include "tests/emulator/tensor_map.h"

namespace onepass::emulator {
namespace {

// Of whichever block of the cluster the address is in.
char* place(thread& t, u64 address, std::size_t bytes) { return shared(block_of(t), address, bytes); }

void arrive(thread& t, u64 box, std::int64_t bytes) { change_mailbox(grid_of(t), place(t, box, 8), 1, bytes); }

bool has_ended(thread& t, u64 box, u32 parity) {
  mailbox m;
  std::memcpy(&m, place(t, box, 8), 8);
  return m.phase != (parity & 1);
}

// cp.async: bytes, of which only some come and the rest is 0.
void copy(thread& t, u64 to, u64 from, std::size_t bytes, std::size_t present) {
  const shared_place target = place_in_shared(block_of(t), to, bytes);
  const char* source = present > 0 ? global(from, present, false) : nullptr;
  if (to % bytes != 0 || (present > 0 && from % bytes != 0)) throw std::runtime_error("a copy that is not aligned");
  t.copies.open.push_back([=, &t] {  // to TMA a thread's own write
    std::memset(target.to_write(t), 0, bytes);
    if (present > 0) std::memcpy(target.at, source, present);
  });
}

step find_copy(const parts& of, instruction& i) {
  if (of[2] == "wait_group") return [](thread& t, const instruction& c) { t.copies.finish_but(get<u32>(t, c, 0)); };
  if (of[2] == "commit_group") return [](thread& t, const instruction&) { t.copies.close(); };
  if (of[2] == "wait_all") return [](thread& t, const instruction&) { t.copies.close(), t.copies.finish_but(0); };
  if (i.of.size() == 4)
    return [](thread& t, const instruction& c) {
      copy(t, address(t, c, 0), address(t, c, 1), get<u32>(t, c, 2), get<u32>(t, c, 3));
    };
  return [](thread& t, const instruction& c) {
    copy(t, address(t, c, 0), address(t, c, 1), get<u32>(t, c, 2), get<u32>(t, c, 2));
  };
}

// cp.async.bulk.tensor: the map's tile into the blocks at the same place, and their boxes hear of it.
template <int kRank>
void bring_tile(thread& t, const instruction& i) {
  const tensor_map map = tensor_map::at(address(t, i, 1));
  std::array<std::int64_t, 5> first{};
  for (std::size_t k = 0; k < kRank; ++k) first[k] = get<std::int32_t>(t, i, 2 + k);
  const u64 to = address(t, i, 0), box = address(t, i, 2 + kRank);
  if (to % 128 != 0) throw std::runtime_error("a tile's place that is no multiple of 128");
  block& own = block_of(t);
  const bool many = i.of.size() > 3 + kRank;
  const u32 blocks = many ? get<u32>(t, i, 3 + kRank) : 0;
  grid& all = grid_of(t);
  for (int rank = 0; rank < 16; ++rank) {
    if (many ? (blocks >> rank & 1) == 0 : rank > 0) continue;
    const u64 in = many ? u64(rank + 1) << kRankShift : 0;
    const shared_place target = place_in_shared(own, in | to, map.bytes());
    char* const told = shared(own, in | box, 8);
    all.send([=, &all] {
      map.bring(first, target.to_write_by_copy(), to & ((1u << kRankShift) - 1), [&](const char* from) {
        if (all.unseen.contains(reinterpret_cast<u64>(from) / 16))
          throw std::runtime_error("emulator: a copy reads what a thread wrote before fence.proxy.async");
      });
      change_mailbox(all, told, 0, -static_cast<std::int64_t>(map.bytes()));
    });
  }
}

void store_tile(thread& t, const instruction& i) {
  const tensor_map map = tensor_map::at(address(t, i, 0));
  const std::array<std::int64_t, 5> first{get<std::int32_t>(t, i, 1), get<std::int32_t>(t, i, 2)};
  const u64 from = address(t, i, 3);
  const shared_place source = place_in_shared(block_of(t), from, map.bytes());
  t.stores.open.push_back([=] { map.store(first, source.to_read_by_product(), from); });
}

// From global memory, or from the block's own.
template <bool kFromShared>
void bring_bytes(thread& t, const instruction& i) {
  const u64 to = address(t, i, 0), from = address(t, i, 1);
  const auto count = get<u32>(t, i, 2);
  if ((to | from | count) % 16 != 0) throw std::runtime_error("a copy of bytes that are no multiple of 16");
  const shared_place target = place_in_shared(block_of(t), to, count);
  char* told = place(t, address(t, i, 3), 8);
  const shared_place own = kFromShared ? place_in_shared(block_of(t), from, count) : shared_place{};
  const char* source = kFromShared ? nullptr : global(from, count, false);
  grid_of(t).send([=, &all = grid_of(t)] {
    std::memcpy(target.to_write_by_copy(), kFromShared ? own.to_read_by_product() : source, count);
    change_mailbox(all, told, 0, -static_cast<std::int64_t>(count));
  });
}

step find_bulk(const parts& of) {
  if (of[3] == "commit_group") return [](thread& t, const instruction&) { t.stores.close(); };
  if (of[3] == "wait_group") return [](thread& t, const instruction& c) { t.stores.finish_but(get<u32>(t, c, 0)); };
  if (of[3] != "tensor") return of[4] == "global" ? bring_bytes<false> : bring_bytes<true>;
  if (of[5] == "global") return of[4] == "2d" ? store_tile : nullptr;
  return of[4] == "2d" ? bring_tile<2> : of[4] == "5d" ? bring_tile<5> : nullptr;
}

template <class T>
void mail(thread& t, const instruction& i) {
  const std::size_t count = i.of.size() - 2;
  std::array<T, 4> values{};
  for (std::size_t k = 0; k < count; ++k) values[k] = get<T>(t, i, 1 + k);
  const shared_place target = place_in_shared(block_of(t), address(t, i, 0), count * sizeof(T));
  char* told = place(t, address(t, i, 1 + count), 8);
  grid_of(t).send([=, &all = grid_of(t)] {
    std::memcpy(target.to_write(), values.data(), count * sizeof(T));
    change_mailbox(all, told, 0, -static_cast<std::int64_t>(count * sizeof(T)));
  });
}

step find_mailbox(const parts& of) {
  if (of[1] == "init")
    return [](thread& t, const instruction& c) {
      const auto count = get<u32>(t, c, 1);
      mailbox m{};
      m.arrivals = count & 0x7fff, m.missing = count & 0xffff;
      std::memcpy(place(t, address(t, c, 0), 8), &m, 8);
    };
  if (of[1] == "arrive" && of[2] == "expect_tx")
    return [](thread& t, const instruction& c) { arrive(t, address(t, c, 1), get<u32>(t, c, 2)); };
  if (of[1] == "arrive") return [](thread& t, const instruction& c) { arrive(t, address(t, c, 1), 0); };
  if (of[1] == "try_wait" || of[1] == "test_wait") {
    return [](thread& t, const instruction& c) {
      const bool ended = has_ended(t, address(t, c, 1), get<u32>(t, c, 2));
      set<std::uint16_t>(t, c, 0, ended);
      if (!ended) t.is = state::looks_again;
    };
  }
  return nullptr;
}

// Threads of a cluster: barrier.cluster.arrive, and wait, which is tried again until all have arrived.
step find_cluster_barrier(const parts& of) {
  if (of[2] == "arrive")
    return [](thread& t, const instruction&) {
      block& b = block_of(t);
      grid& all = *b.of;
      cluster_barrier& c = all.clusters[static_cast<std::size_t>(b.cluster)];
      t.cluster_phase = c.phase;
      if (++c.arrived == static_cast<int>(b.threads.size() * all.of->cluster)) ++c.phase, c.arrived = 0, ++all.progress;
    };
  return [](thread& t, const instruction&) {
    const block& b = block_of(t);
    if (b.of->clusters[static_cast<std::size_t>(b.cluster)].phase == t.cluster_phase) --t.at, t.is = state::looks_again;
  };
}

step find(const parts& of, instruction& i) {
  if (of[0] == "cp" && of[1] == "async") return of.size() > 2 && of[2] == "bulk" ? find_bulk(of) : find_copy(of, i);
  if (of[0] == "st" && of[1] == "async") return of.back() == "b64" ? mail<u64> : mail<u32>;
  if (of[0] == "mbarrier") return find_mailbox(of);
  if (of[0] == "barrier" && of[1] == "cluster") return find_cluster_barrier(of);
  if (of[0] == "mapa")
    return [](thread& t, const instruction& c) {
      set<u32>(t, c, 0, (get<u32>(t, c, 2) + 1) << kRankShift | get<u32>(t, c, 1));
    };
  if (of[0] == "griddepcontrol" || of[0] == "setmaxnreg") return [](thread&, const instruction&) {};
  return nullptr;
}

}  // namespace

bool find_asynchronous(const parts& of, instruction& i) { return (i.run = find(of, i)) != nullptr; }

void copy_groups::close() { closed.push_back(std::move(open)), open.clear(); }
void copy_groups::finish_but(std::size_t pending) {
  for (; closed.size() > pending; closed.pop_front())
    for (const auto& copy : closed.front()) copy();
}

void change_mailbox(grid& all, char* at, int arrivals, std::int64_t bytes) {
  mailbox m;
  std::memcpy(&m, at, 8);
  if (m.arrivals == 0) throw std::runtime_error("a mailbox that is not open");
  if (static_cast<int>(m.missing) < arrivals) throw std::runtime_error("more arrive at a mailbox than it waits for");
  m.missing = (m.missing - static_cast<unsigned>(arrivals)) & 0xffff;
  m.bytes = m.bytes + bytes;
  if (m.missing == 0 && m.bytes == 0) m.phase ^= 1, m.missing = m.arrivals, ++all.progress;
  std::memcpy(at, &m, 8);
}

}  // namespace onepass::emulator
