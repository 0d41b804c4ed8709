// A line's gradient: what python/onepass/autograd.py is for torch.compile and torch.func, in C++ for every other call,
// where Python would cost more than a small kernel does.
#pragma once

#include <ATen/ExpandUtils.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "src/torch/autograd/joined.h"
#include "src/torch/autograd/linears.h"
#include "src/torch/autograd/operators.h"

namespace onepass::autograd {

// Where a call's tensors stand: x of each tensor, then of each operand one for all, or where its bit is in `own`, one
// for each.
struct places {
  explicit places(const line_call& of) : call(of), signature(of.signature), count(of.tensors()) {
    first[0] = count;
    for (int i = 0; i < signature.operands; ++i)
      first[static_cast<std::size_t>(i) + 1] = begin(i) + ((call.own >> i & 1) != 0 ? count : 1);
  }
  std::int64_t begin(int operand) const { return operand < 0 ? 0 : first[static_cast<std::size_t>(operand)]; }
  std::int64_t size(int operand) const { return operand < 0 ? count : begin(operand + 1) - begin(operand); }
  std::size_t all() const { return static_cast<std::size_t>(begin(signature.operands)); }
  bool are_rows(int operand) const { return operand < 0 || (signature.row_operands >> operand & 1) != 0; }
  // Whether an operand's gradient is a sum over the tensors' rows.
  bool is_summed(int operand) const { return operand >= 0 && are_rows(operand) && size(operand) < count; }
  // Whether an operand's gradient is written as columns, of which each channel's are to be added up.
  bool is_of_channels(int operand) const { return operand >= 0 && (signature.channel_operands >> operand & 1) != 0; }
  // Whether an operand's gradient is written in another shape than broadcasting explains: its own is remembered.
  bool is_remembered(int operand) const { return is_summed(operand) || is_of_channels(operand); }

  // The dtypes of x and of the operands, and which broadcast. An operand that is rows and one for several tensors does:
  // each of them gives a part of its gradient.
  std::vector<std::int64_t> types(at::TensorList tensors) const {
    std::vector<std::int64_t> types{dtype_of(tensors[0])};
    types.reserve(static_cast<std::size_t>(signature.operands) + 1);
    for (int i = 0; i < signature.operands; ++i) {
      const at::TensorList own = tensors.slice(static_cast<std::size_t>(begin(i)), static_cast<std::size_t>(size(i)));
      if (!are_rows(i) && own[0].dim() == 1) {
        types.push_back(dtype_of(own[0]) + unit_of(i, own, tensors[0]));
        continue;
      }
      bool whole = size(i) == count && are_rows(i);
      for (std::size_t j = 0; j < own.size() && whole; ++j)
        whole = signature.weight >= 0 && i > signature.weight
                    ? has_sizes_behind(own[j], tensors[0], tensors[static_cast<std::size_t>(begin(signature.weight))])
                    : own[j].sizes() == tensors[j].sizes();
      const bool is_one = signature.weight < 0 && !call.is_list();
      const std::int64_t repeats = is_one ? repetition(own[0].sizes(), tensors[0].sizes()) : kBroadcast;
      types.push_back(dtype_of(own[0]) + (whole ? 0 : repeats) + unit_of(i, own, tensors[0]));
    }
    return types;
  }

  // What is added to the type of an operand of channels.
  std::int64_t unit_of(int operand, at::TensorList own, const Tensor& x) const {
    if (!is_of_channels(operand)) return 0;
    std::int64_t least = kUnit * 8;
    for (const Tensor& t : own) least = std::min(least, unit_type(x.size(-1) / std::max<std::int64_t>(t.size(-1), 1)));
    return least;
  }

  // The first tensor of each of the backward operator's outputs, which is one for each tensor of the call but for
  // columns that all share.
  std::vector<std::int64_t> first_of_outputs(const std::vector<int>& sources) const {
    std::vector<std::int64_t> counts(sources.size() + 1);
    for (int i = -1; i < signature.operands; ++i)
      if (const int source = sources[static_cast<std::size_t>(i + 1)]; source >= 0)
        counts[static_cast<std::size_t>(source) + 1] = are_rows(i) ? count : size(i);
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
    return counts;
  }

  // Whether t has the shape of what a contraction gives: as many elements a row of x as its matrix has rows.
  static bool has_sizes_behind(const Tensor& t, const Tensor& x, const Tensor& matrix) {
    const auto rows = static_cast<std::size_t>(x.dim() - 1);
    return t.dim() == x.dim() && t.size(-1) == matrix.size(-2) && t.sizes().slice(0, rows) == x.sizes().slice(0, rows);
  }

  const line_call& call;
  const line_signature& signature;
  const std::int64_t count;
  std::array<std::int64_t, kMostOperands + 1> first;  // of each operand, and how many there are in all
};

// How many keeps the gradients reach: operands with fewer keeps before them get a gradient. If the result has none,
// operands behind the last kept value that has one get none either, as with PyTorch's operators. 0: no gradient at all.
template <class Asked>
int reached_by(std::size_t results, const Asked& asked) {
  if (asked(0)) return static_cast<int>(results) + 1;
  int last = 0;
  for (std::size_t i = 1; i < results; ++i)
    if (asked(i)) last = static_cast<int>(i);
  return last;
}

// Zeros in the place of an undefined gradient: `rows` are sizes that are right but for the last where the line has a
// contraction. kind: 0 for the result's, 1 + k for keep k's; last: the last operand. They take no memory.
inline Tensor zeros_of(const line_signature& signature, std::size_t kind, at::IntArrayRef rows, at::Device device,
                       at::IntArrayRef types, const Tensor& weight, const Tensor& last) {
  const bool before = kind > 0 && static_cast<int>(kind) <= signature.keeps_before;
  std::vector<std::int64_t> sizes = rows.vec();
  std::int64_t type = types[0];
  if ((signature.numbers >> kind & 1) != 0) {
    const bool is_scale = (signature.scales >> kind & 1) != 0;
    if (is_scale && !sizes.empty()) sizes.back() = signature.group > 0 ? sizes.back() / signature.group : 1;
    if (!is_scale && !sizes.empty()) sizes.pop_back();
    type = static_cast<std::int64_t>(result_dtype(static_cast<dtype>(type), dtype::f32));
  } else if (signature.weight >= 0) {
    sizes.back() = signature.values && kind == 0 ? last.size(-1) : weight.size(before ? -1 : -2);
    if (!before) type = dtype_of(weight);
  } else if ((signature.not_differentiable >> kind & 1) == 0) {
    type = static_cast<std::int64_t>(
        result_dtype(static_cast<dtype>(type), static_cast<dtype>(signature.own_dtypes[kind])));
  }
  return at::zeros({}, at::TensorOptions(scalar_type_of(type)).device(device)).expand(sizes);
}

// Where the gradients of x and of the operands come from, as line_library::plan says, and whether backward writes any.
struct gradient_plan {
  gradient_plan(const line_signature& signature, at::IntArrayRef types, std::int64_t wanted)
      : sources(types.size()),
        writes(library.plan(signature, static_cast<int>(types[0]), types.data() + 1, static_cast<std::uint64_t>(wanted),
                            sources.data())) {}
  std::vector<int> sources;
  const bool writes;
};

// Sizes of tensors, each behind its number of dimensions: as a node remembers them.
struct remembered_sizes {
  void add(at::IntArrayRef sizes) {
    all.push_back(static_cast<std::int64_t>(sizes.size()));
    all.insert(all.end(), sizes.begin(), sizes.end());
  }
  at::IntArrayRef next() {
    const auto dims = static_cast<std::size_t>(all[at]);
    const at::IntArrayRef sizes = at::IntArrayRef(all).slice(at + 1, dims);
    at += 1 + dims;
    return sizes;
  }
  std::vector<std::int64_t> all;
  std::size_t at = 0;
};

struct Fused : torch::autograd::Function<Fused> {
  // As line_call has them.
  struct options {
    const std::string& line;
    const optional_tensor& dropout_state;
    std::int64_t count = 0, own = 0;
    bool stack = false;
  };

  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const options& with) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const known_line known(with.line);
    const line_call call{known.signature(), with.line, with.count, with.own, with.stack};
    const places at(call);
    TORCH_CHECK(tensors.size() == at.all(), "onepass: the line \"", with.line, "\" takes ", at.all() - 1,
                " tensors after x, got ", static_cast<std::int64_t>(tensors.size()) - 1);
    variable_list results = run_forward(call, tensors, with.dropout_state);
    std::vector<std::int64_t> types = at.types(tensors);
    variable_list saved = save(call, at, tensors, results, with.dropout_state);
    ctx->saved_data["line"] = with.line;
    ctx->saved_data["types"] = std::move(types);
    if (call.is_list()) ctx->saved_data["of"] = std::vector<std::int64_t>{with.count, with.own, with.stack};
    if (call.is_list() || call.signature.channel_operands != 0) ctx->saved_data["sizes"] = sizes_for(at, tensors);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    if (call.signature.not_differentiable != 0) mark_codes(ctx, call, results);
    return results;
  }

  // By differentiable operators where the gradients are to be differentiated.
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const std::string& line = ctx->saved_data.at("line").toStringRef();
    RECORD_USER_SCOPE("onepass backward: " + line);
    const variable_list saved = ctx->get_saved_variables();  // a checkpoint computes them here, with autograd
    const known_line known(line);
    line_call call{known.signature(), line};
    if (const auto of = ctx->saved_data.find("of"); of != ctx->saved_data.end()) {
      const std::vector<std::int64_t> list = of->second.toIntVector();
      call.count = list[0], call.own = list[1], call.stack = list[2] != 0;
    }
    if (at::GradMode::is_enabled()) return gradients(*ctx, call, upstream, saved);
    const at::AutoDispatchBelowADInplaceOrView below;
    return gradients(*ctx, call, upstream, saved);
  }

 private:
  // Codes and scales, of each tensor.
  static void mark_codes(AutogradContext* ctx, const line_call& call, const variable_list& results) {
    variable_list some;
    for (std::size_t i = 0; i < results.size(); ++i)
      if ((call.signature.not_differentiable >> i / static_cast<std::size_t>(call.results()) & 1) != 0)
        some.push_back(results[i]);
    ctx->mark_non_differentiable(some);
  }

  // What backward reads, as saved_tensors has it; what is not a result is taken out of the results.
  static variable_list save(const line_call& call, const places& at, at::TensorList tensors, variable_list& results,
                            const optional_tensor& dropout_state) {
    const line_signature& signature = call.signature;
    const auto take = [&](bool is_there) {
      if (!is_there) return Tensor();
      Tensor last = std::move(results.back());
      results.pop_back();
      return last;
    };
    Tensor statistics = take(signature.reads_statistics), product = take(signature.reads_product);
    const auto count = static_cast<std::size_t>(call.tensors()), kinds = static_cast<std::size_t>(call.results());
    const bool for_weight =
        signature.weight >= 0 && tensors[static_cast<std::size_t>(at.begin(signature.weight))].requires_grad();
    const std::uint64_t read = signature.reads_operands & ~(for_weight ? 0 : signature.operands_for_weight);
    variable_list all;
    all.reserve(saved_tensors::kOperands + tensors.size() + kinds);
    all.push_back(dropout_state.value_or(Tensor()));
    all.push_back(std::move(statistics));
    all.push_back(std::move(product));
    all.push_back(signature.resumes_behind < 0 ? Tensor()
                                               : results[static_cast<std::size_t>(signature.resumes_behind)]);
    for (int i = 0; i < signature.operands; ++i)
      for (std::int64_t t = at.begin(i); t < at.begin(i + 1); ++t)
        all.push_back(read >> i & 1 ? tensors[static_cast<std::size_t>(t)] : Tensor());
    if (signature.reads_x || !call.is_list())
      for (std::size_t i = 0; i < count; ++i)
        all.push_back(signature.reads_x && (for_weight || !signature.x_for_weight) ? tensors[i] : Tensor());
    if (signature.resumes_from >= 0) {
      const auto first = results.begin() + static_cast<std::ptrdiff_t>(signature.resumes_from * call.results());
      all.insert(all.end(), first, first + call.results());
    }
    return all;
  }

  // Of the operands whose gradients are written otherwise, then of the tensors, which are a list's.
  static std::vector<std::int64_t> sizes_for(const places& at, at::TensorList tensors) {
    remembered_sizes sizes;
    for (int i = 0; i < at.signature.operands; ++i) {
      if (!at.is_remembered(i)) continue;
      for (std::int64_t t = at.begin(i); t < at.begin(i + 1); ++t)
        sizes.add(tensors[static_cast<std::size_t>(t)].sizes());
    }
    for (const Tensor& t : tensors.slice(0, static_cast<std::size_t>(at.count))) sizes.add(t.sizes());
    return std::move(sizes.all);
  }

  // Zeros in the place of undefined gradients: in a list as dense as the others, since they share a launch.
  static variable_list with_zeros(const line_call& call, const variable_list& asked, const variable_list& saved,
                                  at::IntArrayRef types, remembered_sizes rows) {
    const auto is_defined = [](const Tensor& t) { return t.defined(); };
    if (std::all_of(asked.begin(), asked.end(), is_defined)) return asked;
    const auto some = std::find_if(asked.begin(), asked.end(), is_defined);
    const line_signature& signature = call.signature;
    const auto operands = saved.begin() + saved_tensors::kOperands;
    const Tensor weight = signature.weight < 0 ? Tensor() : operands[signature.weight],
                 last = signature.weight < 0 ? Tensor() : operands[signature.operands - 1];
    // What an ending's number is of is saved: x, or what the line resumes from. Beside codes gradients are of rows.
    const bool are_rows = signature.numbers == 0 || signature.not_differentiable != 0;
    const Tensor& is_behind = saved[saved_tensors::kResumedBehind];  // where only that was saved
    std::vector<std::int64_t> of_rows = (are_rows                 ? *some
                                         : saved.back().defined() ? saved.back()
                                                                  : is_behind)
                                            .sizes()
                                            .vec();
    if (!are_rows && call.stack) of_rows = rows.next().vec(), of_rows.insert(of_rows.begin(), call.count);
    std::vector<at::IntArrayRef> sizes(static_cast<std::size_t>(call.results()), of_rows);
    if (call.is_list() && !call.stack)
      for (at::IntArrayRef& of : sizes) of = rows.next();
    variable_list upstream = asked;
    for (std::size_t i = 0; i < upstream.size(); ++i) {
      if (upstream[i].defined()) continue;
      Tensor zeros =
          zeros_of(signature, i / sizes.size(), sizes[i % sizes.size()], some->device(), types, weight, last);
      upstream[i] = call.is_list() ? zeros.contiguous() : std::move(zeros);
    }
    return upstream;
  }

  // The dimensions along which at::sum_to sums.
  static std::vector<std::int64_t> summed_dims(at::IntArrayRef from, at::IntArrayRef to) {
    const std::size_t leading = from.size() - to.size();
    std::vector<std::int64_t> dims;
    for (std::size_t d = 0; d < from.size(); ++d)
      if (d < leading || (to[d - leading] == 1 && from[d] != 1)) dims.push_back(static_cast<std::int64_t>(d));
    return dims;
  }

  // Of columns those of each channel, in the operand's shape and dtype.
  static Tensor of_channels(const Tensor& columns, at::IntArrayRef shape, std::int64_t type) {
    const std::int64_t channels = shape.back();
    const Tensor each = columns.unflatten(-1, {channels, columns.size(-1) / channels});
    std::vector<std::int64_t> dims =
        summed_dims(each.sizes().slice(0, static_cast<std::size_t>(each.dim() - 1)), shape);
    dims.push_back(each.dim() - 1);  // a channel's own columns: one kernel for all
    return each.sum(dims).reshape(shape).to(scalar_type_of(type % kBroadcast));
  }

  static variable_list gradients(const AutogradContext& ctx, const line_call& call, const variable_list& asked,
                                 const variable_list& saved) {
    const places at(call);
    variable_list results(at.all() + 1);  // one more for the options
    if (std::none_of(asked.begin(), asked.end(), [](const Tensor& t) { return t.defined(); })) return results;
    const std::vector<std::int64_t> types = ctx.saved_data.at("types").toIntVector();
    remembered_sizes sizes;
    if (const auto of = ctx.saved_data.find("sizes"); of != ctx.saved_data.end()) sizes.all = of->second.toIntVector();
    std::vector<std::vector<at::IntArrayRef>> remembered(static_cast<std::size_t>(call.signature.operands));
    for (int i = 0; i < call.signature.operands; ++i) {
      for (std::int64_t t = 0; t < at.size(i) && at.is_remembered(i); ++t)
        remembered[static_cast<std::size_t>(i)].push_back(sizes.next());
    }
    const variable_list upstream = with_zeros(call, asked, saved, types, sizes);
    std::int64_t wanted = 0;
    for (int i = -1; i < call.signature.operands; ++i)
      for (std::int64_t t = at.begin(i); t < at.begin(i) + at.size(i); ++t)
        wanted |= std::int64_t{ctx.needs_input_grad(static_cast<std::size_t>(t))} << (i + 1);
    const gradient_plan plan(call.signature, types, wanted);
    const variable_list written = plan.writes ? run(call, at, upstream, saved, types, wanted) : variable_list();
    const std::vector<std::int64_t> first = at.first_of_outputs(plan.sources);
    const std::vector<int> reached = reached_of(call, asked);
    const int most_reached = *std::max_element(reached.begin(), reached.end());
    for (int operand = -1; operand < call.signature.operands; ++operand) {
      const int source = plan.sources[static_cast<std::size_t>(operand + 1)];
      if (source == kUnwanted) continue;
      const auto of_tensor = [&](std::int64_t i) {
        if (source >= 0) return written[static_cast<std::size_t>(first[static_cast<std::size_t>(source)] + i)];
        return call.stack ? upstream[0].select(0, i) : upstream[static_cast<std::size_t>(i)];
      };
      const int keeps = operand < 0 ? 0 : call.signature.keeps_before_operand[operand];
      for (std::int64_t i = 0; i < at.size(operand); ++i) {
        const auto t = static_cast<std::size_t>(at.begin(operand) + i);
        const bool is_reached =
            keeps < (at.size(operand) == at.count ? reached[static_cast<std::size_t>(i)] : most_reached);
        if (!ctx.needs_input_grad(t) || !is_reached) continue;
        results[t] = of_tensor(i);
        if (!at.is_remembered(operand)) continue;  // autograd sums a broadcast operand's to its shape
        const at::IntArrayRef shape = remembered[static_cast<std::size_t>(operand)][static_cast<std::size_t>(i)];
        if (at.is_of_channels(operand)) {
          results[t] = of_channels(results[t], shape, types[static_cast<std::size_t>(operand) + 1]);
          continue;
        }
        results[t] = at::sum_to(results[t], shape);
        for (std::int64_t j = 1; j < at.count; ++j) results[t] = results[t] + at::sum_to(of_tensor(j), shape);
      }
    }
    return results;
  }

  // Of each tensor: its results are a stack's, or each kind's stand one behind the other.
  static std::vector<int> reached_of(const line_call& call, const variable_list& asked) {
    const auto step = static_cast<std::size_t>(call.results());
    std::vector<int> reached;
    for (std::size_t t = 0; t < static_cast<std::size_t>(call.tensors()); ++t)
      reached.push_back(reached_by(
          asked.size() / step, [&](std::size_t kind) { return asked[kind * step + (call.stack ? 0 : t)].defined(); }));
    return reached;
  }

  static variable_list run(const line_call& call, const places& at, const variable_list& upstream,
                           const variable_list& saved, at::IntArrayRef types, std::int64_t wanted) {
    if (at::GradMode::is_enabled()) return run_differentiable_backward(call, upstream, saved, types, wanted);
    const auto operand_tensors = static_cast<std::size_t>(static_cast<std::int64_t>(at.all()) - at.count);
    return run_backward(call, upstream, saved_tensors(call, saved, operand_tensors), types, wanted);
  }
};

inline std::vector<Tensor> differentiable(at::TensorList tensors, std::string_view line, const optional_tensor& state,
                                          std::int64_t count, std::int64_t own, bool stack) {
  return Fused::apply(tensors, Fused::options{std::string(line), state, count, own, stack});
}

}  // namespace onepass::autograd

#if __has_include(<Python.h>)
#include "src/torch/autograd/fast_path.h"
#endif

TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def(
      "differentiable(Tensor[] tensors, str line, Tensor? dropout_state, int count=0, int own=0, bool stack=False) -> "
      "Tensor[]",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::differentiable)));
  m.def("joined(Tensor[] all) -> Tensor[]",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::joined)));
  m.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases, str line, Tensor[] given) -> Tensor[]",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::linears)));
}

// As if torch had allocated the tensor's memory: what resizes it takes other memory from torch, and gives this back.
extern "C" __attribute__((visibility("default"))) void onepass_let_resize(void* tensor) {
  c10::StorageImpl* storage = static_cast<at::Tensor*>(tensor)->storage().unsafeGetStorageImpl();
  storage->set_allocator(c10::GetCPUAllocator());
  storage->set_resizable(true);
}

// sum (float32) += a b, of 16 bits: torch's stable interface knows no product with a result of another dtype.
extern "C" __attribute__((visibility("default"))) void onepass_add_product(void* sum, void* a, void* b) {
  at::Tensor& to = *static_cast<at::Tensor*>(sum);
  const at::AutoDispatchBelowADInplaceOrView below;
  at::addmm_out(to, to, *static_cast<at::Tensor*>(a), *static_cast<at::Tensor*>(b), at::kFloat, 1, 1);
}

extern "C" __attribute__((visibility("default"))) void onepass_autograd(const onepass::line_library* with) {
  onepass::autograd::library = *with;
}
