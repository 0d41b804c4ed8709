// A JSON writer for the few shapes that the Python front reads.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

namespace onepass::binding {

class json {
 public:
  json& begin(char bracket) { return comma(), text_ += bracket, fresh_ = true, *this; }
  json& end(char bracket) { return text_ += bracket, fresh_ = false, *this; }
  json& key(std::string_view name) { return comma(), quote(name), text_ += ':', fresh_ = true, *this; }
  json& value(std::string_view text) { return comma(), quote(text), *this; }
  json& value(const std::string& text) { return value(std::string_view(text)); }
  json& value(const char* text) { return value(std::string_view(text)); }
  json& value(bool b) { return comma(), text_ += b ? "true" : "false", *this; }
  json& value(std::int64_t n) { return comma(), text_ += std::to_string(n), *this; }
  json& value(int n) { return value(static_cast<std::int64_t>(n)); }
  json& value(double x) {
    if (!std::isfinite(x)) return comma(), text_ += std::isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity", *this;
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", x);
    return comma(), text_ += digits, *this;
  }
  json& null() { return comma(), text_ += "null", *this; }
  template <class T>
  json& field(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  const std::string& text() const { return text_; }

 private:
  void comma() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }
  void quote(std::string_view s) {
    text_ += '"';
    for (char c : s) {
      if (c == '"' || c == '\\') text_ += '\\', text_ += c;
      else if (c == '\n') text_ += "\\n";
      else if (static_cast<unsigned char>(c) < 0x20) text_ += ' ';
      else text_ += c;
    }
    text_ += '"';
  }
  std::string text_;
  bool fresh_ = true;
};

}  // namespace onepass::binding
