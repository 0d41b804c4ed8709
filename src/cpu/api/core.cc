// onepass from C++, without PyTorch: a line on arrays of the CPU, forward and backward.
#include "onepass/core.h"

#include "src/cpu/api/call_frame.h"
#include "src/cpu/api/products.h"
#include "src/cpu/threads.h"
#include "src/settings.h"

namespace onepass {
namespace {

void require_count(std::size_t got, int expected, const char* what, const spec::line& of) {
  if (static_cast<int>(got) != expected)
    refuse("the line \"" + of.text + "\" takes " + std::to_string(expected) + " " + what + ", got " +
           std::to_string(got));
}
void require_counts(const spec::line& of, const values& v) {
  require_count(v.operands.size(), of.operands, "operands", of);
  require_count(v.kept.size(), of.keeps, "kept values", of);
}

std::optional<const spec::contraction> product_of(const spec::line& of,
                                                  const std::optional<const spec::attention>& attention) {
  if (of.linear < 0) return {};
  return spec::contraction(attention ? attention->scores : of);
}

spec::reads reads_of(const parsed_line& of) {
  if (of.attention) return spec::backward_reads(*of.attention);
  return of.product ? spec::backward_reads(*of.product) : spec::backward_reads(of.line);
}

}  // namespace

parsed_line::parsed_line(spec::line of)
    : line(std::move(of)),
      attention(line.values >= 0 ? std::optional<const spec::attention>(line) : std::nullopt),
      product(product_of(line, attention)),
      reads(reads_of(*this)) {}

line::line(std::string_view text) : parsed_(std::make_shared<const parsed_line>(spec::parse(text))) {
  if (parsed_->product && parsed_->product->scores && parsed_->product->behind.words.empty())
    refuse("\"" + parsed_->line.text + "\" is products alone, which are a library's work");
}

int line::operands() const { return parsed_->line.operands; }
int line::keeps() const { return parsed_->line.keeps; }
int line::statistics(dtype x) const { return parsed_->reads.statistics ? parsed_->line.statistics(x) : 0; }

void line::forward(const values& v) const {
  const parsed_line& of = *parsed_;
  require_counts(of.line, v);
  if (!of.product) forward_of_rows(of.line, v);
  else if (of.product->scores) forward_of_scores(of, v);
  else forward_of_linear(*of.product, v);
}

void line::backward(const values& v, const gradients& g) const {
  const parsed_line& of = *parsed_;
  require_counts(of.line, v);
  if (!of.product) backward_of_rows(of.line, v, g);
  else if (of.product->scores) backward_of_scores(of, v, g);
  else backward_of_linear(*of.product, v, g);
}

void set_include_dir(const std::string& path) { settings_now().include_dir = path; }
void set_parallel_for(parallel_for with, thread_count threads) { cpu::set_parallel_for(with, threads); }

}  // namespace onepass
