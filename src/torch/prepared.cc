// Lines that have been parsed, by text, for the whole process.
#include "src/torch/prepared.h"

#include <algorithm>
#include <iterator>

#include "src/cpu/run.h"

namespace onepass::binding {

namespace {

// Which of the results is keep k's value; -1: none.
int result_of(int kept) { return kept < 0 ? -1 : 1 + kept; }

std::uint64_t bits_of(const std::vector<bool>& flags) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) bits |= std::uint64_t{flags[i]} << i;
  return bits;
}

line_facts facts_of(const prepared_line& of) {
  const spec::reads& reads = of.reads;
  line_facts facts{};
  facts.line = &of;
  facts.operands = of.line.operands;
  facts.resumes_from = reads.result ? 0 : result_of(reads.kept);
  facts.rowwise = of.line.rowwise();
  facts.reads_x = reads.x;
  facts.reads_statistics = reads.statistics;
  facts.reads_operands = bits_of(reads.operands);
  for (int i = 0; i < of.line.operands; ++i)
    facts.row_operands |= std::uint64_t{of.line.operand_word(i).about->operand == operand_kind::tensor} << i;
  facts.weight = of.contraction ? of.contraction->parts.weight : of.attention ? 0 : -1;
  facts.scores = of.line.scores();
  facts.values = of.attention != nullptr;
  facts.keeps_before = of.contraction ? of.contraction->parts.before.keeps : 0;
  facts.resumes_behind = reads.result_behind ? 0 : result_of(reads.kept_behind);
  facts.reads_product = reads.product;
  facts.x_for_weight = reads.x_for_weight;
  facts.operands_for_weight = bits_of(reads.operands_for_weight);
  return facts;
}

}  // namespace

prepared_line::prepared_line(spec::line of)
    : line(std::move(of)),
      reads(spec::backward_reads(line)),
      reads_again(spec::backward_reads(line, true)),
      contraction(line.linear >= 0 && line.values < 0 ? std::make_unique<const prepared_contraction>(line) : nullptr),
      attention(line.values >= 0 ? std::make_unique<const prepared_attention>(line) : nullptr),
      facts(facts_of(*this)) {}

prepared_line::~prepared_line() = default;

prepared_contraction::prepared_contraction(const spec::line& of)
    : parts(of), before(parts.before), again(parts.again), behind(parts.behind), behind_keeping(parts.behind_keeping) {}

const prepared_line& prepared_contraction::with_features(int features) const {
  const std::lock_guard lock(mutex_);
  auto& line = with_features_[features];
  if (!line) line = std::make_unique<const prepared_line>(spec::with_features(parts.before, features));
  return *line;
}

prepared_attention::prepared_attention(const spec::line& of) : parts(of), scores(parts.scores) {}

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

void prepared_line::prepare_on_cpu(std::uint64_t boolean_masks) const {
  if (attention) return attention->scores.prepare_on_cpu(boolean_masks);
  if (!contraction) {
    if (!line.words.empty()) cpu(boolean_masks);
    return;
  }
  const prepared_contraction& c = *contraction;
  const std::uint64_t before = boolean_masks & ((std::uint64_t{1} << c.parts.weight) - 1);
  c.before.prepare_on_cpu(before);
  c.again.prepare_on_cpu(before >> (c.parts.weight - c.again.line.operands));
  c.behind.prepare_on_cpu(boolean_masks >> (c.parts.weight + 1));
}

const std::string& prepared_line::type_text(std::uint64_t boolean_masks, bool backward) const {
  const variant& v = variant_for(boolean_masks);
  return backward ? v.backward : v.forward;
}

namespace {

struct known_lines {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<prepared_line>> lines;
  std::vector<std::unique_ptr<prepared_line>> forgotten;  // somebody may still be running them
};
known_lines& known() {
  static known_lines one;
  return one;
}

}  // namespace

const prepared_line& prepared(const std::string& text) {
  known_lines& all = known();
  {
    const std::shared_lock lock(all.mutex);
    if (const auto found = all.lines.find(text); found != all.lines.end()) return *found->second;
  }
  auto parsed = std::make_unique<prepared_line>(spec::parse(text));
  const std::unique_lock lock(all.mutex);
  return *all.lines.try_emplace(text, std::move(parsed)).first->second;
}

void forget_lines_with(const descriptor* about) {
  known_lines& all = known();
  const std::unique_lock lock(all.mutex);
  for (auto at = all.lines.begin(); at != all.lines.end();) {
    const std::vector<spec::word>& words = at->second->line.words;
    const bool has = std::any_of(words.begin(), words.end(),
                                 [about](const spec::word& w) { return w.about == about || w.activation == about; });
    if (has) all.forgotten.push_back(std::move(at->second));
    at = has ? all.lines.erase(at) : std::next(at);
  }
}

}  // namespace onepass::binding
