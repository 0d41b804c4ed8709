// What is kept by text, up to a number: the least recently used goes first. Whoever holds a value keeps it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace onepass {

// For several threads at once.
template <class Value>
class recently_used {
 public:
  explicit recently_used(std::size_t most) : most_(most) {}

  std::shared_ptr<Value> find(const std::string& text) const {
    const std::shared_lock lock(mutex_);
    const auto found = kept_.find(text);
    if (found == kept_.end()) return nullptr;
    touch(found->second);
    return found->second.value;
  }

  // Gives what is there already, where another thread was first.
  std::shared_ptr<Value> keep(const std::string& text, std::shared_ptr<Value> value) {
    std::shared_ptr<Value> last;  // destroyed without the lock
    const std::unique_lock lock(mutex_);
    const auto [at, is_new] = kept_.try_emplace(text, std::move(value));
    const std::shared_ptr<Value> kept = at->second.value;
    if (is_new) ++uses_;
    touch(at->second);
    if (kept_.size() > most_) {
      const auto oldest = std::min_element(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) {
        return a.second.used.load(std::memory_order_relaxed) < b.second.used.load(std::memory_order_relaxed);
      });
      last = std::move(oldest->second.value);
      kept_.erase(oldest);
    }
    return kept;
  }

  template <class Which>
  void forget(const Which& which) {
    const std::unique_lock lock(mutex_);
    std::erase_if(kept_, [&](const auto& entry) { return which(*entry.second.value); });
  }

  std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return kept_.size();
  }

 private:
  struct entry {
    explicit entry(std::shared_ptr<Value> v) : value(std::move(v)) {}
    std::shared_ptr<Value> value;
    mutable std::atomic<std::uint64_t> used{0};
  };

  // Time is counted in values that came: threads that use what is there write nothing that they share.
  void touch(const entry& e) const {
    const std::uint64_t now = uses_;
    if (e.used.load(std::memory_order_relaxed) != now) e.used.store(now, std::memory_order_relaxed);
  }

  const std::size_t most_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, entry> kept_;
  std::uint64_t uses_ = 0;  // written under the lock
};

}  // namespace onepass
