#include "src/cpu/page_pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <mutex>
#include <unordered_map>

namespace onepass::cpu {
namespace {

struct block {
  void* start;
  std::size_t bytes;
};

std::size_t most_kept() {
  if (const char* given = std::getenv("ONEPASS_CPU_KEEP_MB")) return std::strtoull(given, nullptr, 10) << 20;
  const auto memory =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory / 16, std::size_t{1} << 30);
}

struct pool {
  std::mutex mutex;
  std::list<block> kept;  // those given back first are in front
  std::unordered_map<void*, std::size_t> in_use;
  std::size_t kept_bytes = 0;
  const std::size_t most = most_kept();
};

// Never destroyed: a tensor may outlive this library's statics. A fork finds it unlocked.
pool& the_pool() {
  static pool* const only = [] {
    pthread_atfork([] { the_pool().mutex.lock(); }, [] { the_pool().mutex.unlock(); },
                   [] { the_pool().mutex.unlock(); });
    return new pool;
  }();
  return *only;
}

// Whole huge pages, aligned: a mapping with room to cut off what lies before and behind.
void* map_pages(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(mapped) % kHugePage;
  char* start = static_cast<char*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(start + bytes, kHugePage - before);
  madvise(start, bytes, MADV_HUGEPAGE);
  return start;
}

// The oldest go until no more than `most` bytes are left. Unmapped by the caller, without the lock.
std::list<block> take_out(pool& p, std::size_t most) {
  std::list<block> out;
  while (p.kept_bytes > most) {
    p.kept_bytes -= p.kept.front().bytes;
    out.splice(out.end(), p.kept, p.kept.begin());
  }
  return out;
}

void unmap(const std::list<block>& blocks) {
  for (const block& b : blocks) munmap(b.start, b.bytes);
}

}  // namespace

void* take_pages(std::size_t bytes) {
  const std::size_t wanted = (std::max(bytes, std::size_t{1}) + kHugePage - 1) / kHugePage * kHugePage;
  pool& p = the_pool();
  {
    const std::lock_guard lock(p.mutex);
    auto best = p.kept.end();  // the smallest that has room, and wastes no more than an eighth; of those the last
    for (auto at = p.kept.begin(); at != p.kept.end(); ++at) {
      const bool fits = at->bytes >= wanted && at->bytes <= wanted + wanted / 8;
      if (fits && (best == p.kept.end() || at->bytes <= best->bytes)) best = at;
    }
    if (best != p.kept.end()) {
      const block found = *best;
      p.kept.erase(best);
      p.kept_bytes -= found.bytes;
      p.in_use.emplace(found.start, found.bytes);
      return found.start;
    }
  }
  void* start = map_pages(wanted);
  if (start == nullptr) {
    release_pages();
    start = map_pages(wanted);
  }
  if (start == nullptr) return nullptr;
  const std::lock_guard lock(p.mutex);
  p.in_use.emplace(start, wanted);
  return start;
}

void give_pages(void* pages) {
  pool& p = the_pool();
  std::list<block> gone;
  {
    const std::lock_guard lock(p.mutex);
    const auto found = p.in_use.find(pages);
    p.kept.push_back({pages, found->second});
    p.kept_bytes += found->second;
    p.in_use.erase(found);
    gone = take_out(p, p.most);
  }
  unmap(gone);
}

std::size_t pages_kept() {
  pool& p = the_pool();
  const std::lock_guard lock(p.mutex);
  return p.kept_bytes;
}

void release_pages() {
  pool& p = the_pool();
  std::list<block> gone;
  {
    const std::lock_guard lock(p.mutex);
    gone = take_out(p, 0);
  }
  unmap(gone);
}

}  // namespace onepass::cpu
