// Words that users define while the process runs.
#include "src/line/defined.h"

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

#include "src/cache/hash.h"
#include "src/line/words.h"

namespace onepass::spec {
namespace {

// The descriptor's texts are those of `word` and these.
struct entry {
  defined_word word;
  std::string parameters;  // joined
  std::string type;        // "user::NAME_DIGEST": another source is another type
  descriptor about{};
  bool current = true;
};

struct vocabulary {
  std::shared_mutex mutex;
  std::list<entry> entries;
};
vocabulary& all() {
  static vocabulary one;
  return one;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string type_of(const defined_word& word, const std::string& parameters) {
  cache::hash digest;
  digest.add(word.source).add(parameters).add(std::to_string(static_cast<int>(word.operand)));
  digest.add(std::to_string(word.flops_forward) + ' ' + std::to_string(word.flops_backward));
  digest.add(std::to_string(static_cast<int>(word.kind)) + ' ' + std::to_string(word.sums));
  return "user::" + word.name + '_' + digest.hex().substr(0, 16);
}

descriptor descriptor_of(const entry& of) {
  const bool takes = of.word.operand != operand_kind::none, is_row = of.word.kind != defined_kind::elementwise;
  return {.name = of.word.name.c_str(),
          .kind = is_row  ? word_kind::row
                  : takes ? word_kind::affine
                          : word_kind::activation,
          .operand = of.word.operand,
          .operand_name = of.word.operand_name.c_str(),
          .parameter = of.parameters.c_str(),
          .parameters = std::max(static_cast<int>(of.word.parameters.size()), 1),
          .parameter_required = !of.word.parameters.empty(),
          .backward_needs_operand = takes,
          .statistics = of.word.sums,
          .sums = of.word.kind == defined_kind::row ? of.word.sums : 0,
          .flops_recompute = of.word.kind == defined_kind::row ? of.word.flops_forward : 0,
          .gives_number = of.word.kind == defined_kind::ending,
          .of_nothing = of.word.of_nothing,
          .needs_elements = of.word.needs_elements,
          .flops_forward = of.word.flops_forward,
          .flops_backward = of.word.flops_backward,
          .maps_zero_to_zero = !is_row && of.word.maps_zero_to_zero,
          .defined = of.type.c_str(),
          .formula = of.word.formula.c_str(),
          .meaning = of.word.meaning.c_str()};
}

// What the body stands in (onepass/word/user.h).
std::string base_of(const defined_word& word, const std::string& body) {
  if (word.kind == defined_kind::elementwise)
    return (word.operand != operand_kind::none ? "operand_word<" : "plain_word<") + body + ">";
  return (word.kind == defined_kind::row ? "row_word<" : "ending_word<") + body + ", " + std::to_string(word.sums) +
         ">";
}

// As kernels are compiled with it: of its descriptor, what a kernel asks for.
std::string definition(const entry& of) {
  static constexpr const char* kOperands[] = {"none", "column", "tensor"};
  const auto number = [](int value) { return std::to_string(value); };
  const auto truth = [](bool value) { return std::string(value ? "true" : "false"); };
  const std::string type = of.type.substr(of.type.rfind(':') + 1), body = type + "_body";
  const descriptor& about = of.about;
  const std::string kind = about.kind == word_kind::row      ? "row"
                           : about.kind == word_kind::affine ? "affine"
                                                             : "activation";
  return "template <class scalar>\nstruct " + body + " {\n#line 1 \"" + of.word.name + "\"\n" + of.word.source +
         "\n#line 1 \"onepass\"\n};\nstruct " + type + " : " + base_of(of.word, body) +
         " {\n  static constexpr descriptor about{.name = \"" + of.word.name + "\", .kind = word_kind::" + kind +
         ", .operand = operand_kind::" + kOperands[static_cast<std::size_t>(of.word.operand)] +
         ", .parameters = " + number(about.parameters) +
         ", .backward_needs_operand = " + truth(about.backward_needs_operand) +
         ", .statistics = " + number(about.statistics) + ", .sums = " + number(about.sums) +
         ", .flops_recompute = " + number(about.flops_recompute) + ", .gives_number = " + truth(about.gives_number) +
         ", .flops_forward = " + number(about.flops_forward) + ", .flops_backward = " + number(about.flops_backward) +
         "};\n};\n";
}

bool is_part_of_name(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

}  // namespace

const descriptor* define(defined_word word) {
  if (find(words(), word.name) != nullptr) throw std::invalid_argument("there is a word '" + word.name + "' already");
  const std::unique_lock lock(all().mutex);
  entry& made = all().entries.emplace_back();
  made.word = std::move(word);
  made.parameters = joined(made.word.parameters);
  made.type = type_of(made.word, made.parameters);
  made.about = descriptor_of(made);
  return &made.about;
}

const descriptor* undefine(std::string_view name) {
  const std::unique_lock lock(all().mutex);
  for (entry& e : all().entries) {
    if (!e.current || e.word.name != name) continue;
    e.current = false;
    return &e.about;
  }
  return nullptr;
}

std::vector<const descriptor*> defined_words() {
  const std::shared_lock lock(all().mutex);
  std::vector<const descriptor*> found;
  for (const entry& e : all().entries) {
    if (e.current) found.push_back(&e.about);
  }
  return found;
}

std::string with_definitions(std::string source) {
  const std::shared_lock lock(all().mutex);
  std::map<std::string, std::string> needed;
  const std::string room = "user::";
  for (auto at = source.find(room); at != std::string::npos; at = source.find(room, at + 1)) {
    auto end = at + room.size();
    while (end < source.size() && is_part_of_name(source[end])) ++end;
    const std::string type = source.substr(at, end - at);
    for (const entry& e : all().entries) {
      if (e.type == type) needed.emplace(type, definition(e));
    }
  }
  if (needed.empty()) return source;
  std::string text = "#include \"onepass/word/user.h\"\nONEPASS_BEGIN\nnamespace user {\n";
  for (const auto& [type, definition] : needed) text += definition;
  return source.insert(source.find("ONEPASS_BEGIN"), text + "}  // namespace user\nONEPASS_END\n");
}

}  // namespace onepass::spec
