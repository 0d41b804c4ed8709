// Linear layers of one input, and of one bias, with a backward that is theirs: a part of what is compiled with
// autograd_function.h.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "src/torch/autograd/operators.h"

namespace onepass::autograd {

using torch::autograd::AutogradContext;

// What a bias is given: the sum of a gradient's rows, in one pass over them that fills the chip.
inline Tensor sum_of_rows(const Tensor& gradient) {
  static const known_line bias("bias");
  const line_signature& signature = bias.signature();
  const std::int64_t own = dtype_of(gradient);
  const bool has_kernel = is_floating(static_cast<dtype>(own)) && gradient.numel() > 0 &&
                          (!gradient.is_cpu() || library.is_ready_on_cpu(signature, 0, static_cast<int>(own)));
  if (at::GradMode::is_enabled() || !has_kernel) return gradient.sum(0);
  static const std::string line = "bias";
  const variable_list nothing(saved_tensors::kOperands + 2);  // of the operand and of x, either
  const line_call call{signature, line};
  const std::int64_t types[] = {own, own}, wanted = 2;
  return run_backward(call, gradient, saved_tensors(call, nothing, 1), types, wanted)[0];
}

std::vector<Tensor> differentiable(at::TensorList tensors, std::string_view line, const optional_tensor& state,
                                   std::int64_t count, std::int64_t own, bool stack);

// linear(x, weight, bias) of each weight. Their gradients of x are added up in the products themselves, where autograd
// would add up tensors: each but the first reads x's gradient once more, in place of two reads, a write and a kernel.
// Saved for backward, as by PyTorch's: x where a weight has a gradient, and weights where x has one. Where `line` makes
// x, what it is made of is saved in x's place: that line's own backward holds it in any case.
struct Linears : torch::autograd::Function<Linears> {
  // tensors: x, the weights, the biases that there are, of the weights in `with`, then what `line` takes.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, std::int64_t count, std::int64_t with,
                               const std::string& line) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list results;
    auto bias = static_cast<std::size_t>(count) + 1;
    for (std::int64_t i = 0; i < count; ++i) {
      const optional_tensor own = with >> i & 1 ? optional_tensor(tensors[bias++]) : std::nullopt;
      results.push_back(at::linear(tensors[0], tensors[static_cast<std::size_t>(i) + 1], own));
    }
    const at::TensorList weights = tensors.slice(1, static_cast<std::size_t>(count));
    const bool saves_x = std::any_of(weights.begin(), weights.end(), [](const Tensor& w) { return w.requires_grad(); });
    variable_list saved{saves_x && line.empty() ? tensors[0] : Tensor()};
    for (const Tensor& weight : weights) saved.push_back(tensors[0].requires_grad() ? weight : Tensor());
    for (const Tensor& t : tensors.slice(bias)) saved.push_back(saves_x ? t : Tensor());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["with"] = with;
    if (!line.empty()) ctx->saved_data["line"] = line;
    ctx->set_materialize_grads(false);
    return results;
  }

  // By differentiable operators where the gradients are to be differentiated.
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const variable_list saved = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) return gradients(*ctx, upstream, saved);
    const at::AutoDispatchBelowADInplaceOrView below;
    return gradients(*ctx, upstream, saved);
  }

 private:
  // x, as it was saved, or made again, perhaps of float32, of which it was a cast.
  static Tensor input(const AutogradContext& ctx, const variable_list& saved, std::size_t weights, at::ScalarType own) {
    const auto line = ctx.saved_data.find("line");
    if (line == ctx.saved_data.end()) return saved[0];
    const at::TensorList given = at::TensorList(saved).slice(1 + weights);
    return differentiable(given, line->second.toStringRef(), std::nullopt, 0, 0, false)[0].to(own);
  }

  static variable_list gradients(const AutogradContext& ctx, const variable_list& upstream,
                                 const variable_list& saved) {
    const std::int64_t with = ctx.saved_data.at("with").toInt();
    const std::size_t count = upstream.size();
    variable_list results(1 + count);
    Tensor of_x, x;
    std::vector<std::int64_t> sizes;  // of x
    for (std::size_t i = 0; i < count; ++i) {
      const bool has_bias = (with >> i & 1) != 0;
      const std::size_t bias = results.size();
      if (has_bias) results.emplace_back();
      if (!upstream[i].defined()) continue;
      const Tensor& weight = saved[i + 1];
      const Tensor dy = upstream[i].reshape({-1, upstream[i].size(-1)});
      if (ctx.needs_input_grad(0)) {
        sizes = upstream[i].sizes().vec(), sizes.back() = weight.size(1);
        if (!of_x.defined()) of_x = dy.mm(weight);
        else if (at::GradMode::is_enabled()) of_x = of_x.addmm(dy, weight);
        else of_x.addmm_(dy, weight);
      }
      if (ctx.needs_input_grad(i + 1)) {
        if (!x.defined()) x = input(ctx, saved, count, dy.scalar_type());
        results[i + 1] = dy.t().mm(x.reshape({-1, x.size(-1)}));
      }
      if (has_bias && ctx.needs_input_grad(bias)) results[bias] = sum_of_rows(dy);
    }
    if (of_x.defined()) results[0] = of_x.view(sizes);
    results.resize(results.size() + (saved.size() - 1 - count) + 3);  // of what the line takes, the numbers, the line
    return results;
  }
};

inline std::vector<Tensor> linears(const Tensor& x, at::TensorList weights, const c10::List<optional_tensor>& biases,
                                   c10::string_view line, at::TensorList given) {
  TORCH_CHECK(weights.size() == biases.size() && weights.size() < 64,
              "onepass: linears() takes a bias, or None, for each of at most 63 weights");
  const c10::DeviceType device = x.device().type();
  const bool casts = at::autocast::is_autocast_enabled(device);
  const auto cast = [&](const Tensor& t) {
    return casts ? at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device) : t;
  };
  variable_list tensors{cast(x)};
  for (const Tensor& weight : weights) tensors.push_back(cast(weight));
  std::int64_t with = 0;
  for (std::size_t i = 0; i < biases.size(); ++i) {
    const optional_tensor bias = biases.get(i);
    if (!bias) continue;
    tensors.push_back(cast(*bias));
    with |= std::int64_t{1} << i;
  }
  const std::string made_by = tensors[0].is_same(x) ? std::string(line) : std::string();
  if (!made_by.empty()) tensors.insert(tensors.end(), given.begin(), given.end());
  return Linears::apply(at::TensorList(tensors), static_cast<std::int64_t>(weights.size()), with, made_by);
}

}  // namespace onepass::autograd
