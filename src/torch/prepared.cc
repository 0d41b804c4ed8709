// Lines that have been parsed, by text, for the whole process.
#include "src/torch/prepared.h"

#include "src/cpu/run.h"

namespace onepass::binding {

namespace {

line_facts facts_of(const spec::line& line, const spec::reads& reads) {
  line_facts facts{};
  facts.line = &line;
  facts.operands = line.operands;
  facts.resumes_from = reads.result ? 0 : reads.kept >= 0 ? 1 + reads.kept : -1;
  facts.rowwise = line.rowwise();
  facts.reads_x = reads.x;
  facts.reads_statistics = reads.statistics;
  for (std::size_t i = 0; i < reads.operands.size(); ++i) {
    facts.reads_operands |= std::uint64_t{reads.operands[i]} << i;
  }
  return facts;
}

}  // namespace

prepared_line::prepared_line(const std::string& text)
    : line(spec::parse(text)), reads(spec::backward_reads(line)), facts(facts_of(line, reads)) {}

prepared_line::variant& prepared_line::variant_for(std::uint64_t boolean_masks) const {
  const std::lock_guard lock(mutex_);
  for (const auto& v : variants_) {
    if (v->boolean_masks == boolean_masks) return *v;
  }
  variants_.push_back(std::make_unique<variant>(variant{boolean_masks, spec::type_text(line, boolean_masks, false),
                                                        spec::type_text(line, boolean_masks, true), nullptr}));
  return *variants_.back();
}

const cpu_kernels& prepared_line::cpu(std::uint64_t boolean_masks) const {
  variant& v = variant_for(boolean_masks);
  {
    const std::lock_guard lock(mutex_);
    if (v.kernels) return *v.kernels;
  }
  const cpu_kernels& kernels = cpu::kernels_for(line, boolean_masks);  // may compile: not under the lock
  const std::lock_guard lock(mutex_);
  v.kernels = &kernels;
  return kernels;
}

const std::string& prepared_line::type_text(std::uint64_t boolean_masks, bool backward) const {
  const variant& v = variant_for(boolean_masks);
  return backward ? v.backward : v.forward;
}

const prepared_line& prepared(const std::string& text) {
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<prepared_line>> lines;
  {
    const std::shared_lock lock(mutex);
    if (const auto found = lines.find(text); found != lines.end()) return *found->second;
  }
  auto parsed = std::make_unique<prepared_line>(text);
  const std::unique_lock lock(mutex);
  return *lines.try_emplace(text, std::move(parsed)).first->second;
}

}  // namespace onepass::binding
