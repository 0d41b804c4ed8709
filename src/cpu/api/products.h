// The C++ API's lines with `linear`, or with `scores`, forward and backward.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "onepass/core.h"
#include "src/cpu/api/call_frame.h"
#include "src/cpu/page_pool.h"
#include "src/plan/attention.h"

namespace onepass {

struct parsed_line {
  explicit parsed_line(spec::line);
  const spec::line line;
  const std::optional<const spec::attention> attention;  // where it has `values`
  const std::optional<const spec::contraction> product;  // of what stands before those
  const spec::reads reads;                               // in backward
};

template <class T>
std::vector<T> part_of(const std::vector<T>& all, int begin, int end) {
  const int size = static_cast<int>(all.size());
  return {all.begin() + std::min(begin, size), all.begin() + std::min(end, size)};
}

// Dense tensors of a call's own.
class scratch {
 public:
  tensor operator()(const sizes_of& sizes, dtype type) {
    std::int64_t bytes = size_of(type);
    for (const std::int64_t size : sizes) bytes *= size;
    return {held_.emplace_back(bytes).data(), type, sizes};
  }

 private:
  std::deque<cpu::large_memory> held_;
};

// Of `linear`, `scores` or `values`: that there are products of its dtype here.
void require_product(const tensor&, const std::string& name);
// (..., columns) as rows.
cpu::matrix rows_of(const tensor&, const std::string& name);
// A tensor of such sizes that is elsewhere: all its numbers are one.
tensor elsewhere_like(const tensor&, const sizes_of&);

void forward_of_linear(const spec::contraction&, const values&);
void backward_of_linear(const spec::contraction&, const values&, const gradients&);
void forward_of_scores(const parsed_line&, const values&);
void backward_of_scores(const parsed_line&, const values&, const gradients&);

}  // namespace onepass
