// What a line is made of: its words' numbers, operands and results; parts of it.
#include "src/line/line.h"

#include <algorithm>

#include "onepass/kernel/arguments.h"
#include "onepass/word/words.h"
#include "src/line/words.h"

namespace onepass::spec {
namespace {

bool is_causal(const word& w) { return w.about->is_causal; }

// A kept value stands behind the result; an ending's number is the line's result, or stands among the kept values
// behind the first ending's, as a scale does behind its codes.
void add_result(line& to, word& w) {
  const auto add = [&](result_type type) {
    w.ordinal = to.keeps++;
    to.result_types.push_back(type);
  };
  constexpr result_type kNumber{result_shape::number}, kScale{result_shape::scale};
  const result_type scales{result_shape::scale, dtype::none, w.group};
  if (w.about->kind == word_kind::keep) add({result_shape::row, w.stored});
  if (w.about->gives_codes) to.result_types.front() = {result_shape::row, w.stored};
  if (w.about->by_groups) return add(scales);
  if (!w.about->gives_number) return;
  if (w.about->gives_codes) return add(kScale);
  if (to.result(0).is_number()) add(kNumber);
  else to.result_types.front() = kNumber;
}

}  // namespace

void place(line& to, word& w) {
  w.parameter_slot = w.parameters.empty() ? -1 : static_cast<int>(to.parameters.size());
  to.parameters.insert(to.parameters.end(), w.parameters.begin(), w.parameters.end());
  add_result(to, w);
}

const word& line::operand_word(int operand) const {
  return *std::find_if(words.begin(), words.end(), [operand](const word& w) {
    return w.operand >= 0 && w.operand <= operand && operand < w.operand + w.about->operands;
  });
}

dtype line::likely_type(int operand, dtype x) const {
  const auto next = static_cast<std::size_t>(&operand_word(operand) - words.data()) + 1;
  const bool is_kept = next < words.size() && words[next].about->kind == word_kind::keep;
  return result_dtype(x, is_kept ? words[next].stored : dtype::none);
}

bool line::scores() const {
  return linear >= 0 && words[static_cast<std::size_t>(linear)].about->operand == operand_kind::keys;
}

bool line::keeps_own_dtype() const {
  return std::any_of(result_types.begin() + 1, result_types.end(),
                     [](const result_type& of) { return of.own != dtype::none; });
}

int line::least_dim() const { return std::any_of(words.begin(), words.end(), is_causal) ? 2 : 0; }

bool line::depends_on_column() const {
  return std::any_of(words.begin(), words.end(), [](const word& w) {
    return w.about->operand == operand_kind::column || w.about->kind == word_kind::dropout || is_causal(w) ||
           is_rotary(w);
  });
}

int line::statistics(dtype x) const {
  int all = 0;
  for (const int i : row_words) all += statistics_of(*words[static_cast<std::size_t>(i)].about, x);
  return all;
}

const word* line::rotary() const {
  const auto found = std::find_if(words.begin(), words.end(), is_rotary);
  return found == words.end() ? nullptr : &*found;
}

bool line::by_channels() const {
  return std::any_of(words.begin(), words.end(), [](const word& w) { return w.about->by_channels; });
}

std::int64_t line::turned(std::int64_t columns) const {
  const word* const rope = rotary();
  if (rope == nullptr) return 0;
  return rope->parameters.empty() ? columns : static_cast<std::int64_t>(rope->parameters.front());
}

std::vector<double> defaults_of(const descriptor& about) {
  if (about.parameter_required) return {};
  std::vector<double> all{about.parameter_default};
  all.insert(all.end(), about.other_defaults, about.other_defaults + about.parameters - 1);
  return all;
}

line slice(const line& of, int begin, int end) {
  line part;
  part.first_operand = of.first_operand;
  for (int i = 0; i < begin; ++i) part.first_operand += of.words[static_cast<std::size_t>(i)].operand >= 0;
  for (int i = begin; i < end; ++i) {
    word w = of.words[static_cast<std::size_t>(i)];
    const std::string_view text =
        std::string_view(of.text).substr(static_cast<std::size_t>(w.begin), static_cast<std::size_t>(w.end - w.begin));
    if (!part.text.empty()) part.text += " | ";
    w.begin = static_cast<int>(part.text.size());
    part.text += text;
    w.end = static_cast<int>(part.text.size());
    if (w.about->kind == word_kind::row) part.row_words.push_back(i - begin);
    if (i == of.linear) part.linear = i - begin;
    if (w.operand >= 0) w.operand = part.operands++;
    place(part, w);
    if (w.about->kind == word_kind::dropout) part.dropouts = w.ordinal + 1;
    part.words.push_back(w);
  }
  return part;
}

line differentiable_part(const line& of) {
  int end = 0;
  for (std::size_t i = 0; i < of.words.size(); ++i)
    if (of.words[i].about->kind == word_kind::keep) end = static_cast<int>(i) + 1;
  return slice(of, 0, end);
}

std::string operand_name(const line& of, const word& w) { return operand_name(of, w, w.operand); }

std::string operand_name(const line& of, const word& w, int operand) {
  std::string_view name = w.about->operand_name;
  for (int i = w.operand; i < operand; ++i) name.remove_prefix(name.find(", ") + 2);
  return "operand " + std::to_string(of.first_operand + operand) + " (" + std::string(name.substr(0, name.find(','))) +
         " of '" + w.about->name + "')";
}

line with_features(line of, int features) {
  for (int j = 0; j < features; ++j) {
    word w{};
    w.about = &onepass::word::feature::about;
    w.ordinal = j;
    w.operand = of.operands++;
    of.words.push_back(w);
  }
  of.features = features;
  return of;
}

std::string without_dropout(const line& from) {
  std::string text;
  for (const word& w : from.words) {
    if (w.about->kind == word_kind::dropout) continue;
    if (!text.empty()) text += " | ";
    text += std::string_view(from.text).substr(static_cast<std::size_t>(w.begin),
                                               static_cast<std::size_t>(w.end - w.begin));
  }
  return text;
}

}  // namespace onepass::spec
