// The vocabulary: every word's descriptor, gathered from the words themselves.
#include "src/line/words.h"

#include <algorithm>
#include <cctype>
#include <numeric>

#include "onepass/word/ending.h"
#include "onepass/word/functions.h"
#include "onepass/word/row.h"
#include "onepass/word/words.h"
#include "src/line/defined.h"

namespace onepass::spec {
namespace {

// No words: what stands before a contraction and behind it are chains of their own.
constexpr descriptor kLinear{.name = "linear",
                             .kind = word_kind::contraction,
                             .operand = operand_kind::matrix,
                             .operand_name = "W",
                             .backward_needs_operand = true,
                             .flops_forward = 1,
                             .flops_backward = 2,
                             .formula = "x · Wᵀ",
                             .meaning = "contracts the row with a matrix: N' numbers a row from here on"};

constexpr descriptor kScores{.name = "scores",
                             .kind = word_kind::contraction,
                             .operand = operand_kind::keys,
                             .operand_name = "K",
                             .backward_needs_operand = true,
                             .flops_forward = 1,
                             .flops_backward = 2,
                             .formula = "x · Kᵀ",
                             .meaning = "the row's product with each of its batch's keys; the first word of a line"};

constexpr descriptor kValues{.name = "values",
                             .kind = word_kind::contraction,
                             .operand = operand_kind::values,
                             .operand_name = "V",
                             .backward_needs_operand = true,
                             .flops_forward = 1,
                             .flops_backward = 2,
                             .formula = "x · V",
                             .meaning =
                                 "the sum of its batch's values, weighted by the row; the last word of a line "
                                 "that begins with `scores`"};

template <class... Words>
void append(std::vector<const descriptor*>& to, word::list<Words...>) {
  (to.push_back(&Words::about), ...);
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

}  // namespace

std::vector<const descriptor*> activations() {
  std::vector<const descriptor*> all;
  append(all, word::activations{});
  append(all, word::functions{});
  for (const descriptor* word : defined_words()) {
    if (word->kind == word_kind::activation) all.push_back(word);
  }
  return all;
}

std::vector<const descriptor*> channel_words() {
  std::vector<const descriptor*> all;
  append(all, word::list<word::channel_bias, word::channel_scale>{});
  return all;
}

std::vector<const descriptor*> words() {
  std::vector<const descriptor*> all;
  append(all, word::list<word::bias, word::scale, word::mul, word::add, word::sub, word::times, word::div,
                         word::gate<word::silu>, word::gated<word::silu>, word::dropout, word::mask_boolean,
                         word::causal, word::rope>{});
  append(all, word::activations{});
  append(all, word::functions{});
  append(all, word::list<word::keep, word::round>{});
  append(all, word::row_words{});
  append(all, word::endings{});
  for (const descriptor* word : {&kLinear, &kScores, &kValues}) all.push_back(word);
  const std::vector<const descriptor*> defined = defined_words();
  all.insert(all.end(), defined.begin(), defined.end());
  return all;
}

const descriptor* find(const std::vector<const descriptor*>& among, std::string_view name) {
  for (const descriptor* word : among) {
    if (name == word->name) return word;
  }
  return nullptr;
}

std::string_view nearest(const std::vector<const descriptor*>& among, std::string_view misspelt) {
  std::string name(misspelt);  // words have no capitals
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return (*std::min_element(among.begin(), among.end(),
                            [&name](const descriptor* a, const descriptor* b) {
                              return edit_distance(name, a->name) < edit_distance(name, b->name);
                            }))
      ->name;
}

}  // namespace onepass::spec
