// Rows whose numbers a thread's registers have no room for: others are tried, once for each kernel.
#include "src/cuda/row/spills.h"

#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace onepass::cuda {
namespace {

// Of a thread, that cost little: 24 bytes nothing in forward of 11008 columns, a quarter of backward's time of 10240.
constexpr int few_bytes(const request& r) { return r.backward ? 8 : 32; }
constexpr int kManyBytes = 64;         // fewer cost less than lanes without numbers: an eighth at most may be more
constexpr int kManyFlops = 8;          // of an element of 16 bits
constexpr std::size_t kMostTried = 6;  // kernels, the table's among them: each takes a second to compile

// A light line's registers are known: the table was measured with such.
bool may_spill(const request& r, const std::vector<plan>& plans) {
  const configuration& c = plans.front().with;
  if (plans.size() != 1 || !r.rowwise || c.of != part::whole || c.members > 0 || r.x == dtype::f64) return false;
  return r.flops * 2 >= kManyFlops * size_of(r.x) || r.row_words > 1 || std::popcount(r.wants_column) > 1;
}

int64 lanes_of(const plan& p) {
  const configuration& c = p.with;
  return int64{c.across} * c.cluster * c.held_vectors * c.vector_size;
}

// By the table's kernel, the row's length and the blocks of a cluster: which of the others is taken, or none.
class decisions {
 public:
  using key = std::tuple<const kernel*, int64, int>;

  std::optional<int> find(const key& of) {
    const std::shared_lock lock(mutex_);
    const auto found = known_.find(of);
    return found == known_.end() ? std::nullopt : std::optional<int>(found->second);
  }
  void keep(const key& of, int taken) {
    const std::unique_lock lock(mutex_);
    known_.emplace(of, taken);
  }

 private:
  std::shared_mutex mutex_;
  std::map<key, int> known_;
};

decisions& known() {
  static auto* const all = new decisions;  // threads may run at the very end
  return *all;
}

constexpr int kTables = -1;

}  // namespace

std::vector<plan> without_spills(const request& r, const arguments& a, const device_facts& chip,
                                 const configuration& described, std::vector<plan> of_table,
                                 const std::function<const kernel&(const plan&)>& kernel_of) {
  if (!may_spill(r, of_table)) return of_table;
  // Null where it cannot be built: the call may do without.
  const auto built = [&](const plan& p) -> const kernel* {
    try {
      return &kernel_of(p);
    } catch (const std::runtime_error&) {
      return nullptr;
    }
  };
  const plan usual = usual_form(r, a, of_table.front());
  const kernel* const tables = built(usual);
  if (tables == nullptr) return of_table;
  const configuration& own = of_table.front().with;
  if (std::memcmp(&own, &usual.with, sizeof own) == 0) of_table.front().built = tables;
  if (tables->spilled <= few_bytes(r)) return of_table;
  const decisions::key key(tables, a.columns, chip.cluster);
  std::optional<int> taken = known().find(key);
  if (taken == kTables) return of_table;
  const std::vector<plan> others = other_rows(r, a, chip, described);
  if (!taken) {
    taken = kTables;
    int least = tables->spilled;
    const bool few_lanes = tables->spilled < kManyBytes;
    std::set<const kernel*> tried{tables};
    for (std::size_t i = 0; i < others.size() && least > few_bytes(r) && tried.size() < kMostTried; ++i) {
      if (few_lanes && lanes_of(others[i]) * 8 > lanes_of(of_table.front()) * 9) continue;
      const kernel* const other = built(usual_form(r, a, others[i]));
      tried.insert(other);
      if (other != nullptr && other->spilled < least) least = other->spilled, taken = static_cast<int>(i);
    }
    known().keep(key, *taken);
  }
  if (*taken == kTables || *taken >= static_cast<int>(others.size())) return of_table;
  return {others[static_cast<std::size_t>(*taken)]};
}

}  // namespace onepass::cuda
