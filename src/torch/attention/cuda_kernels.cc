// The kernels of tiles and of warps for lines that begin with `scores`, of a call's tensors.
#include "src/torch/attention/cuda_kernels.h"

#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/attention/probabilities_backward.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/attention/backward_sm80.h"
#include "src/torch/attention/batches.h"
#include "src/torch/call/frame.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

void describe_words(const spec::line& line, cuda::attention_call& call) {
  call.causal = spec::is_causal(line);
  call.leading_masks = spec::leading_masks(line);
  for (int i = 0; i < line.row; ++i) {
    const spec::word& w = line.words[static_cast<std::size_t>(i)];
    if (w.about->operand == operand_kind::tensor) call.brought.push_back(w.operand);
  }
}

void* data_of(const Tensor* t) { return t ? t->data_ptr() : nullptr; }

// A call's tensors as the kernels take them, if need be copies, which are kept.
class described {
 public:
  explicit described(const Tensor& keys) : own_(own_batch_sizes(keys)) { held_.reserve(kTensors); }

  cuda::batched_rows rows(const Tensor& t) {
    if (const auto rows = batched_rows(t, own_)) return *rows;
    return dense(torch::stable::contiguous(t));
  }
  cuda::batched_rows aligned_rows(const Tensor& t) {
    cuda::batched_rows found = rows(t);
    if (!cuda::fits(found)) found = dense(torch::stable::contiguous(t));
    return cuda::fits(found) ? found : dense(torch::stable::clone(held_.back()));
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

bool launch_attention(const spec::contraction& of, choice::implementation by, cuda::attention_call call,
                      const Tensor& queries, const Tensor& keys, const Tensor* values) {
  const device on = device_of(keys);
  described with(keys);
  describe_words(of.behind, call);
  call.queries = with.rows(queries), call.keys = with.rows(keys);
  if (values) call.values = with.rows(*values);
  if (!cuda::fits(call)) return false;
  void* const stream = current_stream(on.index);
  if (by == choice::implementation::cluster) return cuda::launch_held_scores(call, on.index, stream);
  cuda::launch_attention(call, on.index, stream);
  return true;
}

bool launch_by_warps(const prepared_contraction& c, const cuda::request& behind, const arguments& a_behind,
                     const Tensor& queries, const Tensor& given_keys, const values_to& to) {
  const device on = device_of(given_keys);
  const int own = own_batch_sizes(given_keys), dim = static_cast<int>(given_keys.dim());
  const auto with_strides = [&](const Tensor& t) { return own > 2 ? torch::stable::contiguous(t) : t; };
  const auto outer_stride = [&](const Tensor& t) { return own > 1 ? t.stride(own - 2) : 0; };
  const auto inner_stride = [&](const Tensor& t) { return own > 0 ? t.stride(own - 1) : 0; };
  const Tensor keys = with_strides(given_keys);
  const batches of(queries, keys);
  const std::int64_t inner = own > 0 ? keys.size(own - 1) : 1;
  frame before(c.before, queries, "x");
  before.input(queries, before.a.x);
  before.lay_out(true);
  const cuda::request entering = request_of(before, false);
  const cuda::scores_call with{{.before = entering,
                                .a_before = before.a,
                                .behind = behind,
                                .a_behind = a_behind,
                                .matrix = keys.data_ptr(),
                                .matrix_stride = keys.stride(dim - 2),
                                .depth = keys.size(dim - 1)},
                               of.count() / inner,
                               inner,
                               outer_stride(keys),
                               inner_stride(keys)};
  if (keys.stride(dim - 1) != 1 || !cuda::fits(with)) return false;
  if (to.values == nullptr) {
    cuda::launch_scores(with, on.index, current_stream(on.index));
    return true;
  }
  const Tensor values = with_strides(*to.values);
  const cuda::warp_attention_call all{with,
                                      values.data_ptr(),
                                      values.stride(dim - 2),
                                      outer_stride(values),
                                      inner_stride(values),
                                      values.size(dim - 1),
                                      to.y,
                                      spec::is_causal(c.parts.behind)};
  if (values.stride(dim - 1) != 1 || !cuda::fits(all)) return false;
  cuda::launch_warp_attention(all, on.index, current_stream(on.index));
  return true;
}

bool launch_attention_gradients(const spec::contraction& of, cuda::attention_call call, const Tensor& queries,
                                const Tensor& keys, const Tensor& values, const Tensor& result, const Tensor& gradient,
                                const attention_gradients_to& to) {
  const device on = device_of(keys);
  described with(keys);
  describe_words(of.behind, call);
  call.queries = with.rows(queries), call.keys = with.rows(keys), call.values = with.rows(values);
  const cuda::batched_rows& all = call.queries;
  const std::int64_t tiles = (all.rows + kWarpgroupRows - 1) / kWarpgroupRows,
                     bytes[1] = {all.outer * all.inner * all.group * tiles * kWarpgroupRows *
                                 std::int64_t{sizeof(softmax_statistics)}};
  const Tensor statistics = empty(bytes, 1, dtype::boolean, on);
  const cuda::attention_gradients_call gradients{.of = call,
                                                 .gradients = with.aligned_rows(gradient),
                                                 .result = result.data_ptr(),
                                                 .statistics = static_cast<softmax_statistics*>(statistics.data_ptr()),
                                                 .queries = data_of(to.queries),
                                                 .keys = data_of(to.keys),
                                                 .values = data_of(to.values)};
  if (!cuda::fits(gradients)) return false;
  cuda::launch_attention_gradients(gradients, on.index, current_stream(on.index));
  return true;
}

bool launch_warp_gradients(const spec::contraction& of, const cuda::attention_call& call, const Tensor& given_queries,
                           const Tensor& keys, const Tensor& values, const Tensor& result, const Tensor& given_gradient,
                           const attention_gradients_to& to) {
  const device on = device_of(keys);
  const Tensor queries = torch::stable::contiguous(given_queries), gradient = torch::stable::contiguous(given_gradient);
  const batches all(queries, keys);
  const std::int64_t bytes[1] = {all.count() * all.row_count() * std::int64_t{sizeof(softmax_statistics)}};
  const Tensor statistics = empty(bytes, 1, dtype::boolean, on);
  described with(keys);
  const cuda::warp_gradients_call gradients{.behind = call.behind,
                                            .a_behind = call.a_behind,
                                            .causal = spec::is_causal(of.behind),
                                            .queries = queries.data_ptr(),
                                            .gradients = gradient.data_ptr(),
                                            .result = result.data_ptr(),
                                            .keys = with.aligned_rows(keys),
                                            .values = with.aligned_rows(values),
                                            .rows_of_batch = all.row_count(),
                                            .statistics = static_cast<softmax_statistics*>(statistics.data_ptr()),
                                            .to_queries = data_of(to.queries),
                                            .to_keys = data_of(to.keys),
                                            .to_values = data_of(to.values)};
  if (!cuda::fits(gradients)) return false;
  cuda::launch_warp_gradients(gradients, on.index, current_stream(on.index));
  return true;
}

bool launch_score_gradients(float factor, const Tensor& queries, const Tensor& keys, const Tensor& weights,
                            const Tensor& gradient, const score_gradients_to& to) {
  const device on = device_of(keys);
  described with(keys);
  const cuda::score_gradients_call call{.type = dtype_of(keys),
                                        .factor = factor,
                                        .queries = with.aligned_rows(queries),
                                        .keys = with.aligned_rows(keys),
                                        .weights = with.aligned_rows(weights),
                                        .gradients = with.aligned_rows(gradient),
                                        .to_queries = to.queries.data_ptr(),
                                        .to_keys = to.keys.data_ptr()};
  std::optional<Tensor> parts;
  const auto room_for = [&](std::int64_t count) { return parts.emplace(empty(&count, 1, dtype::f32, on)).data_ptr(); };
  return cuda::fits(call) && cuda::launch_score_gradients(call, room_for, on.index, current_stream(on.index));
}

}  // namespace onepass::binding
