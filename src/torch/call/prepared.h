// Lines that have been parsed, by text, for the whole process.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "onepass/kernel/cpu_kernels.h"
#include "src/plan/attention.h"

namespace onepass::binding {

struct prepared_contraction;
struct prepared_attention;

// One that has a contraction has no kernels itself, but is made of lines that have.
class prepared_line {
 public:
  // whole: the line of which this is the differentiable part, whose kernels backward has.
  explicit prepared_line(spec::line of, const prepared_line* whole = nullptr);
  ~prepared_line();

  const spec::line line;

 private:
  const prepared_line* const whole_;

 public:
  const spec::reads reads, reads_recomputing;                     // in backward; and where it recomputes the result
  const std::unique_ptr<const prepared_contraction> contraction;  // where the line has `linear` or `scores`,
  const std::unique_ptr<const prepared_attention> attention;      // but not `values`: then this
  const line_signature signature;
  const std::unique_ptr<const prepared_line> differentiable;  // the part that backward is of, where that is not all

  // Of a line without `linear`, for x of a dtype; as long as the line is.
  const cpu_kernels& cpu(std::uint64_t boolean_masks, dtype x) const;
  const std::string& type_text(std::uint64_t boolean_masks, bool backward) const;

  void prepare_on_cpu(std::uint64_t boolean_masks, dtype x) const;   // all that the line is made of
  bool is_ready_on_cpu(std::uint64_t boolean_masks, dtype x) const;  // whether nothing of it would have to be compiled

 private:
  struct variant {
    std::uint64_t boolean_masks;
    std::string forward, backward;
    std::array<std::shared_ptr<const cpu_kernels>, 1 + static_cast<std::size_t>(dtype::f16)> kernels;  // by x's dtype
  };
  variant& variant_for(std::uint64_t boolean_masks) const;
  // Of each line that has kernels, with the boolean masks that are its; until one says false.
  template <class Does>
  bool each_part(std::uint64_t boolean_masks, const Does& does) const;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<variant>> variants_;  // few: one for each choice of boolean and additive masks
  mutable std::atomic<unsigned> ready_{0};                  // without boolean masks: a bit for each dtype of x
};

struct prepared_contraction {
  explicit prepared_contraction(const spec::line& of);
  const spec::contraction parts;
  const prepared_line before, recompute, behind, behind_keeping;

  // The words before `linear` with so many features, of a matrix of so many rows; at most kMaxOperands.
  const prepared_line& with_features(int features) const;

 private:
  mutable std::mutex mutex_;
  mutable std::unique_ptr<const prepared_line> with_features_[kMaxOperands + 1];
};

struct prepared_attention {
  explicit prepared_attention(const spec::line& of);
  const spec::attention parts;
  const prepared_line scores;
};

// Parsed at first sight, and remembered for some time: a line stays as long as somebody has it. Throws
// spec::line_error.
std::shared_ptr<const prepared_line> prepared(const std::string& text);

// The word is none any more: lines that have it are parsed again at their next sight.
void forget_lines_with(const descriptor*);

}  // namespace onepass::binding
