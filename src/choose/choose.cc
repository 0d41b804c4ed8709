// The one decision of how a call of a line with `linear`, `scores` or `values` is computed.
#include "src/choose/choose.h"

#include <algorithm>

#include "src/choose/ways.h"

namespace onepass::choice {
namespace {

bool is_empty(const sizes& of) { return of.rows == 0 || of.depth == 0 || of.columns == 0 || of.matrices == 0; }

}  // namespace

std::string why_not_in_one_kernel(const call& c, const way& w) {
  if (is_empty(c.sizes) || (c.values && c.value_depth == 0)) return "there is nothing to compute";
  if (!c.one_dtype && w.by != implementation::panels && w.by != implementation::chunks)
    return c.of.scores ? "x and the keys must have one dtype" : "x and the matrix must have one dtype";
  if (c.unfit >> static_cast<int>(w.by) & 1) {
    return w.by == implementation::small_n ? "its rows are too long" : "rows must begin at multiples of 16 bytes";
  }
  return "";
}

namespace {

// Ways are ordered by rank, then by time.
bool is_better(const way& a, const way& b) {
  if (a.serves() != b.serves()) return a.serves();
  return a.rank != b.rank ? a.rank < b.rank : a.seconds < b.seconds;
}

std::size_t best(const std::vector<way>& ways, spec::strategy named) {
  const way* found = nullptr;
  for (const way& w : ways)
    if ((named == spec::strategy::automatic || w.how == named) && (found == nullptr || is_better(w, *found)))
      found = &w;
  return static_cast<std::size_t>(found - ways.data());
}

// A strategy that is none of those for the call.
std::string why_not_here(const call& c, bool on_cpu) {
  if (spec::gives_numbers(c.of)) return "it has no kernel for endings behind 'linear'";
  if (c.named == spec::strategy::chunked) return spec::why_not_chunked(c.of);
  return on_cpu ? "its kernel is for CUDA" : "it is for the CPU";
}

}  // namespace

decision choose(const call& c, const cuda::device_facts* chip) {
  decision d;
  d.ways = chip == nullptr ? cpu_ways(c) : c.of.scores ? attention_ways(c, *chip) : linear_ways(c, *chip);
  const auto is_named = [&](const way& w) { return w.how == c.named; };
  if (c.named != spec::strategy::automatic && std::none_of(d.ways.begin(), d.ways.end(), is_named))
    d.ways.push_back({.how = c.named, .why_not = why_not_here(c, chip == nullptr)});
  for (way& w : d.ways)
    if (w.how != spec::strategy::unfused && w.serves()) w.why_not = why_not_in_one_kernel(c, w);
  d.taken = best(d.ways, c.named);
  return d;
}

way decision::of(spec::strategy how) const {
  if (chosen().how == how && chosen().serves()) return chosen();
  way found = ways[best(ways, how)];
  if (found.serves()) return found;
  for (const way& w : ways)
    if (w.how == how && found.why_not.find(w.why_not) == std::string::npos) found.why_not += "; or " + w.why_not;
  return found;
}

}  // namespace onepass::choice
