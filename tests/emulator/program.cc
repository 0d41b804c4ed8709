// PTX to a program.
#include "tests/emulator/program.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <stdexcept>

namespace onepass::emulator {
namespace {

const std::map<std::string, special> kSpecials = {
    {"%tid.x", special::tid_x},       {"%tid.y", special::tid_y},
    {"%ntid.x", special::ntid_x},     {"%ntid.y", special::ntid_y},
    {"%ctaid.x", special::ctaid_x},   {"%ctaid.y", special::ctaid_y},
    {"%nctaid.x", special::nctaid_x}, {"%nctaid.y", special::nctaid_y},
    {"%laneid", special::laneid},     {"%cluster_ctarank", special::cluster_rank}};

std::uint32_t aligned(std::uint32_t at, std::uint32_t to) { return (at + to - 1) / to * to; }

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// Statement by statement: directives, labels, instructions, braces of scopes.
class reader {
 public:
  explicit reader(const std::string& text) : text_(text) {}

  program read() {
    while (skip_space()) {
      if (text_.compare(at_, 8, ".section") == 0) break;  // for debuggers
      if (peek() == '.') directive();
      else if (peek() == '{') ++at_, scopes_.push_back(++scope_);
      else if (peek() == '}') ++at_, scopes_.pop_back();
      else statement();
    }
    for (auto& [index, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) fail("unknown label " + label);
      p_.code[static_cast<std::size_t>(index)].target = found->second;
    }
    std::ptrdiff_t at = 0, line = 1;
    for (instruction& i : p_.code) {
      line += std::count(text_.begin() + at, text_.begin() + i.line, '\n');
      at = i.line, i.line = static_cast<int>(line);
    }
    p_.registers = next_;
    return std::move(p_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    throw std::runtime_error("emulator: PTX line " + std::to_string(line) + ": " + what);
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool skip_space() {
    for (; at_ < text_.size(); ++at_) {
      if (text_.compare(at_, 2, "//") == 0) at_ = text_.find('\n', at_);
      else if (!std::isspace(static_cast<unsigned char>(text_[at_]))) return true;
      if (at_ == std::string::npos) break;
    }
    return false;
  }
  std::string until(char end) {
    const std::size_t found = text_.find(end, at_);
    if (found == std::string::npos) fail(std::string("no ") + end);
    std::string part = text_.substr(at_, found - at_);
    at_ = found + 1;
    return part;
  }
  std::string word() {
    skip_space();
    const std::size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || std::strchr("._$%:", text_[at_])))
      ++at_;
    return text_.substr(begin, at_ - begin);
  }

  void directive() {
    const std::string name = word();
    if (name == ".reg") {
      until(';');
    } else if (name == ".shared" || name == ".extern" || name == ".local" || name == ".global" || name == ".const") {
      variable(name, until(';'));
    } else if (name == ".visible" || name == ".entry") {
      if (name == ".visible") word();
      p_.name = word();
      until('(');
      parameters(until(')'));
    } else if (name == ".reqnctapercluster") {
      p_.cluster = static_cast<std::uint32_t>(std::stoul(until('\n')));
    } else if (name == ".pragma") {
      until(';');
    } else {
      until('\n');  // .loc, .file, .version, .target, .maxntid and the like
    }
  }

  // ".align 16 .b8 name[24]", with what it begins with behind, which no kernel here reads.
  struct declared {
    std::string name;
    std::uint32_t align = 1, bytes = 0;
  };
  declared declaration(const std::string& text) const {
    declared d;
    std::uint32_t element = 1, count = 1;
    for (const std::string& token : split(text.substr(0, text.find('=')), ' ')) {
      std::string part = token;
      part.erase(std::remove_if(part.begin(), part.end(), [](unsigned char c) { return std::isspace(c); }), part.end());
      if (part.empty() || part == ".shared" || part == ".align" || part == ".param") continue;
      if (std::isdigit(static_cast<unsigned char>(part[0]))) d.align = static_cast<std::uint32_t>(std::stoul(part));
      else if (part[0] == '.') element = static_cast<std::uint32_t>(std::stoul(part.substr(2))) / 8;
      else {
        const std::size_t bracket = part.find('[');
        d.name = part.substr(0, bracket);
        if (bracket != std::string::npos) {
          const std::string inside = part.substr(bracket + 1, part.find(']') - bracket - 1);
          count = inside.empty() ? 0 : static_cast<std::uint32_t>(std::stoul(inside));
        }
      }
    }
    d.bytes = element * count;
    return d;
  }
  void variable(const std::string& space, const std::string& text) {
    if (space == ".global" || space == ".const" || text.find(".func") != std::string::npos) return;
    const declared d = declaration(text);
    if (space == ".extern") {
      p_.dynamic_shared.push_back(reg(d.name));
      p_.dynamic_align = std::max(p_.dynamic_align, d.align);
    } else if (space == ".shared") {
      p_.static_shared = aligned(p_.static_shared, d.align);
      constant(d.name, kSharedBase + p_.static_shared);
      p_.static_shared += d.bytes;
    } else {
      p_.thread_bytes = static_cast<int>(aligned(static_cast<std::uint32_t>(p_.thread_bytes), d.align));
      constant(d.name, static_cast<std::uint64_t>(p_.thread_bytes));
      p_.thread_bytes += static_cast<int>(d.bytes);
    }
  }
  void parameters(const std::string& text) {
    for (const std::string& part : split(text, ',')) {
      const declared d = declaration(part);
      p_.parameter_bytes = aligned(p_.parameter_bytes, std::max(d.align, std::min(d.bytes, 8u)));
      p_.parameters.emplace_back(reg(d.name), p_.parameter_bytes);
      p_.parameter_bytes += d.bytes;
    }
  }

  // Registers of an assembler block in braces are its own.
  int reg(const std::string& name) {
    std::string own = name;
    if (scopes_.size() > 1 && name[0] != '%' && name[0] != '_' && name.size() <= 2)
      own = name + "@" + std::to_string(scopes_.back());
    const auto [found, is_new] = registers_.emplace(own, next_);
    if (is_new) ++next_;
    return found->second;
  }
  int constant(const std::string& name, std::uint64_t value) {
    const bool known = registers_.contains(name);
    const int of = registers_.emplace(name, next_).first->second;
    if (!known) ++next_, p_.constants.emplace_back(of, value);
    return of;
  }
  int operand_of(const std::string& text) {
    if (const auto found = kSpecials.find(text); found != kSpecials.end()) {
      const bool known = registers_.contains(text);
      const int of = reg(text);
      if (!known) p_.specials.emplace_back(of, found->second);
      return of;
    }
    const char first = text[0];
    if (first == '0' && text.size() > 2 && (text[1] == 'f' || text[1] == 'd'))
      return constant(text, std::stoull(text.substr(2), nullptr, 16));
    if (std::isdigit(static_cast<unsigned char>(first)) || first == '-') {
      const bool negative = first == '-';
      std::string digits = text.substr(negative ? 1 : 0);
      if (digits.back() == 'U') digits.pop_back();
      const std::uint64_t value = std::stoull(digits, nullptr, 0);
      return constant(text, negative ? 0 - value : value);
    }
    return reg(text);
  }

  void statement() {
    instruction i;
    i.line = static_cast<int>(at_);  // a place, until all are read
    if (peek() == '@') {
      ++at_;
      i.guard_is = peek() != '!';
      if (!i.guard_is) ++at_;
      i.guard = reg(word());
      skip_space();
    }
    std::string name = word();
    if (name.back() == ':') {
      labels_[name.substr(0, name.size() - 1)] = static_cast<int>(p_.code.size());
      return;
    }
    i.name = name;
    const std::string operands = until(';');
    if (name == "bra" || name == "bra.uni") {
      std::string label = operands;
      label.erase(std::remove_if(label.begin(), label.end(), [](unsigned char c) { return std::isspace(c); }),
                  label.end());
      branches_.emplace_back(static_cast<int>(p_.code.size()), label);
    } else {
      operands_of(operands, i);
    }
    std::vector<std::string> parts = split(name, '.');
    parts.erase(std::remove(parts.begin(), parts.end(), ""), parts.end());
    if (!find_scalar(parts, i) && !find_joint(parts, i) && !find_memory(parts, i) && !find_asynchronous(parts, i))
      fail("unknown instruction " + name);
    p_.code.push_back(std::move(i));
  }
  // All of them in order, whatever braces and brackets there are.
  void operands_of(const std::string& text, instruction& i) {
    std::string token;
    bool adds = false;
    const auto close = [&] {
      if (!token.empty()) {
        if (adds) i.of.back().offset += std::stoll(token, nullptr, 0);
        else i.of.push_back({operand_of(token), 0});
      }
      token.clear(), adds = false;
    };
    for (const char c : text) {
      if (c == '{' && i.of.empty() && token.empty()) i.opens = true;
      if (std::strchr(" \t\r\n,{}[]()|", c)) close();
      else if (c == '+') close(), adds = true;
      else token += c;
    }
    close();
  }

  const std::string& text_;
  std::size_t at_ = 0;
  program p_;
  int next_ = 0, scope_ = 0;
  std::vector<int> scopes_;
  std::map<std::string, int> registers_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<int, std::string>> branches_;
};

}  // namespace

program read_program(const std::string& ptx) { return reader(ptx).read(); }

}  // namespace onepass::emulator
