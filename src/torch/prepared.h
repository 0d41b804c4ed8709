// Lines that have been parsed, by text, for the whole process.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "onepass/skeleton/cpu_kernels.h"
#include "src/spec/plan.h"

namespace onepass::binding {

class prepared_line {
 public:
  explicit prepared_line(const std::string& text);

  const spec::line line;
  const spec::reads reads;
  const line_facts facts;

  const cpu_kernels& cpu(std::uint64_t boolean_masks) const;
  const std::string& type_text(std::uint64_t boolean_masks, bool backward) const;

 private:
  struct variant {
    std::uint64_t boolean_masks;
    std::string forward, backward;
    const cpu_kernels* kernels;
  };
  variant& variant_for(std::uint64_t boolean_masks) const;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<variant>> variants_;  // few: one for each choice of boolean and additive masks
};

// Parsed at first sight; the reference stays valid. Throws spec::line_error.
const prepared_line& prepared(const std::string& text);

}  // namespace onepass::binding
