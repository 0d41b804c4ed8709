// A line with `linear` in one kernel on CUDA (src/cuda/linear.h).
#include "src/torch/tiled_linear.h"

#include <torch/csrc/stable/accelerator.h>

#include "src/cuda/linear.h"
#include "src/cuda/strategy.h"
#include "src/torch/check.h"
#include "src/torch/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

// What the words before `linear`, or behind it, take: of the call's operands those from `first` on.
void take(frame& f, const Tensor& x, const forward_call& call, int first) {
  f.input(x, f.a.x);
  for (int i = 0; i < f.line.line.operands; ++i) f.operand(i, call.operands[static_cast<std::size_t>(first + i)]);
  f.boolean_masks = boolean_masks_of(f);
  f.dropout_state(call.dropout_state);
}

// Empty where the kernel is to be used.
std::optional<std::string> why_not_tiled(const forward_call& call, const Tensor& w) {
  const device on = device_of(call.x);
  const dtype type = dtype_of(w);
  if (!on.is_cuda()) return "its kernel is for CUDA";
  if (dtype_of(call.x) != type) return "x and the matrix must have one dtype";
  if (call.x.numel() == 0 || w.size(0) == 0) return "there is nothing to compute";
  const spec::shape shape = shape_of(call.x);
  const std::vector<cuda::prediction> all =
      cuda::predict(call.line.contraction->parts,
                    {shape.rows(), shape.columns(), w.size(0), type, call.save_statistics}, cuda::facts(on.index));
  const cuda::prediction& tiled = all[static_cast<std::size_t>(spec::strategy::tiled) - 1];
  if (!tiled.why_not.empty()) return tiled.why_not;
  const bool named = call.line.line.how == spec::strategy::tiled;
  return named || cuda::best(all).how == spec::strategy::tiled ? std::nullopt : std::optional<std::string>("slower");
}

// Where the line names the strategy, why it cannot be.
std::nullopt_t refuse(const forward_call& call, const std::string& why) {
  ONEPASS_CHECK(call.line.line.how != spec::strategy::tiled, "onepass: 'linear(tiled)' cannot take this call: ", why);
  return std::nullopt;
}

}  // namespace

std::optional<std::vector<Tensor>> forward_tiled(const forward_call& call) {
  if (call.line.line.how == spec::strategy::unfused) return {};
  const prepared_contraction& c = *call.line.contraction;
  const Tensor& w = call.operands[static_cast<std::size_t>(c.parts.weight)];
  if (const std::optional<std::string> why = why_not_tiled(call, w)) return refuse(call, *why);
  const device on = device_of(call.x);
  const dtype type = dtype_of(w);
  const bool makes_input = !c.before.line.words.empty();
  const bool saves_product = call.save_statistics && call.line.reads.product;
  const bool saves_statistics = call.save_statistics && c.before.reads.statistics;

  spec::shape shape = shape_of(call.x);
  std::vector<std::int64_t> sizes(shape.sizes, shape.sizes + shape.dim);
  const std::int64_t rows = shape.rows(), depth = shape.columns();
  sizes.back() = w.size(0);
  Tensor result = empty(sizes.data(), shape.dim, type, on);

  std::vector<Tensor> kept, statistics;
  std::optional<frame> before;
  Tensor input = as_matrix(call.x, depth);
  if (makes_input) {
    take(before.emplace(c.before, call.x, "x"), call.x, call, 0);
    input = before->output(before->a.y, type);
    for (int k = 0; k < c.before.line.keeps; ++k) kept.push_back(before->output(before->a.kept[k], type));
    if (saves_statistics) statistics.push_back(before->fresh_statistics());
    before->lay_out(true);
  }
  frame behind(saves_product ? c.behind_keeping : c.behind, result, "x");
  take(behind, result, call, c.parts.weight + 1);
  behind.input(result, behind.a.y);
  std::vector<Tensor> kept_behind;
  for (int k = 0; k < behind.line.line.keeps; ++k) kept_behind.push_back(behind.output(behind.a.kept[k], type));
  behind.lay_out(true);

  const torch::stable::accelerator::DeviceGuard guard(on.index);
  const cuda::request request_before = makes_input ? request_of(*before, false) : cuda::request();
  const cuda::request request_behind = request_of(behind, false);
  const arguments none{};
  const std::int64_t panels[1] = {(rows + cuda::kReadyRows - 1) / cuda::kReadyRows};
  const Tensor ready = empty(panels, 1, dtype::f32, on);
  const cuda::linear_call of{request_before,
                             makes_input ? before->a : none,
                             request_behind,
                             behind.a,
                             makes_input,
                             input.data_ptr(),
                             makes_input ? depth : input.stride(0),
                             w.data_ptr(),
                             w.stride(0),
                             depth,
                             static_cast<unsigned*>(ready.data_ptr())};
  if (w.stride(1) != 1 || (!makes_input && input.stride(1) != 1) || !cuda::fits(of))
    return refuse(call, "rows must begin at multiples of 16 bytes");
  if (makes_input) torch::stable::zero_(const_cast<Tensor&>(ready));
  cuda::launch(of, on.index, current_stream(on.index));

  std::vector<Tensor> results{result};
  results.insert(results.end(), kept.begin(), kept.end());
  results.insert(results.end(), kept_behind.begin() + saves_product, kept_behind.end());
  if (saves_product) results.push_back(kept_behind.front());
  results.insert(results.end(), statistics.begin(), statistics.end());
  return results;
}

}  // namespace onepass::binding
