// The attention kernels on a call's tensors.
#include "src/torch/attention/cuda_kernels.h"

#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/attention/probabilities_backward.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/attention/backward.h"
#include "src/torch/attention/batches.h"
#include "src/torch/call/frame.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

void describe_words(const spec::line& line, cuda::attention_call& call) {
  call.causal = spec::is_causal(line);
  call.leading_masks = spec::leading_masks(line);
  for (int i = 0; i < line.first_row(); ++i) {
    const spec::word& w = line.words[static_cast<std::size_t>(i)];
    if (w.about->operand == operand_kind::tensor) call.prefetched.push_back(w.operand);
  }
}

// A call's tensors as the kernels take them. It holds the copies of those that are copied.
class kernel_tensors {
 public:
  explicit kernel_tensors(const Tensor& keys) : own_(own_batch_sizes(keys)) { held_.reserve(kTensors); }

  cuda::batched_rows rows(const Tensor& t) {
    if (const auto rows = batched_rows(t, own_)) return *rows;
    return dense(torch::stable::contiguous(t));
  }
  cuda::batched_rows aligned_rows(const Tensor& t) {
    cuda::batched_rows found = rows(t);
    if (!cuda::fits(found)) found = dense(torch::stable::contiguous(t));
    return cuda::fits(found) ? found : dense(torch::stable::clone(held_.back()));
  }
  strided_matrices written(const Tensor* t) const {
    return t ? cuda::matrices_of(*batched_rows(*t, own_)) : strided_matrices{};
  }

 private:
  cuda::batched_rows dense(const Tensor& t) {
    held_.push_back(t);
    return *batched_rows(t, own_);
  }
  static constexpr std::size_t kTensors = 6;
  int own_;
  std::vector<Tensor> held_;
};

}  // namespace

bool are_batched_rows(const Tensor& t, const Tensor& keys) {
  return batched_rows(t, own_batch_sizes(keys)).has_value();
}

bool launch_forward_sm90(const spec::contraction& of, choice::implementation by, cuda::attention_call call,
                         const Tensor& queries, const Tensor& keys, const values_and_output& to) {
  const device on = device_of(keys);
  kernel_tensors with(keys);
  describe_words(of.behind, call);
  call.queries = with.rows(queries), call.keys = with.rows(keys);
  if (to.values) call.values = with.rows(*to.values), call.y = with.written(to.y);
  if (!cuda::fits(call)) return false;
  void* const stream = current_stream(on.index);
  if (by == choice::implementation::cluster) return cuda::launch_probabilities_sm90(call, on.index, stream);
  cuda::launch_forward_sm90(call, on.index, stream);
  return true;
}

bool launch_forward_sm80(const prepared_contraction& c, const cuda::request& behind, const arguments& a_behind,
                         const Tensor& given_queries, const Tensor& given_keys, const values_and_output& to) {
  const device on = device_of(given_keys);
  const int own = own_batch_sizes(given_keys), dim = static_cast<int>(given_keys.dim());
  const auto with_rows = [&](const Tensor& t) { return t.stride(dim - 1) == 1 ? t : torch::stable::contiguous(t); };
  const auto with_strides = [&](const Tensor& t) { return own > 2 ? torch::stable::contiguous(t) : with_rows(t); };
  const auto outer_stride = [&](const Tensor& t) { return own > 1 ? t.stride(own - 2) : 0; };
  const auto inner_stride = [&](const Tensor& t) { return own > 0 ? t.stride(own - 1) : 0; };
  const Tensor queries = with_rows(given_queries), keys = with_strides(given_keys);
  const batches of(queries, keys);
  const std::int64_t inner = own > 0 ? keys.size(own - 1) : 1;
  frame before(c.before, queries, "x");
  before.input(queries, before.a.x);
  before.lay_out(true);
  const cuda::request entering = request_of(before, false);
  const cuda::probabilities_sm80_call with{{.before = entering,
                                            .a_before = before.a,
                                            .behind = behind,
                                            .a_behind = a_behind,
                                            .matrix = keys.data_ptr(),
                                            .matrix_stride = keys.stride(dim - 2),
                                            .k = keys.size(dim - 1)},
                                           of.count() / inner,
                                           inner,
                                           outer_stride(keys),
                                           inner_stride(keys)};
  if (!cuda::fits(with)) return false;
  if (to.values == nullptr) {
    cuda::launch_probabilities_sm80(with, on.index, current_stream(on.index));
    return true;
  }
  const Tensor values = with_strides(*to.values);
  const cuda::attention_sm80_call all{with,
                                      values.data_ptr(),
                                      values.stride(dim - 2),
                                      outer_stride(values),
                                      inner_stride(values),
                                      values.size(dim - 1),
                                      kernel_tensors(keys).written(to.y),
                                      spec::is_causal(c.parts.behind)};
  if (!cuda::fits(all)) return false;
  cuda::launch_attention_sm80(all, on.index, current_stream(on.index));
  return true;
}

bool launch_backward_sm90(const spec::contraction& of, cuda::attention_call call, const Tensor& queries,
                          const Tensor& keys, const Tensor& values, const Tensor& output, const Tensor& grad_output,
                          const attention_gradient_tensors& to) {
  const device on = device_of(keys);
  kernel_tensors with(keys);
  describe_words(of.behind, call);
  call.queries = with.rows(queries), call.keys = with.rows(keys), call.values = with.rows(values);
  const cuda::batched_rows& all = call.queries;
  const std::int64_t tiles = (all.rows + kWarpgroupRows - 1) / kWarpgroupRows,
                     bytes[1] = {all.outer * all.inner * all.query_heads * tiles * kWarpgroupRows *
                                 std::int64_t{sizeof(softmax_statistics)}};
  const Tensor statistics = empty(bytes, 1, dtype::boolean, on);
  const cuda::backward_sm90_call backward{.forward = call,
                                          .grad_output = with.aligned_rows(grad_output),
                                          .output = cuda::matrices_of(with.aligned_rows(output)),
                                          .statistics = static_cast<softmax_statistics*>(statistics.data_ptr()),
                                          .grad_queries = with.written(to.queries),
                                          .grad_keys = with.written(to.keys),
                                          .grad_values = with.written(to.values)};
  if (!cuda::fits(backward)) return false;
  cuda::launch_backward_sm90(backward, on.index, current_stream(on.index));
  return true;
}

bool launch_backward_sm80(const spec::contraction& of, const cuda::attention_call& call, const Tensor& given_queries,
                          const Tensor& keys, const Tensor& values, const Tensor& output,
                          const Tensor& given_grad_output, const attention_gradient_tensors& to) {
  const device on = device_of(keys);
  const Tensor queries = torch::stable::contiguous(given_queries),
               grad_output = torch::stable::contiguous(given_grad_output);
  const batches all(queries, keys);
  const std::int64_t bytes[1] = {all.count() * all.row_count() * std::int64_t{sizeof(softmax_statistics)}};
  const Tensor statistics = empty(bytes, 1, dtype::boolean, on);
  kernel_tensors with(keys);
  const cuda::backward_sm80_call backward{.behind = call.behind,
                                          .a_behind = call.a_behind,
                                          .causal = spec::is_causal(of.behind),
                                          .queries = queries.data_ptr(),
                                          .grad_output = grad_output.data_ptr(),
                                          .output = cuda::matrices_of(with.aligned_rows(output)),
                                          .keys = with.aligned_rows(keys),
                                          .values = with.aligned_rows(values),
                                          .rows_of_batch = all.row_count(),
                                          .statistics = static_cast<softmax_statistics*>(statistics.data_ptr()),
                                          .grad_queries = with.written(to.queries),
                                          .grad_keys = with.written(to.keys),
                                          .grad_values = with.written(to.values)};
  if (!cuda::fits(backward)) return false;
  cuda::launch_backward_sm80(backward, on.index, current_stream(on.index));
  return true;
}

bool launch_probabilities_backward(float factor, const Tensor& queries, const Tensor& keys, const Tensor& probabilities,
                                   const Tensor& grad_probabilities, const probabilities_gradient_tensors& to) {
  const device on = device_of(keys);
  kernel_tensors with(keys);
  const cuda::probabilities_backward_call call{.type = dtype_of(keys),
                                               .factor = factor,
                                               .queries = with.aligned_rows(queries),
                                               .keys = with.aligned_rows(keys),
                                               .probabilities = with.aligned_rows(probabilities),
                                               .grad_probabilities = with.aligned_rows(grad_probabilities),
                                               .grad_queries = to.queries.data_ptr(),
                                               .grad_keys = to.keys.data_ptr()};
  std::optional<Tensor> partial_sums;
  const auto room_for = [&](std::int64_t count) {
    return partial_sums.emplace(empty(&count, 1, dtype::f32, on)).data_ptr();
  };
  return cuda::fits(call) && cuda::launch_probabilities_backward(call, room_for, on.index, current_stream(on.index));
}

}  // namespace onepass::binding
