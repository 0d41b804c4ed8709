// The parser: words separated by bars, each with its numbers (or one activation) in parentheses.
#include "src/line/line.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>

#include "onepass/kernel/arguments.h"
#include "onepass/word/ending.h"
#include "onepass/word/words.h"
#include "src/line/words.h"

namespace onepass::spec {
namespace {

// UTF-8: bytes after a character's first.
bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

std::size_t characters(std::string_view text, int begin, int end) {
  const auto from = static_cast<std::size_t>(begin), to = std::min(static_cast<std::size_t>(end), text.size());
  return static_cast<std::size_t>(std::count_if(text.begin() + static_cast<std::ptrdiff_t>(std::min(from, to)),
                                                text.begin() + static_cast<std::ptrdiff_t>(to),
                                                [](char c) { return !continues(c); }));
}

// Of a long text what is near the fault.
constexpr int kShown = 300;

void shorten(std::string_view& text, int& begin, int& end) {
  int from = std::max(0, begin - kShown), to = std::min(static_cast<int>(text.size()), begin + kShown);
  while (from > 0 && continues(text[static_cast<std::size_t>(from)])) --from;
  while (to < static_cast<int>(text.size()) && continues(text[static_cast<std::size_t>(to)])) ++to;
  text = text.substr(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from));
  begin -= from, end = std::min(end, to) - from;
}

std::string quoted(std::string_view text, int begin, int end, const std::string& what) {
  shorten(text, begin, end);
  std::string message = what;
  message += "\n  ";
  for (char c : text) message += std::isspace(static_cast<unsigned char>(c)) ? ' ' : c;
  message += "\n  ";
  message.append(characters(text, 0, begin), ' ');
  message.append(std::max<std::size_t>(1, characters(text, begin, end)), '^');
  return message;
}

// As lines name them.
struct named_dtype {
  std::string_view name;
  dtype type;
};
constexpr named_dtype kDtypes[] = {
    {"float32", dtype::f32}, {"fp8", dtype::f8e4m3}, {"fp8e5m2", dtype::f8e5m2}, {"int8", dtype::i8}};

// A group is all of some lanes, and its threads are of one warp, each with eight columns at most.
constexpr int kLeastGroup = 16, kMostGroup = 256;

// What lines have for other libraries' names, which are near to other words.
struct other_name {
  std::string_view name, words;
};
constexpr other_name kOtherNames[] = {{"swiglu", "gate(silu)"},
                                      {"geglu", "gate(gelu)"},
                                      {"reglu", "gate(relu)"},
                                      {"glu", "gate(sigmoid)"},
                                      {"swish", "silu"},
                                      {"bias_gelu", "bias | gelu"},
                                      {"matmul", "linear"},
                                      {"mm", "linear"},
                                      {"dense", "linear"},
                                      {"residual", "add"},
                                      {"multiply", "times"},
                                      {"weight", "scale"},
                                      {"gamma", "scale"},
                                      {"beta", "bias"},
                                      {"affine", "scale | bias"},
                                      {"rotary", "rope"},
                                      {"normalize", "l2_norm"},
                                      {"masked_fill", "mask"},
                                      {"nll_loss", "cross_entropy"},
                                      {"attention", "scores | softmax | values"},
                                      {"sdpa", "scores | softmax | values"}};

class reader {
 public:
  explicit reader(std::string_view text) : text_(text) {}

  line read() {
    line result;
    result.text = text_;
    if (skip_space(); at_end()) fail(0, 0, "an empty line: expected words separated by '|'");
    for (;;) {
      add(result, read_word());
      skip_space();
      if (at_end()) break;
      if (peek() != '|') fail_here("expected '|' between words");
      ++at_;
    }
    check_strategy(result);
    rename_strategy(result);
    return result;
  }

 private:
  [[noreturn]] void fail(int begin, int end, const std::string& what) const {
    throw line_error(text_, begin, end, what);
  }
  // At a character, which is named.
  [[noreturn]] void fail_here(const std::string& what) const {
    if (at_end()) fail(at_, at_ + 1, what + ", got the end of the line");
    int end = at_ + 1;
    while (end < static_cast<int>(text_.size()) && continues(text_[static_cast<std::size_t>(end)])) ++end;
    fail(at_, end,
         what + ", got '" +
             std::string(text_.substr(static_cast<std::size_t>(at_), static_cast<std::size_t>(end - at_))) + "'");
  }
  bool at_end() const { return at_ >= static_cast<int>(text_.size()); }
  char peek() const { return text_[static_cast<std::size_t>(at_)]; }
  void skip_space() {
    while (!at_end() && std::isspace(static_cast<unsigned char>(peek()))) ++at_;
  }

  std::string_view read_name(const char* expected) {
    skip_space();
    const int begin = at_;
    while (!at_end() && (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_')) ++at_;
    if (at_ == begin) fail_here(std::string("expected ") + expected);
    return text_.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(at_ - begin));
  }

  const descriptor* known(std::string_view name, const std::vector<const descriptor*>& among, const char* what) const {
    if (const descriptor* about = find(among, name)) return about;
    const auto other = std::find_if(std::begin(kOtherNames), std::end(kOtherNames),
                                    [name](const other_name& of) { return of.name == name; });
    const bool fits =
        other != std::end(kOtherNames) && (std::string_view(what) == "word" || find(among, other->words) != nullptr);
    fail(at_ - static_cast<int>(name.size()), at_,
         std::string("unknown ") + what + " '" + std::string(name) + "'; did you mean '" +
             std::string(fits ? other->words : nearest(among, name)) + "'?");
  }

  // A number, read as Python's float() would read it. has_option: a comma and a name may follow.
  double read_number(const descriptor& about, bool has_option = false) {
    skip_space();
    const int begin = at_;
    const bool one = about.parameters == 1 && !has_option;
    while (!at_end() && peek() != ')' && peek() != '|' && (one || peek() != ',')) ++at_;
    std::string digits(text_.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(at_ - begin)));
    while (!digits.empty() && std::isspace(static_cast<unsigned char>(digits.back()))) digits.pop_back();
    std::string plain;  // Python allows single underscores between digits
    for (std::size_t i = 0; i < digits.size(); ++i) {
      const bool between = i > 0 && i + 1 < digits.size() && std::isdigit(static_cast<unsigned char>(digits[i - 1])) &&
                           std::isdigit(static_cast<unsigned char>(digits[i + 1]));
      if (digits[i] != '_' || !between) plain += digits[i];
    }
    if (plain.size() > 1 && plain[0] == '+' && plain[1] != '-') plain.erase(0, 1);
    double value = 0;  // from_chars, since strtod listens to the locale
    const auto [stop, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value);
    if (plain.empty() || error != std::errc{} || stop != plain.data() + plain.size() ||
        (std::isnan(value) && about.kind != word_kind::dropout)) {  // a NaN says that a number is left out
      fail(begin, begin + static_cast<int>(digits.size()),
           std::string("'") + about.name + "' takes " + numbers(about) + " (" + about.parameter + "), got '" + digits +
               "'");
    }
    return value;
  }

  static std::string numbers(const descriptor& about) {
    return about.parameters == 1 ? "a number" : std::to_string(about.parameters) + " numbers";
  }

  void read_parameters(word& w, const descriptor& about) {
    skip_space();
    if (at_end() || peek() != '(') {
      if (about.parameter_required) {
        fail(w.begin, at_,
             std::string("'") + about.name + "' needs " + numbers(about) + ": " + about.name + "(" + about.parameter +
                 ")");
      }
      if (about.with_number[0] == '\0') w.parameters = defaults_of(about);
      return;
    }
    ++at_;
    const std::vector<double> others = defaults_of(about);
    for (int i = 0; i < about.parameters; ++i) {
      if (i > 0 && !about.parameter_required && !at_end() && peek() == ')') {  // the rest are what they are unless said
        w.parameters.insert(w.parameters.end(), others.begin() + i, others.end());
        break;
      }
      if (i > 0 && (at_end() || peek() != ',')) {
        fail(at_, at_ + 1, std::string("'") + about.name + "' takes " + numbers(about) + " (" + about.parameter + ")");
      }
      at_ += i > 0;
      w.parameters.push_back(read_number(about));
    }
    close(about);
    check_range(w, about);
  }

  void close(const descriptor& about) {
    skip_space();
    if (at_end() || peek() != ')') fail(at_, at_ + 1, std::string("expected ')' to end '") + about.name + "'");
    ++at_;
  }

  void check_range(const word& w, const descriptor& about) const {
    const double number = w.parameters.front();
    if (about.kind == word_kind::dropout && !(number >= 0 && number <= 1)) {
      fail(w.begin, at_, "dropout probability has to be between 0 and 1, but got " + std::to_string(number));
    }
    if (is_paired(about) && !(number >= 0 && number <= 1))
      fail(w.begin, at_, std::string(about.name) + " takes a beta between 0 and 1, got " + std::to_string(number));
    if (is_paired(about) && w.parameters.size() > 1 && !(w.parameters.back() > 0)) {
      fail(w.begin, at_,
           std::string(about.name) + " takes a temperature above 0, got " + std::to_string(w.parameters.back()));
    }
    if (about.operand != operand_kind::target) return;
    if (const double ignored = w.parameters.back(); std::trunc(ignored) != ignored)
      fail(w.begin, at_,
           std::string("'") + about.name + "' takes an integer as ignore_index, got " + std::to_string(ignored));
    if (w.parameters.size() > 1 && !(number >= 0 && number <= 1))
      fail(w.begin, at_, "label_smoothing has to be between 0 and 1, but got " + std::to_string(number));
  }

  word read_word() {
    skip_space();
    word w{};
    w.begin = at_;
    w.about = known(read_name("a word"), words(), "word");
    const descriptor& about = *w.about;
    if (about.kind == word_kind::gate) {
      read_gate(w);
    } else if (about.dtypes[0] != '\0') {
      read_dtype(w, about);
    } else if (about.kind == word_kind::rotary) {
      read_rotation(w);
    } else if (const descriptor* const channels = find(channel_words(), about.name); channels != nullptr) {
      read_column(w, *channels);
    } else if (about.parameter[0] != '\0') {
      read_parameters(w, about);
    } else {
      skip_space();
      if (!at_end() && peek() == '(') {
        if (about.kind != word_kind::contraction || about.operand == operand_kind::values)
          fail(at_, at_ + 1, std::string("'") + about.name + "' takes no number");
        read_strategy(about);
      }
    }
    w.end = at_;
    while (w.end > w.begin && std::isspace(static_cast<unsigned char>(text_[static_cast<std::size_t>(w.end - 1)])))
      --w.end;
    return w;
  }

  void read_gate(word& w) {
    skip_space();
    if (at_end() || peek() != '(')
      fail(w.begin, at_, std::string("'") + w.about->name + "' needs an activation, as in " + w.about->name + "(silu)");
    ++at_;
    w.activation = known(read_name("an activation"), activations(), "activation");
    if (w.activation->parameter[0] != '\0') read_parameters(w, *w.activation);
    close(*w.about);
  }

  void read_dtype(word& w, const descriptor& about) {
    const std::string all = std::string(", ") + about.dtypes + ",";
    const bool has_one = std::count(all.begin(), all.end(), ',') == 2;
    const std::string takes = std::string("'") + about.name + "' takes " + (has_one ? "" : "one of ") + about.dtypes;
    skip_space();
    if (at_end() || peek() != '(') {
      if (about.gives_codes) fail(w.begin, at_, takes + ": " + about.name + "(fp8)");
      return;
    }
    ++at_;
    const std::string_view name = read_name("a dtype");
    const auto* const found =
        std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const named_dtype& of) { return of.name == name; });
    if (found == std::end(kDtypes) || all.find(", " + std::string(name) + ",") == std::string::npos)
      fail(at_ - static_cast<int>(name.size()), at_, takes + ", got '" + std::string(name) + "'");
    w.stored = found->type;
    skip_space();
    if (about.gives_codes && !at_end() && peek() == ',') {
      ++at_;
      read_scales(w);
    }
    close(about);
  }
  // Codes' scale: static, or of how many columns.
  void read_scales(word& w) {
    const std::string_view how = read_name("'static' or a number of columns");
    const int begin = at_ - static_cast<int>(how.size());
    if (how == "static") {
      w.about = &onepass::word::quantize_static<dtype::f8e4m3>::about;  // of all
      return;
    }
    const auto [stop, error] = std::from_chars(how.data(), how.data() + how.size(), w.group);
    if (error == std::errc::invalid_argument || stop != how.data() + how.size())
      fail(begin, at_, "expected 'static' or a number of columns, got '" + std::string(how) + "'");
    const bool is_power = std::has_single_bit(static_cast<unsigned>(w.group));
    if (error != std::errc{} || !is_power || w.group < kLeastGroup || w.group > kMostGroup) {
      fail(begin, at_,
           "'quantize' takes a power of two from " + std::to_string(kLeastGroup) + " to " + std::to_string(kMostGroup) +
               " columns, got '" + std::string(how) + "'");
    }
    w.about = &onepass::word::quantize_groups<dtype::f8e4m3, kMostGroup>::about;  // of all
  }
  // rope, rope(64), rope(interleaved) or rope(64, interleaved)
  void read_rotation(word& w) {
    skip_space();
    if (at_end() || peek() != '(') return;
    ++at_;
    read_option(w, onepass::word::rope_interleaved::about, [&](double first, int begin) {
      constexpr double kMost = 1 << 30;
      if (!(first >= 2 && first <= kMost && std::fmod(first, 2) == 0))
        fail(begin, at_, "'rope' turns an even number of a row's first numbers, from 2 on");
    });
  }
  // scale, scale(1), scale(channels) or scale(1, channels)
  void read_column(word& w, const descriptor& by_channels) {
    skip_space();
    if (at_end() || peek() != '(') return;
    ++at_;
    read_option(w, by_channels, [](double, int) {});
  }
  // What stands in the parentheses: the word's number, if it takes one, its option, or both. check(number, its begin).
  template <class Check>
  void read_option(word& w, const descriptor& with_option, const Check& check) {
    skip_space();
    const std::string option = with_option.option;
    const bool is_infinite =
        text_.substr(static_cast<std::size_t>(std::min<std::size_t>(at_, text_.size()))).starts_with("inf");
    if (at_end() || is_infinite || !std::isalpha(static_cast<unsigned char>(peek()))) {
      const int begin = at_;
      if (w.about->parameter[0] == '\0') fail(begin - 1, begin, std::string("'") + w.about->name + "' takes no number");
      const double number = read_number(*w.about, true);
      check(number, begin);
      w.parameters.push_back(number);
      if (at_end() || peek() != ',') return close(*w.about);
      ++at_;
    }
    const std::string_view name = read_name(("'" + option + "'").c_str());
    if (name != option) {
      fail(at_ - static_cast<int>(name.size()), at_,
           std::string("'") + w.about->name + "' knows the option '" + option + "', got '" + std::string(name) + "'");
    }
    w.about = &with_option;
    close(*w.about);
  }

  void read_strategy(const descriptor& about) {
    ++at_;
    const std::string_view name = read_name("a strategy");
    const bool linear = about.operand == operand_kind::matrix;
    const auto knows = [linear](const strategy_facts& of) { return linear ? of.linear : of.scores || of.values; };
    const auto* found = std::find_if(std::begin(kStrategies), std::end(kStrategies), [&](const strategy_facts& of) {
      return knows(of) && (of.name == name || of.old_name == name);
    });
    name_end_ = at_;
    if (found == std::end(kStrategies)) {
      fail(at_ - static_cast<int>(name.size()), at_,
           "unknown strategy '" + std::string(name) + "', expected one of " + names_of(knows));
    }
    how_ = static_cast<strategy>(found - std::begin(kStrategies));
    if (name == found->old_name) old_name_ = found->old_name;
    close(about);
  }

  template <class Knows>
  static std::string names_of(const Knows& knows) {
    std::string names;
    for (const strategy_facts& of : kStrategies)
      if (knows(of)) names += (names.empty() ? "" : ", ") + std::string(of.name);
    return names;
  }

  // Whether `values` follows is known at the line's end.
  void check_strategy(const line& of) const {
    if (!of.scores()) return;
    const bool values = of.values >= 0;
    const auto knows = [values](const strategy_facts& each) { return values ? each.values : each.scores; };
    if (knows(kStrategies[static_cast<std::size_t>(of.how)])) return;
    const word& w = of.words.front();
    fail(w.begin, w.end,
         std::string("'scores' ") + (values ? "with 'values' " : "") + "knows the strategies " + names_of(knows));
  }

  // An alias in the text becomes the present name.
  void rename_strategy(line& of) const {
    if (old_name_.empty()) return;
    const int size = static_cast<int>(old_name_.size()), begin = name_end_ - size;
    const std::string_view name = name_of(of.how);
    of.text.replace(static_cast<std::size_t>(begin), old_name_.size(), name);
    for (word& w : of.words) {
      for (int* at : {&w.begin, &w.end})
        if (*at > begin) *at += static_cast<int>(name.size()) - size;
    }
    of.old_strategy = old_name_;
  }

  void check_stored(const line& to, const word& w) const {
    const bool contracts = to.linear >= 0 || w.about->kind == word_kind::contraction;
    if (contracts && ((w.stored != dtype::none && w.about->kind == word_kind::keep) || to.keeps_own_dtype()))
      fail(w.begin, w.end,
           "a value kept in a dtype of its own in a line with a contraction, where all are kept in x's dtype");
  }

  void add_contraction(line& to, const word& w) const {
    const operand_kind takes = w.about->operand;
    if (takes == operand_kind::values) {
      if (!to.scores()) fail(w.begin, w.end, "'values' without 'scores', which must be the first word of its line");
      to.values = static_cast<int>(to.words.size());
      return;
    }
    if (to.linear >= 0) {
      fail(w.begin, w.end,
           std::string("a second contraction, '") + w.about->name +
               "': a line has at most one, or 'scores' and 'values'");
    }
    if (takes == operand_kind::keys && !to.words.empty())
      fail(w.begin, w.end, "'scores' must be the first word of a line");
    to.linear = static_cast<int>(to.words.size());
    to.how = how_;
  }

  void check_ending(const line& to, const word& w) const {
    if (to.result(0).is_number() && !w.about->gives_number) {
      fail(w.begin, w.end,
           std::string("'") + w.about->name + "' behind '" + to.words.back().about->name +
               "', which ends a line: it gives one number a row");
    }
    if (to.gives_codes() || (w.about->gives_codes && to.result(0).is_number())) {
      fail(w.begin, w.end,
           std::string("'") + w.about->name + "' behind '" + to.words.back().about->name + "', which ends a line");
    }
    const bool has_pair =
        std::any_of(to.words.begin(), to.words.end(), [](const word& o) { return is_paired(*o.about); });
    if (has_pair || (is_paired(*w.about) && (to.rowwise() || to.keeps > 0 || to.linear >= 0))) {
      fail(w.begin, w.end,
           std::string("'") + w.about->name + "' behind '" + to.words.back().about->name +
               "': a row word with a row beside its own has no others in its line, no 'keep' and no contraction");
    }
    // What `linear` gives is computed again in backward, and may round otherwise.
    const bool may_stand = !to.scores() && !w.about->gives_codes && !w.about->finds_input;
    if ((w.about->gives_number || w.about->gives_codes) && to.linear >= 0 && !may_stand)
      fail(w.begin, w.end, std::string("'") + w.about->name + "' behind a contraction, where it has no kernel");
  }

  void check_rotary(const line& to, const word& w) const {
    const bool turns = is_rotary(w);
    if (turns && to.rotary() != nullptr) fail(w.begin, w.end, "a second 'rope': a line has at most one");
    if (!turns && to.rotary() == nullptr) return;
    const auto has_no_kernel = [](const word& other) {
      return other.about->kind == word_kind::contraction || other.about->operand == operand_kind::target ||
             is_paired(*other.about) || other.about->by_groups;
    };
    const auto found = turns ? std::find_if(to.words.begin(), to.words.end(), has_no_kernel) : to.words.end();
    if (found != to.words.end() || has_no_kernel(w)) {
      const auto named = [](const word& of) {
        return std::string("'") + of.about->name + (of.about->by_groups ? "' of groups" : "'");
      };
      fail(w.begin, w.end,
           named(w) + " in one line with " + named(turns ? *found : *to.rotary()) + ": there is no kernel for both");
    }
  }

  // What `linear` and `scores` take from the words beside them, and `rope` from its row, are whole columns.
  void check_channels(const line& to, const word& w) const {
    const auto needs_columns = [](const word& other) {
      return other.about->kind == word_kind::contraction || is_rotary(other);
    };
    const auto by_channels = [](const word& other) { return other.about->by_channels; };
    const bool is_one = by_channels(w);
    if (!is_one && !needs_columns(w)) return;
    const auto found = is_one ? std::find_if(to.words.begin(), to.words.end(), needs_columns)
                              : std::find_if(to.words.begin(), to.words.end(), by_channels);
    if (found == to.words.end()) return;
    const auto named = [](const word& of) {
      return std::string("'") + of.about->name + (of.about->by_channels ? "(channels)'" : "'");
    };
    fail(w.begin, w.end, named(w) + " in one line with " + named(*found) + ": there is no kernel for both");
  }

  void add(line& to, word w) const {
    const descriptor& about = *w.about;
    if (to.values >= 0)
      fail(w.begin, w.end,
           std::string("'") + about.name + "' behind 'values', which must be the last word of its line");
    check_ending(to, w);
    check_stored(to, w);
    if (about.kind == word_kind::row) {
      if (to.linear >= 0 && !to.scores() && !about.gives_number) {
        fail(w.begin, w.end,
             std::string("'") + about.name +
                 "' behind 'linear': a row word stands before it, but for those that give one number a row");
      }
      if (to.rowwise() && to.scores()) {
        fail(w.begin, w.end,
             std::string("a second row word, '") + about.name +
                 "': a line with 'scores' has at most one (this one has '" +
                 to.words[static_cast<std::size_t>(to.first_row())].about->name + "')");
      }
      if (static_cast<int>(to.row_words.size()) == kMaxRowWords)
        fail(w.begin, w.end, "a line has at most " + std::to_string(kMaxRowWords) + " row words");
      to.row_words.push_back(static_cast<int>(to.words.size()));
    }
    if (about.kind == word_kind::contraction) add_contraction(to, w);
    check_rotary(to, w);
    check_channels(to, w);
    if (static_cast<int>(to.words.size()) == kMaxWords)
      fail(w.begin, w.end, "a line has at most " + std::to_string(kMaxWords) + " words");
    place(to, w);
    if (about.operand != operand_kind::none) w.operand = to.operands, to.operands += about.operands;
    if (about.kind == word_kind::dropout) w.ordinal = to.dropouts++;
    if (to.operands > kMaxOperands)
      fail(w.begin, w.end, "a line takes at most " + std::to_string(kMaxOperands) + " operands");
    if (to.keeps > kMaxKeeps) fail(w.begin, w.end, "a line has at most " + std::to_string(kMaxKeeps) + " keeps");
    if (static_cast<int>(to.parameters.size()) > kMaxParameters) {
      fail(w.begin, w.end, "a line takes at most " + std::to_string(kMaxParameters) + " numbers");
    }
    to.words.push_back(w);
  }

  std::string_view text_;
  int at_ = 0;
  strategy how_ = strategy::automatic;  // of the last contraction
  std::string_view old_name_;           // if an alias named it
  int name_end_ = 0;                    // of that name in the text
};

}  // namespace

line_error::line_error(std::string_view text, int begin, int end, const std::string& what)
    : std::invalid_argument(quoted(text, begin, end, what)) {}

std::string_view name_in_lines(dtype type) {
  return std::find_if(std::begin(kDtypes), std::end(kDtypes), [type](const named_dtype& of) { return of.type == type; })
      ->name;
}

line parse(std::string_view text) { return reader(text).read(); }

}  // namespace onepass::spec
