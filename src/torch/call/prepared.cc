// Lines that have been parsed, by text, for the whole process.
#include "src/torch/call/prepared.h"

#include <algorithm>
#include <utility>

#include "src/cpu/row/run.h"
#include "src/cache/recently_used.h"

namespace onepass::binding {

namespace {

// Which of the results is keep k's value; -1: none.
int result_of(int kept) { return kept < 0 ? -1 : 1 + kept; }

std::uint64_t bits_of(const std::vector<bool>& flags) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) bits |= std::uint64_t{flags[i]} << i;
  return bits;
}

line_signature signature_of(const prepared_line& of) {
  const spec::reads& reads = of.reads;
  line_signature signature{};
  signature.line = &of;
  signature.operands = of.line.operands;
  signature.resumes_from = reads.result ? 0 : result_of(reads.kept);
  signature.rowwise = of.line.rowwise();
  signature.numbers = of.line.numbers();
  signature.scales = of.line.results_that([](auto r) { return r.shape == spec::result_shape::scale; });
  signature.group = of.line.group();
  signature.not_differentiable = of.line.results_that([](auto r) { return !r.is_differentiable(); });
  for (int i = 0; i < of.line.results(); ++i) signature.own_dtypes[i] = static_cast<std::int8_t>(of.line.result(i).own);
  signature.reads_x = reads.x;
  signature.reads_statistics = reads.statistics;
  signature.reads_operands = bits_of(reads.operands);
  for (int i = 0; i < of.line.operands; ++i) {
    const spec::word& word = of.line.operand_word(i);
    signature.row_operands |= std::uint64_t{word.about->operand == operand_kind::tensor} << i;
    signature.channel_operands |= std::uint64_t{word.about->by_channels} << i;
    for (const spec::word* before = of.line.words.data(); before != &word; ++before)
      signature.keeps_before_operand[i] += before->about->kind == word_kind::keep;
  }
  signature.weight = of.contraction ? of.contraction->parts.weight : of.attention ? 0 : -1;
  signature.scores = of.line.scores();
  signature.values = of.attention != nullptr;
  signature.keeps_before = of.contraction ? of.contraction->parts.before.keeps : 0;
  signature.resumes_behind = reads.result_behind ? 0 : result_of(reads.kept_behind);
  signature.reads_product = reads.product;
  signature.x_for_weight = reads.x_for_weight;
  signature.operands_for_weight = bits_of(reads.operands_for_weight);
  return signature;
}

}  // namespace

prepared_line::prepared_line(spec::line of, const prepared_line* whole)
    : line(std::move(of)),
      whole_(whole),
      reads(spec::backward_reads(line)),
      reads_recomputing(spec::backward_reads(line, true)),
      contraction(line.linear >= 0 && line.values < 0 ? std::make_unique<const prepared_contraction>(line) : nullptr),
      attention(line.values >= 0 ? std::make_unique<const prepared_attention>(line) : nullptr),
      signature(signature_of(*this)),
      differentiable(line.gives_codes() ? std::make_unique<const prepared_line>(spec::differentiable_part(line), this)
                                        : nullptr) {}

prepared_line::~prepared_line() = default;

prepared_contraction::prepared_contraction(const spec::line& of)
    : parts(of),
      before(parts.before),
      recompute(parts.recompute),
      behind(parts.behind),
      behind_keeping(parts.behind_keeping) {}

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
  variants_.push_back(std::make_unique<variant>(variant{
      boolean_masks, spec::type_text(line, boolean_masks, false), spec::type_text(line, boolean_masks, true), {}}));
  return *variants_.back();
}

namespace {

std::size_t place_of(dtype x) { return is_floating(x) ? static_cast<std::size_t>(x) : 0; }

}  // namespace

const cpu_kernels& prepared_line::cpu(std::uint64_t boolean_masks, dtype x) const {
  if (whole_ != nullptr) return whole_->cpu(boolean_masks, x);
  std::shared_ptr<const cpu_kernels>& own = variant_for(boolean_masks).kernels[place_of(x)];
  {
    const std::lock_guard lock(mutex_);
    if (own) return *own;
  }
  std::shared_ptr<const cpu_kernels> kernels =
      cpu::kernels_for(line, boolean_masks, x);  // may compile: not under the lock
  const std::lock_guard lock(mutex_);
  if (!own) own = std::move(kernels);  // what another thread has of it may not go
  return *own;
}

template <class Does>
bool prepared_line::each_part(std::uint64_t boolean_masks, const Does& does) const {
  if (attention) return attention->scores.each_part(boolean_masks, does);
  if (!contraction) return line.words.empty() || does(*this, boolean_masks);
  const prepared_contraction& c = *contraction;
  const std::uint64_t before = boolean_masks & ((std::uint64_t{1} << c.parts.weight) - 1);
  return c.before.each_part(before, does) &&
         c.recompute.each_part(before >> (c.parts.weight - c.recompute.line.operands), does) &&
         c.behind.each_part(boolean_masks >> (c.parts.weight + 1), does);
}

void prepared_line::prepare_on_cpu(std::uint64_t boolean_masks, dtype x) const {
  each_part(boolean_masks, [x](const prepared_line& part, std::uint64_t masks) {
    part.cpu(masks, x);
    return true;
  });
}

bool prepared_line::is_ready_on_cpu(std::uint64_t boolean_masks, dtype x) const {
  const unsigned bit = 1u << static_cast<unsigned>(x);
  if (boolean_masks == 0 && (ready_.load(std::memory_order_relaxed) & bit) != 0) return true;
  const bool ready = each_part(boolean_masks, [x](const prepared_line& part, std::uint64_t masks) {
    std::shared_ptr<const cpu_kernels>& own = part.variant_for(masks).kernels[place_of(x)];
    {
      const std::lock_guard lock(part.mutex_);
      if (own) return true;
    }
    std::shared_ptr<const cpu_kernels> kernels = cpu::find_kernels(part.line, masks, x);
    const std::lock_guard lock(part.mutex_);
    if (!own) own = std::move(kernels);
    return own != nullptr;
  });
  if (ready && boolean_masks == 0) ready_.fetch_or(bit, std::memory_order_relaxed);
  return ready;
}

const std::string& prepared_line::type_text(std::uint64_t boolean_masks, bool backward) const {
  const variant& v = variant_for(boolean_masks);
  return backward ? v.backward : v.forward;
}

namespace {

constexpr std::size_t kMostLines = 1024;  // some 3 KB each

recently_used<const prepared_line>& known() {
  static auto* const all = new recently_used<const prepared_line>(kMostLines);  // threads may run at the very end
  return *all;
}

}  // namespace

std::shared_ptr<const prepared_line> prepared(const std::string& text) {
  if (std::shared_ptr<const prepared_line> found = known().find(text)) return found;
  return known().keep(text, std::make_shared<const prepared_line>(spec::parse(text)));
}

void forget_lines_with(const descriptor* about) {
  known().forget([about](const prepared_line& of) {
    return std::any_of(of.line.words.begin(), of.line.words.end(),
                       [about](const spec::word& w) { return w.about == about || w.activation == about; });
  });
}

}  // namespace onepass::binding
