// A line with `linear` in one kernel on CUDA (src/cuda/linear.h).
#include "src/torch/tiled_linear.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstdint>

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
  auto operand = call.operands.begin() + first;
  for (int i = 0; i < f.line.line.operands; ++i) f.operand(i, *operand++);
  f.boolean_masks = boolean_masks_of(f);
  f.dropout_state(call.dropout_state);
}

// The kernel's way to take the call, or why there is none.
struct chosen {
  spec::strategy how = spec::strategy::unfused;
  std::string why_not;
};
chosen choose(const forward_call& call, const Tensor& w) {
  const device on = device_of(call.x);
  const dtype type = dtype_of(w);
  if (!on.is_cuda()) return {.why_not = "its kernel is for CUDA"};
  if (dtype_of(call.x) != type) return {.why_not = "x and the matrix must have one dtype"};
  if (call.x.numel() == 0 || w.size(0) == 0) return {.why_not = "there is nothing to compute"};
  const spec::shape shape = shape_of(call.x);
  const std::vector<spec::prediction> all =
      cuda::predict(call.line.contraction->parts,
                    {shape.rows(), shape.columns(), w.size(0), type, call.save_statistics && call.line.reads.product},
                    cuda::facts(on.index));
  const spec::strategy named = call.line.line.how;
  if (named == spec::strategy::automatic) return {cuda::best(all).how, ""};
  const std::string& why_not = all[static_cast<std::size_t>(named) - 1].why_not;
  return {why_not.empty() ? named : spec::strategy::unfused, why_not};
}

// Where the line names a strategy, why it cannot be.
std::nullopt_t refuse(const forward_call& call, const std::string& why) {
  const spec::strategy how = call.line.line.how;
  ONEPASS_CHECK(how == spec::strategy::automatic, "onepass: 'linear(",
                std::string(spec::kStrategies[static_cast<std::size_t>(how)]), ")' cannot take this call: ", why);
  return std::nullopt;
}

struct folded_matrix {
  Tensor matrix, sums;  // sums, then offsets
};
folded_matrix fold(const prepared_contraction& c, const frame& before, const Tensor& w, int device, void* stream) {
  const std::int64_t size[2] = {w.size(0), w.size(1)}, padded[2] = {2, cuda::padded_columns(w.size(0))};
  folded_matrix into{empty(size, 2, dtype_of(w), before.on), empty(padded, 2, dtype::f32, before.on)};
  auto* sums = static_cast<float*>(into.sums.data_ptr());
  const spec::contraction::affine_norm& norm = c.parts.norm;
  const auto operand = [&](int i) { return i < 0 ? view{} : before.a.operand[i]; };
  const view scale = operand(norm.scale), bias = operand(norm.bias);
  cuda::launch(cuda::fold_call{w.data_ptr(), scale.data, bias.data, into.matrix.data_ptr(), sums, sums + padded[1],
                               w.size(1), w.stride(0), dtype_of(w), scale.type, bias.type, norm.centres, w.size(0)},
               device, stream);
  return into;
}

bool begins_at_16_bytes(const frame& f) {
  return std::all_of(f.a.operand, f.a.operand + f.line.line.operands,
                     [](const view& v) { return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0; });
}

}  // namespace

std::optional<std::vector<Tensor>> forward_tiled(const forward_call& call) {
  const spec::strategy named = call.line.line.how;
  if (named == spec::strategy::unfused || named == spec::strategy::panels) return {};
  const prepared_contraction& c = *call.line.contraction;
  const Tensor& w = call.operands[static_cast<std::size_t>(c.parts.weight)];
  const chosen way = choose(call, w);
  if (way.how == spec::strategy::unfused) return refuse(call, way.why_not);
  const device on = device_of(call.x);
  const dtype type = dtype_of(w);
  const bool defers = way.how == spec::strategy::deferred, makes = !defers && !c.before.line.words.empty();
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
  if (makes || defers) {
    take(before.emplace(c.before, call.x, "x"), call.x, call, 0);
    if (makes) input = before->output(before->a.y, type);
    kept.reserve(static_cast<std::size_t>(c.before.line.keeps));
    for (int k = 0; k < c.before.line.keeps; ++k) kept.push_back(before->output(before->a.kept[k], type));
    if (saves_statistics) statistics.push_back(before->fresh_statistics());
    before->lay_out(true);
  }
  frame behind(saves_product ? c.behind_keeping : c.behind, result, "x");
  take(behind, result, call, c.parts.weight + 1);
  behind.input(result, behind.a.y);
  std::vector<Tensor> kept_behind;
  kept_behind.reserve(static_cast<std::size_t>(behind.line.line.keeps));
  for (int k = 0; k < behind.line.line.keeps; ++k) kept_behind.push_back(behind.output(behind.a.kept[k], type));
  behind.lay_out(true);

  const torch::stable::accelerator::DeviceGuard guard(on.index);
  void* stream = current_stream(on.index);
  const cuda::request request_before = before ? request_of(*before, false) : cuda::request();
  const cuda::request request_behind = request_of(behind, false);
  const arguments none{};
  cuda::linear_call of{.before = request_before,
                       .a_before = before ? before->a : none,
                       .behind = request_behind,
                       .a_behind = behind.a,
                       .from = makes    ? cuda::input_of::made
                               : defers ? cuda::input_of::deferred
                                        : cuda::input_of::x,
                       .input = input.data_ptr(),
                       .input_stride = makes ? depth : input.stride(0),
                       .matrix = w.data_ptr(),
                       .matrix_stride = w.stride(0),
                       .depth = depth,
                       .ready = nullptr,
                       .sums = nullptr,
                       .offsets = nullptr};
  if (w.stride(1) != 1 || (!makes && input.stride(1) != 1) || !cuda::fits(of) ||
      (defers && !begins_at_16_bytes(*before)))
    return refuse(call, "rows must begin at multiples of 16 bytes");
  std::optional<Tensor> ready;
  std::optional<folded_matrix> folded;
  if (makes) {
    const std::int64_t panels[1] = {(rows + cuda::kReadyRows - 1) / cuda::kReadyRows};
    torch::stable::zero_(ready.emplace(empty(panels, 1, dtype::f32, on)));
    of.ready = static_cast<unsigned*>(ready->data_ptr());
  } else if (defers) {
    folded.emplace(fold(c, *before, w, on.index, stream));
    of.matrix = folded->matrix.data_ptr(), of.matrix_stride = depth;
    of.sums = static_cast<const float*>(folded->sums.data_ptr());
    of.offsets = of.sums + cuda::padded_columns(w.size(0));
  }
  cuda::launch(of, on.index, stream);

  std::vector<Tensor> results{result};
  results.insert(results.end(), kept.begin(), kept.end());
  results.insert(results.end(), kept_behind.begin() + saves_product, kept_behind.end());
  if (saves_product) results.push_back(kept_behind.front());
  results.insert(results.end(), statistics.begin(), statistics.end());
  return results;
}

}  // namespace onepass::binding
