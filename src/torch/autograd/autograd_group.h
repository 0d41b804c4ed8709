// The gradient of a line that is called for several tensors at once: a part of what is compiled with
// autograd_function.h.
#pragma once

#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "src/torch/autograd/autograd_function.h"

namespace onepass::autograd {

struct FusedGroup : torch::autograd::Function<FusedGroup> {
  struct call {
    const std::string& line;
    const optional_tensor& dropout_state;
    std::int64_t count, own;
    bool stack;
  };

  // tensors: as many x as there are, then of each operand one for all, or where its bit is in `own`, one for each.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const call& with) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const known_line known(with.line);
    const line_signature& signature = known.signature();
    const places at(signature, with.count, with.own);
    TORCH_CHECK(with.count > 0 && tensors.size() == at.all(), "onepass: the line \"", with.line, "\" takes ",
                signature.operands, " operands");
    static const auto op =
        operation<std::vector<Tensor>(at::TensorList, at::TensorList, std::string_view, const optional_tensor&, bool,
                                      std::int64_t, bool)>("onepass::group_forward");
    const auto count = static_cast<std::size_t>(with.count), lists = with.stack ? 1 : count;
    variable_list results = op.call(tensors.slice(0, count), tensors.slice(count), with.line, with.dropout_state,
                                    signature.reads_statistics, with.own, with.stack);
    variable_list all{with.dropout_state.value_or(Tensor()), Tensor()};
    if (signature.reads_statistics) all[1] = std::move(results.back()), results.pop_back();
    std::vector<std::int64_t> saved;  // how many tensors of each kind
    const auto save = [&](at::TensorList some) {
      saved.push_back(static_cast<std::int64_t>(some.size()));
      all.insert(all.end(), some.begin(), some.end());
    };
    const int from = signature.resumes_from;
    save(signature.reads_x ? tensors.slice(0, count) : at::TensorList());
    save(from < 0 ? at::TensorList() : at::TensorList(results).slice(static_cast<std::size_t>(from) * lists, lists));
    for (std::size_t i = count; i < tensors.size(); ++i)
      all.push_back(signature.reads_operands >> at.operand_of(i) & 1 ? tensors[i] : Tensor());
    ctx->saved_data["line"] = with.line;
    ctx->saved_data["saved"] = std::move(saved);
    ctx->saved_data["types"] = at.types(tensors);
    ctx->saved_data["sizes"] = at.summed_sizes(tensors);
    ctx->saved_data["of"] = std::vector<std::int64_t>{with.count, with.own, with.stack};
    if (!with.stack && !saved_rows(saved)) ctx->saved_data["rows"] = at.row_sizes(tensors);
    ctx->save_for_backward(std::move(all));
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    return with_saved(ctx, [&](const variable_list& all) { return gradients(*ctx, upstream, all); });
  }

 private:
  // Where in a call's list of tensors they are, and in what the backward operator gives.
  struct places {
    places(const line_signature& of, std::int64_t tensors, std::int64_t has_own)
        : signature(of), count(tensors), own(has_own) {
      std::int64_t at = count;
      for (int i = 0; i < signature.operands; ++i) first.push_back(at), at += of_operand(i);
      first.push_back(at);
    }
    std::size_t all() const { return static_cast<std::size_t>(first.back()); }
    std::int64_t of_operand(int i) const { return (own >> i & 1) != 0 ? count : 1; }
    int operand_of(std::size_t tensor) const {
      const auto behind = std::upper_bound(first.begin(), first.end(), static_cast<std::int64_t>(tensor));
      return static_cast<int>(behind - first.begin()) - 1;
    }
    // An operand that is rows and one for several tensors broadcasts: each of them gives a part of its gradient.
    std::vector<std::int64_t> types(at::TensorList tensors) const {
      std::vector<std::int64_t> types{dtype_of(tensors[0])};
      for (int i = 0; i < signature.operands; ++i) {
        bool whole = of_operand(i) == count;
        for (std::int64_t j = 0; j < of_operand(i) && whole; ++j) {
          const Tensor& t = tensors[static_cast<std::size_t>(first[static_cast<std::size_t>(i)] + j)];
          whole = t.sizes() == tensors[static_cast<std::size_t>(j)].sizes();
        }
        types.push_back(dtype_of(tensors[static_cast<std::size_t>(first[static_cast<std::size_t>(i)])]) +
                        (whole ? 0 : kBroadcast));
      }
      return types;
    }
    // The tensors' sizes, each behind its number of dimensions.
    std::vector<std::int64_t> row_sizes(at::TensorList tensors) const {
      std::vector<std::int64_t> all;
      for (const Tensor& t : tensors.slice(0, static_cast<std::size_t>(count))) {
        all.push_back(t.dim());
        all.insert(all.end(), t.sizes().begin(), t.sizes().end());
      }
      return all;
    }
    // Of the operands whose gradient is a sum over the tensors' rows.
    bool is_summed(int i) const { return (signature.row_operands >> i & 1) != 0 && of_operand(i) < count; }
    // Their sizes, each behind its number of dimensions.
    std::vector<std::int64_t> summed_sizes(at::TensorList tensors) const {
      std::vector<std::int64_t> all;
      for (int i = 0; i < signature.operands; ++i) {
        if (!is_summed(i)) continue;
        const at::IntArrayRef sizes = tensors[static_cast<std::size_t>(first[static_cast<std::size_t>(i)])].sizes();
        all.push_back(static_cast<std::int64_t>(sizes.size()));
        all.insert(all.end(), sizes.begin(), sizes.end());
      }
      return all;
    }

    // The first tensor of each of the backward operator's outputs, which is one for each tensor but for columns that
    // all share.
    std::vector<std::int64_t> first_of_outputs(const std::vector<int>& sources) const {
      std::vector<std::int64_t> counts(sources.size() + 1);
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const bool rows = i == 0 || (signature.row_operands >> (i - 1) & 1) != 0;
        if (sources[i] >= 0)
          counts[static_cast<std::size_t>(sources[i]) + 1] = rows ? count : of_operand(static_cast<int>(i) - 1);
      }
      std::partial_sum(counts.begin(), counts.end(), counts.begin());
      return counts;
    }

    const line_signature& signature;
    const std::int64_t count, own;
    std::vector<std::int64_t> first;  // of each operand, and how many there are in all
  };

  // Whether tensors are saved that have the rows of x: x itself, or what backward resumes from.
  static bool saved_rows(const std::vector<std::int64_t>& saved) { return saved[0] > 0 || saved[1] > 0; }

  // An undefined gradient as zeros, as dense as the others: they share a launch. Their sizes are those of what is
  // saved.
  static variable_list with_zeros(const AutogradContext& ctx, variable_list gradients, const variable_list& all,
                                  const places& at, bool stack, at::IntArrayRef types) {
    if (std::all_of(gradients.begin(), gradients.end(), [](const Tensor& t) { return t.defined(); })) return gradients;
    const Tensor some = *std::find_if(gradients.begin(), gradients.end(), [](const Tensor& t) { return t.defined(); });
    const std::vector<std::int64_t> saved = ctx.saved_data.at("saved").toIntVector();
    std::vector<std::vector<std::int64_t>> rows;  // of each member, or the stack
    if (stack) {
      rows.push_back(some.sizes().vec());
    } else if (saved_rows(saved)) {
      for (std::int64_t i = 0; i < at.count; ++i) rows.push_back(all[static_cast<std::size_t>(2 + i)].sizes().vec());
    } else {
      const std::vector<std::int64_t> sizes = ctx.saved_data.at("rows").toIntVector();
      for (auto next = sizes.begin(); next != sizes.end(); next += 1 + *next)
        rows.emplace_back(next + 1, next + 1 + *next);
    }
    const line_signature& signature = at.signature;
    const std::size_t first_operand =
        2 + static_cast<std::size_t>(std::accumulate(saved.begin(), saved.end(), std::int64_t{0}));
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) continue;
      const std::size_t member = i % rows.size();
      Tensor weight;
      if (signature.weight >= 0) {
        const auto first = static_cast<std::size_t>(at.first[static_cast<std::size_t>(signature.weight)] - at.count);
        weight = all[first_operand + first + (at.of_operand(signature.weight) > 1 ? member : 0)];
      }
      gradients[i] =
          zeros_of(signature, i / rows.size(), rows[member], some.device(), types, weight, weight).contiguous();
    }
    return gradients;
  }

  static variable_list gradients(const AutogradContext& ctx, const variable_list& asked, const variable_list& all) {
    const std::string& line = ctx.saved_data.at("line").toStringRef();
    const std::vector<std::int64_t> types = ctx.saved_data.at("types").toIntVector(),
                                    of = ctx.saved_data.at("of").toIntVector(),
                                    sizes = ctx.saved_data.at("sizes").toIntVector();
    const known_line known(line);
    const line_signature& signature = known.signature();
    const places at(signature, of[0], of[1]);
    const bool stack = of[2] != 0;
    variable_list results(at.all() + 1);  // one more for `call`
    if (std::none_of(asked.begin(), asked.end(), [](const Tensor& t) { return t.defined(); })) return results;
    const variable_list upstream = with_zeros(ctx, asked, all, at, stack, types);
    std::int64_t wanted = 0;
    for (std::size_t t = 0; t < at.all(); ++t) {
      const int bit = static_cast<std::int64_t>(t) < at.count ? 0 : at.operand_of(t) + 1;
      wanted |= std::int64_t{ctx.needs_input_grad(t)} << bit;
    }
    const gradient_plan plan(signature, types, wanted);
    const std::vector<int>& sources = plan.sources;
    variable_list written;
    if (plan.writes) written = run(ctx, upstream, all, line, types, wanted, of);
    const std::vector<std::int64_t> first = at.first_of_outputs(sources);
    const auto of_member = [&](int source, std::int64_t i) {
      if (source >= 0) return written[static_cast<std::size_t>(first[static_cast<std::size_t>(source)] + i)];
      return stack ? upstream[0].select(0, i) : upstream[static_cast<std::size_t>(i)];
    };
    // Of a member: its results are a stack's, or each kind's stand one behind the other.
    const auto reached = [&](std::int64_t member) {
      const std::size_t step = stack ? 1 : static_cast<std::size_t>(at.count),
                        first = stack ? 0 : static_cast<std::size_t>(member);
      return reached_by(asked.size() / step, [&](std::size_t i) { return asked[i * step + first].defined(); });
    };
    std::vector<int> reached_of;
    for (std::int64_t i = 0; i < at.count; ++i) reached_of.push_back(reached(i));
    const int most_reached = *std::max_element(reached_of.begin(), reached_of.end());
    auto next_size = sizes.begin();
    for (int operand = -1; operand < signature.operands; ++operand) {
      const int source = sources[static_cast<std::size_t>(operand) + 1];
      const std::int64_t begin = operand < 0 ? 0 : at.first[static_cast<std::size_t>(operand)],
                         own = operand < 0 ? at.count : at.of_operand(operand);
      const bool summed = operand >= 0 && at.is_summed(operand);
      const auto size_begin = summed ? next_size + 1 : next_size,
                 size_end = summed ? size_begin + *next_size : next_size;
      next_size = size_end;
      if (source == kUnwanted) continue;
      for (std::int64_t i = 0; i < own; ++i) {
        const auto t = static_cast<std::size_t>(begin + i);
        const int keeps = operand < 0 ? 0 : signature.keeps_before_operand[operand];
        if (!ctx.needs_input_grad(t) ||
            keeps >= (own == at.count ? reached_of[static_cast<std::size_t>(i)] : most_reached))
          continue;
        results[t] = of_member(source, i);
        if (!summed) continue;
        const std::vector<std::int64_t> shape(size_begin, size_end);
        results[t] = at::sum_to(results[t], shape);
        for (std::int64_t j = 1; j < at.count; ++j) results[t] = results[t] + at::sum_to(of_member(source, j), shape);
      }
    }
    return results;
  }

  static variable_list run(const AutogradContext& ctx, const variable_list& upstream, const variable_list& all,
                           const std::string& line, const std::vector<std::int64_t>& types, std::int64_t wanted,
                           const std::vector<std::int64_t>& of) {
    if (at::GradMode::is_enabled()) {
      using differentiable = std::vector<Tensor>(at::TensorList, const optional_tensors&, std::string_view,
                                                 at::IntArrayRef, std::int64_t, std::int64_t, std::int64_t, bool);
      static const auto op = operation<differentiable>("onepass::differentiable_group_backward");
      return op.call(upstream, saved_tensors::given(all), line, types, wanted, of[0], of[1], of[2] != 0);
    }
    auto next = all.begin() + 2;
    std::vector<variable_list> saved;  // x, what backward resumes from
    for (const std::int64_t count : ctx.saved_data.at("saved").toIntVector()) {
      saved.emplace_back(next, next + count);
      next += count;
    }
    optional_tensors operands;
    for (; next != all.end(); ++next) operands.push_back(saved_tensors::given(*next));
    using backward = std::vector<Tensor>(at::TensorList, at::TensorList, const optional_tensors&, at::TensorList,
                                         const optional_tensor&, const optional_tensor&, std::string_view,
                                         at::IntArrayRef, std::int64_t, std::int64_t, bool);
    static const auto op = operation<backward>("onepass::group_backward");
    return op.call(upstream, saved[0], operands, saved[1], saved_tensors::given(all[1]), saved_tensors::given(all[0]),
                   line, at::IntArrayRef(types).slice(1), wanted, of[1], of[2] != 0);
  }
};

inline std::vector<Tensor> differentiable_group(at::TensorList tensors, std::string_view line,
                                                const optional_tensor& state, std::int64_t count, std::int64_t own,
                                                bool stack) {
  return FusedGroup::apply(tensors, FusedGroup::call{std::string(line), state, count, own, stack});
}

}  // namespace onepass::autograd
