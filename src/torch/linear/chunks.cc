// A line with endings behind `linear`: the GEMM, the epilogue and their gradients, a chunk of rows at a time.
#include "src/torch/linear/chunks.h"

#include <algorithm>
#include <atomic>

#include "src/choose/choose.h"
#include "src/cuda/row/configuration.h"
#include "src/torch/matrix_product.h"

namespace onepass::binding {
namespace {

std::atomic<void (*)(void*, void*, void*)> add_product_to = nullptr;

using optional_tensor = std::optional<Tensor>;

// A call, its rows one behind the other.
struct chunked_call {
  const prepared_contraction& parts;
  const Tensor input;                  // (rows, K), of the matrix' dtype
  const Tensor& weight;                // (V, K)
  const Tensor matrix;                 // the same, padded
  const std::vector<Tensor> operands;  // of the epilogue: columns, (rows, V), or (rows) of targets
  const std::int64_t rows;             // of a chunk
};

// Rows of a matrix, or numbers of a vector.
Tensor rows_of(const Tensor& t, std::int64_t begin, std::int64_t count) {
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  sizes[0] = count;
  return view_of(t, sizes, strides, begin * strides[0]);
}

// Rows of statistics (statistics, rows).
Tensor columns_of(const Tensor& t, std::int64_t begin, std::int64_t count) {
  return view_of(t, {t.size(0), count}, {t.stride(0), t.stride(1)}, begin * t.stride(1));
}

void copy_to(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }

Tensor fresh(std::initializer_list<std::int64_t> sizes, dtype type, const device& on) {
  return empty(sizes.begin(), static_cast<int>(sizes.size()), type, on);
}

dtype arithmetic_of(const Tensor& t) { return result_dtype(dtype_of(t), dtype::f32); }

constexpr std::int64_t kFewRows = 64;  // the products of so many gain as long as it takes to pad a matrix

// Of a row of the matrix' products: on CUDA each begins at 16 bytes, and threads read none of what others write where a
// gradient takes a product's place.
std::int64_t padded_words(const Tensor& matrix) {
  const std::int64_t step = device_of(matrix).is_cuda() ? 16 / size_of(dtype_of(matrix)) : 1;
  return (matrix.size(0) + step - 1) / step * step;
}

// With zeros behind its rows, for products of so many rows: cuBLAS takes several times as long where their numbers are
// no multiple of 16 bytes (30522, 50257 and 51865 words are not), wherever rows begin.
Tensor padded(const Tensor& matrix, std::int64_t rows) {
  const std::int64_t words = matrix.size(0), all = padded_words(matrix);
  if (all == words || rows < kFewRows) return matrix;
  const Tensor made = fresh({all, matrix.size(1)}, dtype_of(matrix), device_of(matrix));
  copy_to(rows_of(made, 0, words), matrix);
  Tensor behind = rows_of(made, words, all - words);
  torch::stable::zero_(behind);
  return made;
}

// The gradient of the matrix: a sum of one product a chunk (see choice::kFewChunks).
class matrix_sum {
 public:
  matrix_sum(const Tensor& matrix, std::int64_t products)
      : type_(dtype_of(matrix)),
        is_wide_(size_of(type_) == 2 && products > choice::kFewChunks),
        sum_(fresh({matrix.size(0), matrix.size(1)}, is_wide_ ? dtype::f32 : type_, device_of(matrix))) {}

  // a (rows, V), b (rows, K): the sum of all aᵀ b.
  void add(const Tensor& a, const Tensor& b) {
    if (!is_wide_) {
      if (is_first_) product_into(sum_, transposed(a), b);
      else multiply(sum_, transposed(a), b, &sum_);
    } else if (auto* const add = device_of(a).is_cuda() ? add_product_to.load(std::memory_order_acquire) : nullptr) {
      if (is_first_) torch::stable::zero_(sum_);
      const Tensor left = transposed(a);
      add(sum_.get(), left.get(), b.get());
    } else {
      const Tensor left = in_dtype(transposed(a), dtype::f32), right = in_dtype(b, dtype::f32);
      multiply(sum_, left, right, is_first_ ? nullptr : &sum_);
    }
    is_first_ = false;
  }
  // The first so many rows.
  Tensor result(std::int64_t words) {
    if (is_first_) torch::stable::zero_(sum_);  // of no rows
    return in_dtype(words == sum_.size(0) ? sum_ : rows_of(sum_, 0, words), type_);
  }

 private:
  const dtype type_;
  const bool is_wide_;
  bool is_first_ = true;
  Tensor sum_;
};

// The epilogue's operands of a chunk: columns as they are, rows and targets for its rows.
std::vector<Tensor> operands_of(const chunked_call& call, std::int64_t begin, std::int64_t count) {
  const spec::line& line = call.parts.behind.line;
  std::vector<Tensor> some;
  for (int i = 0; i < line.operands; ++i) {
    const Tensor& t = call.operands[static_cast<std::size_t>(i)];
    some.push_back(line.operand_word(i).about->operand == operand_kind::column ? t : rows_of(t, begin, count));
  }
  return some;
}

// Gradients of the epilogue's operands, but for that of what `linear` gives: rows are stored chunk by chunk, columns
// are summed in the arithmetic's dtype.
class gradients_behind {
 public:
  gradients_behind(const chunked_call& call, const spec::contraction_gradients& plan, std::int64_t rows,
                   std::int64_t chunks)
      : plan_(plan) {
    const std::int64_t columns = call.weight.size(0);
    const device on = device_of(call.weight);
    for (const int i : plan.kept_outputs) {
      all_.push_back(output(i).column ? fresh({chunks, columns}, arithmetic_of(call.weight), on)
                                      : fresh({rows, columns}, output(i).type, on));
    }
  }
  void take(const std::vector<Tensor>& made, std::int64_t begin, std::int64_t chunk) {
    for (std::size_t k = 0; k < all_.size(); ++k) {
      const Tensor& from = made[static_cast<std::size_t>(plan_.kept_outputs[k])];
      if (output(plan_.kept_outputs[k]).column) copy_to(rows_of(all_[k], chunk, 1), from);
      else copy_to(rows_of(all_[k], begin, from.size(0)), from);
    }
  }
  std::vector<Tensor> results() const {
    std::vector<Tensor> results;
    for (std::size_t k = 0; k < all_.size(); ++k) {
      const spec::gradient_output& of = output(plan_.kept_outputs[k]);
      const std::int64_t first[1] = {0};
      results.push_back(
          of.column ? in_dtype(torch::stable::sum(all_[k], torch::headeronly::IntHeaderOnlyArrayRef(first, 1)), of.type)
                    : all_[k]);
    }
    return results;
  }

 private:
  const spec::gradient_output& output(int i) const { return plan_.behind.outputs[static_cast<std::size_t>(i)]; }

  const spec::contraction_gradients& plan_;
  std::vector<Tensor> all_;
};

// The chunks of a call, one after the other: the memory of what `linear` gives is one chunk's.
class product_chunks {
 public:
  explicit product_chunks(const chunked_call& call)
      : call_(call),
        rows_(call.input.size(0)),
        memory_(fresh({std::min(call.rows, rows_), padded_words(call.weight)}, dtype_of(call.weight),
                      device_of(call.weight))) {}

  std::int64_t count() const { return (rows_ + call_.rows - 1) / call_.rows; }

  // does(begin, rows, number, input, product) of each.
  template <class Does>
  void each(const Does& does) const {
    const Tensor matrix = transposed(call_.matrix);
    for (std::int64_t begin = 0, number = 0; begin < rows_; begin += call_.rows, ++number) {
      const std::int64_t rows = std::min(call_.rows, rows_ - begin);
      const Tensor input = rows_of(call_.input, begin, rows);
      product_into(columns(rows, 0, call_.matrix.size(0)), input, matrix);
      does(begin, rows, number, input, columns(rows, 0, call_.weight.size(0)));
    }
  }

  // A chunk's gradient of its product, padded as the matrix is.
  Tensor padded_gradient(const Tensor& gradient) const {
    const std::int64_t rows = gradient.size(0), words = call_.weight.size(0), all = call_.matrix.size(0);
    if (all == words) return gradient;
    if (gradient.data_ptr() != memory_.data_ptr()) copy_to(columns(rows, 0, words), gradient);
    Tensor behind = columns(rows, words, all - words);
    torch::stable::zero_(behind);
    return columns(rows, 0, all);
  }

 private:
  Tensor columns(std::int64_t rows, std::int64_t begin, std::int64_t count) const {
    return view_of(memory_, {rows, count}, {memory_.size(1), 1}, begin);
  }

  const chunked_call& call_;
  const std::int64_t rows_;
  const Tensor memory_;
};

// Forward of the epilogue, chunk by chunk.
class numbers_behind {
 public:
  numbers_behind(const chunked_call& call, std::int64_t rows) : parts_(call.parts) {
    const device on = device_of(call.weight);
    for (int i = 0; i < parts_.behind.line.results(); ++i)
      all_.push_back(fresh({rows}, arithmetic_of(call.weight), on));
  }
  // Gives the chunk's statistics, where they are saved.
  std::optional<Tensor> take(const Tensor& product, const std::vector<Tensor>& operands, std::int64_t begin,
                             bool saves) {
    std::vector<Tensor> made = forward({product, operands, parts_.behind, std::nullopt, saves});
    std::optional<Tensor> statistics;
    if (saves) statistics = made.back(), made.pop_back();
    for (std::size_t i = 0; i < all_.size(); ++i) copy_to(rows_of(all_[i], begin, product.size(0)), made[i]);
    return statistics;
  }
  const std::vector<Tensor>& results() const { return all_; }

 private:
  const prepared_contraction& parts_;
  std::vector<Tensor> all_;
};

// Columns' gradients of a chunk are not rounded: they are summed.
std::vector<std::int64_t> types_of_chunk(const chunked_call& call, const std::vector<std::int64_t>& types) {
  const spec::line& line = call.parts.behind.line;
  std::vector<std::int64_t> wide = types;
  for (int i = 0; i < line.operands; ++i)
    if (line.operand_word(i).about->operand == operand_kind::column)
      wide[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(arithmetic_of(call.weight));
  return wide;
}

std::vector<std::int64_t> sizes_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }
std::vector<std::int64_t> leading_sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end() - 1}; }
Tensor as_vector(const Tensor& numbers) {
  return torch::stable::reshape(numbers, {static_cast<std::int64_t>(numbers.numel())});
}

// leading: x's dimensions but for the last.
chunked_call chunked(const prepared_contraction& parts, const Tensor& input, const Tensor& w,
                     std::vector<Tensor> operands, std::vector<std::int64_t> leading) {
  const std::int64_t columns = w.size(0);
  leading.push_back(columns);
  for (int i = 0; i < parts.behind.line.operands; ++i) {
    Tensor& t = operands[static_cast<std::size_t>(i)];
    const operand_kind kind = parts.behind.line.operand_word(i).about->operand;
    if (kind == operand_kind::target) t = as_vector(t);
    if (kind == operand_kind::tensor)
      t = as_matrix(expanded(t, {static_cast<int>(leading.size()), leading.data()}), columns);
  }
  const Tensor rows = as_matrix(in_dtype(input, dtype_of(w)), w.size(1));
  const choice::sizes sizes{.rows = rows.size(0), .depth = w.size(1), .columns = columns, .type = dtype_of(w)};
  return {parts, rows, w, padded(w, rows.size(0)), operands, choice::chunk_rows(sizes, !device_of(w).is_cuda())};
}

chunked_call chunked(const forward_call& call, const Tensor& input) {
  const prepared_contraction& parts = *call.line.contraction;
  const Tensor& w = call.operands[static_cast<std::size_t>(parts.parts.weight)];
  const std::vector<Tensor> operands = part_of(call.operands, parts.parts.weight + 1, call.line.line.operands);
  const Tensor product = shape_of_product(call.x, w);
  frame checks(parts.behind, product, "x");
  for (int i = 0; i < parts.behind.line.operands; ++i) checks.operand(i, operands[static_cast<std::size_t>(i)]);
  return chunked(parts, input, w, operands, leading_sizes_of(call.x));
}

// Each with x's leading dimensions.
std::vector<Tensor> as_rows_of(const Tensor& x, const std::vector<Tensor>& numbers) {
  const std::vector<std::int64_t> leading = leading_sizes_of(x);
  std::vector<Tensor> results;
  for (const Tensor& each : numbers) results.push_back(torch::stable::reshape(each, {leading.data(), leading.size()}));
  return results;
}

// with_forward: forward of a chunk runs before its backward, else it has run, and these are the epilogue's statistics.
chunked_results backward_in_chunks(const chunked_call& call, const backward_call& whole,
                                   const spec::contraction_gradients& plan, const optional_tensor& statistics,
                                   bool with_forward) {
  const spec::line& line = whole.line.line;
  std::vector<Tensor> all_upstream{as_vector(whole.gradients[0])};
  for (int k = call.parts.before.line.keeps; k < line.keeps; ++k)
    all_upstream.push_back(as_vector(whole.gradients[static_cast<std::size_t>(k) + 1]));
  const prepared_contraction& parts = call.parts;
  const std::int64_t rows = call.input.size(0);
  const product_chunks chunks(call);
  const std::vector<std::int64_t> types =
      types_of_chunk(call, part_of(whole.operand_types, call.parts.parts.weight + 1, line.operands));
  gradients_behind behind(call, plan, rows, chunks.count());
  std::optional<numbers_behind> numbers;
  if (with_forward) numbers.emplace(call, rows);
  std::optional<matrix_sum> sum;
  if (plan.wants_weight) sum.emplace(call.matrix, chunks.count());
  const auto wanted_behind = static_cast<std::int64_t>(plan.wants_behind);
  chunked_results results;
  if (plan.wants_input)
    results.input = fresh({rows, call.weight.size(1)}, dtype_of(call.weight), device_of(call.weight));
  chunks.each(
      [&](std::int64_t begin, std::int64_t count, std::int64_t chunk, const Tensor& input, const Tensor& product) {
        const std::vector<Tensor> some = operands_of(call, begin, count);
        std::optional<Tensor> saved;
        if (numbers) saved = numbers->take(product, some, begin, parts.behind.reads.statistics);
        else if (statistics) saved = torch::stable::contiguous(columns_of(*statistics, begin, count));
        std::vector<Tensor> upstream;
        for (const Tensor& t : all_upstream) upstream.push_back(rows_of(t, begin, count));
        const std::vector<std::optional<Tensor>> given(some.begin(), some.end());
        const std::optional<Tensor> none, x = product;
        backward_call back{upstream, x, given, none, saved, none, parts.behind, types, wanted_behind};
        back.dx = &product;  // endings' gradients need no sum over the row
        const std::vector<Tensor> made = backward(back);
        behind.take(made, begin, chunk);
        if (!plan.wants_input && !plan.wants_weight) return;
        const Tensor gradient = chunks.padded_gradient(made[static_cast<std::size_t>(plan.behind.inputs[0])]);
        if (results.input) product_into(rows_of(*results.input, begin, count), gradient, call.matrix);
        if (sum) sum->add(gradient, input);
      });
  results.behind = behind.results();
  std::vector<std::int64_t> sizes = sizes_of(whole.gradients[0]);
  sizes.push_back(call.weight.size(0));
  for (Tensor& t : results.behind)
    if (t.dim() == 2) t = torch::stable::reshape(t, {sizes.data(), sizes.size()});  // of an operand that is rows
  if (sum) results.weight = sum->result(call.weight.size(0));
  if (numbers) results.numbers = numbers->results();
  return results;
}

}  // namespace

void let_products_add(void (*add)(void*, void*, void*)) { add_product_to.store(add, std::memory_order_release); }

std::vector<Tensor> numbers_in_chunks(const forward_call& whole, const Tensor& input, bool saves) {
  const chunked_call call = chunked(whole, input);
  const std::int64_t rows = call.input.size(0);
  const int count = call.parts.behind.line.statistics(dtype_of(call.weight));
  optional_tensor statistics;
  if (saves) statistics = fresh({count, rows}, arithmetic_of(call.weight), device_of(call.weight));
  numbers_behind numbers(call, rows);
  product_chunks(call).each(
      [&](std::int64_t begin, std::int64_t some, std::int64_t, const Tensor&, const Tensor& product) {
        const optional_tensor saved = numbers.take(product, operands_of(call, begin, some), begin, saves);
        if (saved) copy_to(columns_of(*statistics, begin, some), *saved);
      });
  std::vector<Tensor> results = as_rows_of(whole.x, numbers.results());
  if (saves) results.push_back(*statistics);
  return results;
}

chunked_results gradients_in_chunks(const backward_call& whole, const spec::contraction_gradients& plan,
                                    const Tensor& input, const optional_tensor& statistics) {
  const prepared_contraction& parts = *whole.line.contraction;
  const int weight = parts.parts.weight;
  const std::vector<Tensor> operands = given_operands(whole, weight + 1, whole.line.line.operands);
  const Tensor& w = given_operand(whole, weight);
  const chunked_call call = chunked(parts, input, w, operands, sizes_of(whole.gradients[0]));
  return backward_in_chunks(call, whole, plan, statistics, false);
}

chunked_results numbers_and_gradients_in_chunks(const forward_call& whole, const backward_call& backward,
                                                const spec::contraction_gradients& plan, const Tensor& input) {
  const chunked_call call = chunked(whole, input);
  chunked_results results = backward_in_chunks(call, backward, plan, {}, true);
  results.numbers = as_rows_of(whole.x, results.numbers);
  return results;
}

}  // namespace onepass::binding
