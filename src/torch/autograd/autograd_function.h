// A line's gradient: what python/onepass/autograd.py is for torch.compile and torch.func, in C++ for every other call,
// where Python would cost more than a small kernel does.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "onepass/lane/types.h"
#include "src/line/signature.h"
#include "src/torch/autograd/joined.h"

namespace onepass::autograd {

using at::Tensor;
using optional_tensor = std::optional<Tensor>;
using optional_tensors = c10::List<optional_tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline line_library library;  // filled in by the library, once, before the first call

// A line's signature, which stay as long as this.
class known_line {
 public:
  explicit known_line(const std::string& line) : signature_(library.find(line.c_str(), &held_)) {
    TORCH_CHECK(signature_ != nullptr, "onepass: not a line: ", line);
  }
  ~known_line() { library.release(held_); }
  known_line(const known_line&) = delete;
  known_line& operator=(const known_line&) = delete;
  const line_signature& signature() const { return *signature_; }

 private:
  void* held_ = nullptr;
  const line_signature* signature_;
};

inline int dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
#define ONEPASS_CASE(name, torch_name, scalar_type, storage) \
  case at::ScalarType::scalar_type: return static_cast<int>(dtype::name);
    ONEPASS_DTYPES(ONEPASS_CASE)
#undef ONEPASS_CASE
    default: return static_cast<int>(dtype::none);
  }
}

inline at::ScalarType scalar_type_of(std::int64_t type) {
  switch (static_cast<dtype>(type)) {
#define ONEPASS_CASE(name, torch_name, scalar_type, storage) \
  case dtype::name: return at::ScalarType::scalar_type;
    ONEPASS_DTYPES(ONEPASS_CASE)
#undef ONEPASS_CASE
    default: return at::kFloat;
  }
}

// The operators below autograd: src/torch/ops.cc defines them.
template <class Signature>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Of these, the line's.
template <class T>
const T& contraction_of(const line_signature& signature, const T& linear, const T& scores, const T& attention) {
  return signature.values ? attention : signature.scores ? scores : linear;
}

// Whose kernel a call would come to first.
class keys_of_call {
 public:
  explicit keys_of_call(c10::DispatchKeySet passed)
      : unseen_(local_.excluded_.add(c10::DispatchKey::BackendSelect) | passed) {}  // always there, for factories
  bool reach_kernel(const Tensor& t) const {
    const c10::DispatchKey key = ((t.key_set() | local_.included_) - unseen_).highestPriorityTypeId();
    return key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA;
  }

 private:
  const c10::impl::LocalDispatchKeySet local_ = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet unseen_;
};

// Whether nothing but the kernels of a device, and what `passed` names, would see a call of an operator: no mode, no
// subclass, no profiler.
inline bool reaches_kernels(at::TensorList tensors, c10::DispatchKeySet passed = {}) {
  const keys_of_call keys(passed);
  return !at::hasCallbacks() &&
         std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return keys.reach_kernel(t); });
}

inline tensor_handle lent(const Tensor& t) { return t.defined() ? const_cast<Tensor*>(&t) : nullptr; }
inline tensor_handle lent(const optional_tensor& t) { return t ? lent(*t) : nullptr; }

template <class Call, class Function>
std::vector<Tensor> without_dispatcher(const Function& function, const Call& call) {
  tensor_handle handles[kMostResults];
  const char* error = nullptr;
  const int count = function(call, handles, &error);
  TORCH_CHECK(count >= 0, error);
  std::vector<Tensor> results;
  results.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    const std::unique_ptr<Tensor> own(static_cast<Tensor*>(handles[i]));
    results.push_back(std::move(*own));
  }
  return results;
}

inline std::vector<Tensor> run_kernels(const line_signature& signature, at::TensorList tensors,
                                       const optional_tensor& state, bool save) {
  tensor_handle operands[kMostOperands];
  for (int i = 0; i < signature.operands; ++i) operands[i] = lent(tensors[static_cast<std::size_t>(i) + 1]);
  return without_dispatcher(library.forward, line_forward{signature, lent(tensors[0]), operands, lent(state), save});
}

inline std::vector<Tensor> run_forward(const line_signature& signature, at::TensorList tensors, const std::string& line,
                                       const optional_tensor& state) {
  if (reaches_kernels(tensors))
    return run_kernels(signature, tensors, state, signature.weight >= 0 || signature.reads_statistics);
  using elementwise = std::vector<Tensor>(const Tensor&, at::TensorList, std::string_view, const optional_tensor&);
  using rowwise = std::vector<Tensor>(const Tensor&, at::TensorList, std::string_view, const optional_tensor&, bool);
  if (signature.weight >= 0) {
    static const auto linear = operation<rowwise>("onepass::linear_forward"),
                      scores = operation<rowwise>("onepass::scores_forward"),
                      attention = operation<rowwise>("onepass::attention_forward");
    return contraction_of(signature, linear, scores, attention).call(tensors[0], tensors.slice(1), line, state, true);
  }
  if (signature.rowwise) {
    static const auto op = operation<rowwise>("onepass::rowwise_forward");
    return op.call(tensors[0], tensors.slice(1), line, state, signature.reads_statistics);
  }
  static const auto op = operation<elementwise>("onepass::elementwise_forward");
  return op.call(tensors[0], tensors.slice(1), line, state);
}

// Whether t has the shape of what a contraction gives: as many numbers a row of x as its matrix has rows.
inline bool has_sizes_behind(const Tensor& t, const Tensor& x, const Tensor& matrix) {
  const auto rows = static_cast<std::size_t>(x.dim() - 1);
  return t.dim() == x.dim() && t.size(-1) == matrix.size(-2) && t.sizes().slice(0, rows) == x.sizes().slice(0, rows);
}

// What forward left behind for backward.
struct saved_tensors {
  optional_tensor x, resumed, statistics, dropout_state, product, resumed_behind;
  std::vector<optional_tensor> operands;

  static variable_list pack(const line_signature& signature, at::TensorList tensors, const variable_list& results,
                            const Tensor& statistics, const Tensor& product, const optional_tensor& state) {
    const auto result = [&](int i) { return i < 0 ? Tensor() : results[static_cast<std::size_t>(i)]; };
    const bool for_weight =
        signature.weight >= 0 && tensors[static_cast<std::size_t>(signature.weight) + 1].requires_grad();
    const std::uint64_t operands = signature.reads_operands & ~(for_weight ? 0 : signature.operands_for_weight);
    variable_list all;
    all.reserve(kOperands + tensors.size() - 1);
    all.push_back(signature.reads_x && (for_weight || !signature.x_for_weight) ? tensors[0] : Tensor());
    all.push_back(result(signature.resumes_from));
    all.push_back(statistics);
    all.push_back(state.value_or(Tensor()));
    all.push_back(product);
    all.push_back(result(signature.resumes_behind));
    for (int i = 0; i < signature.operands; ++i) {
      all.push_back(operands >> i & 1 ? tensors[static_cast<std::size_t>(i) + 1] : Tensor());
    }
    return all;
  }

  explicit saved_tensors(const variable_list& all)
      : x(given(all[0])),
        resumed(given(all[1])),
        statistics(given(all[2])),
        dropout_state(given(all[3])),
        product(given(all[4])),
        resumed_behind(given(all[5])) {
    operands.reserve(all.size() - kOperands);
    for (std::size_t i = kOperands; i < all.size(); ++i) operands.push_back(given(all[i]));
  }

  // As the function of that name: what was saved may be a view that is negated when it is read.
  bool reach_kernels() const {
    const keys_of_call keys({});
    const auto reaches = [&](const optional_tensor& t) { return !t || keys.reach_kernel(*t); };
    return reaches(x) && reaches(resumed) && reaches(statistics) && reaches(product) && reaches(resumed_behind) &&
           std::all_of(operands.begin(), operands.end(), reaches);
  }

  static constexpr std::size_t kOperands = 6;  // where they begin
  static optional_tensor given(const Tensor& t) { return t.defined() ? optional_tensor(t) : std::nullopt; }
  static optional_tensors given(const variable_list& all) {
    optional_tensors some;
    for (const Tensor& t : all) some.push_back(given(t));
    return some;
  }
};

// types: of x, then of the operands.
inline std::vector<Tensor> run_backward(const line_signature& signature, at::TensorList upstream,
                                        const saved_tensors& saved, const std::string& line, at::IntArrayRef types,
                                        std::int64_t wanted) {
  if (reaches_kernels(upstream) && saved.reach_kernels()) {
    tensor_handle gradients[kMostResults], operands[kMostOperands];
    for (std::size_t i = 0; i < upstream.size(); ++i) gradients[i] = lent(upstream[i]);
    for (int i = 0; i < signature.operands; ++i) operands[i] = lent(saved.operands[static_cast<std::size_t>(i)]);
    return without_dispatcher(
        library.backward, line_backward{signature, gradients, static_cast<int>(upstream.size()), lent(saved.x),
                                        operands, lent(saved.resumed), lent(saved.statistics), lent(saved.product),
                                        lent(saved.resumed_behind), lent(saved.dropout_state), types.data(), wanted});
  }
  const optional_tensors operands(saved.operands);
  using elementwise =
      std::vector<Tensor>(at::TensorList, const optional_tensor&, const optional_tensors&, const optional_tensor&,
                          const optional_tensor&, std::string_view, at::IntArrayRef, std::int64_t);
  using rowwise = std::vector<Tensor>(at::TensorList, const optional_tensor&, const optional_tensors&,
                                      const optional_tensor&, const optional_tensor&, const optional_tensor&,
                                      std::string_view, at::IntArrayRef, std::int64_t);
  using contraction =
      std::vector<Tensor>(at::TensorList, const optional_tensor&, const optional_tensors&, const optional_tensor&,
                          const optional_tensor&, const optional_tensor&, const optional_tensor&,
                          const optional_tensor&, std::string_view, at::IntArrayRef, std::int64_t);
  if (signature.weight >= 0) {
    static const auto linear = operation<contraction>("onepass::linear_backward"),
                      scores = operation<contraction>("onepass::scores_backward"),
                      attention = operation<contraction>("onepass::attention_backward");
    return contraction_of(signature, linear, scores, attention)
        .call(upstream, saved.x, operands, saved.resumed, saved.statistics, saved.product, saved.resumed_behind,
              saved.dropout_state, line, types, wanted);
  }
  if (signature.rowwise) {
    static const auto op = operation<rowwise>("onepass::rowwise_backward");
    return op.call(upstream, saved.x, operands, saved.resumed, saved.statistics, saved.dropout_state, line,
                   types.slice(1), wanted);
  }
  static const auto op = operation<elementwise>("onepass::elementwise_backward");
  return op.call(upstream, saved.x, operands, saved.resumed, saved.dropout_state, line, types.slice(1), wanted);
}

// What run_backward gives where it may be differentiated again: python/onepass/autograd.py knows its derivative.
inline std::vector<Tensor> run_differentiable_backward(at::TensorList upstream, const variable_list& saved,
                                                       const std::string& line, at::IntArrayRef types,
                                                       std::int64_t wanted) {
  static const auto op =
      operation<std::vector<Tensor>(at::TensorList, const optional_tensors&, std::string_view, at::IntArrayRef,
                                    std::int64_t)>("onepass::differentiable_backward");
  return op.call(upstream, saved_tensors::given(saved), line, types, wanted);
}

// Operands with fewer keeps before them than this have a gradient. Where nobody asks for the result's, those behind the
// last kept value whose gradient is asked for have none, as with PyTorch's operators. 0: nobody asks for any.
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
  if (signature.weight >= 0) {
    sizes.back() = signature.values && kind == 0 ? last.size(-1) : weight.size(before ? -1 : -2);
    if (!before) type = dtype_of(weight);
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

// A node's gradients, made of what forward saved: by differentiable operators where they are to be differentiated.
template <class Gradients>
variable_list with_saved(AutogradContext* ctx, const Gradients& gradients) {
  RECORD_USER_SCOPE("onepass backward: " + ctx->saved_data.at("line").toStringRef());
  const variable_list all = ctx->get_saved_variables();  // a checkpoint computes them here, with autograd
  if (at::GradMode::is_enabled()) return gradients(all);
  const at::AutoDispatchBelowADInplaceOrView below;
  return gradients(all);
}

struct Fused : torch::autograd::Function<Fused> {
  struct call {
    const std::string& line;
    const optional_tensor& dropout_state;
  };

  // tensors: x, then the operands.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const call& with) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const known_line known(with.line);
    const line_signature& signature = known.signature();
    TORCH_CHECK(static_cast<int>(tensors.size()) == 1 + signature.operands, "onepass: the line \"", with.line,
                "\" takes ", signature.operands, " operands, got ", static_cast<int>(tensors.size()) - 1);
    variable_list results = run_forward(signature, tensors, with.line, with.dropout_state);
    const auto take = [&](bool is_there) {
      if (!is_there) return Tensor();
      Tensor last = std::move(results.back());
      results.pop_back();
      return last;
    };
    const Tensor statistics = take(signature.reads_statistics), product = take(signature.reads_product);
    std::vector<std::int64_t> types;
    types.reserve(tensors.size());
    for (const Tensor& t : tensors) {
      const bool behind = signature.weight >= 0 && static_cast<int>(types.size()) > 1 + signature.weight;
      const bool whole = behind
                             ? has_sizes_behind(t, tensors[0], tensors[static_cast<std::size_t>(signature.weight) + 1])
                             : t.sizes() == tensors[0].sizes();
      types.push_back(dtype_of(t) + (whole ? 0 : kBroadcast));
    }
    ctx->saved_data["line"] = with.line;
    ctx->saved_data["types"] = std::move(types);
    ctx->save_for_backward(saved_tensors::pack(signature, tensors, results, statistics, product, with.dropout_state));
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    return with_saved(ctx, [&](const variable_list& all) { return gradients(*ctx, upstream, all); });
  }

 private:
  static variable_list gradients(const AutogradContext& ctx, const variable_list& upstream, const variable_list& all) {
    const std::string& line = ctx.saved_data.at("line").toStringRef();
    const std::vector<std::int64_t> types = ctx.saved_data.at("types").toIntVector();
    const known_line known(line);
    const line_signature& signature = known.signature();
    variable_list results(types.size() + 1);  // one more for `call`
    const auto some = std::find_if(upstream.begin(), upstream.end(), [](const Tensor& t) { return t.defined(); });
    if (some == upstream.end()) return results;
    variable_list given = upstream;
    const Tensor weight =
        signature.weight < 0 ? Tensor() : all[saved_tensors::kOperands + static_cast<std::size_t>(signature.weight)];
    for (std::size_t i = 0; i < given.size(); ++i)
      if (!given[i].defined())
        given[i] = zeros_of(signature, i, some->sizes(), some->device(), types, weight, all.back());
    std::int64_t wanted = 0;
    for (std::size_t i = 0; i < types.size(); ++i) wanted |= std::int64_t{ctx.needs_input_grad(i)} << i;
    const gradient_plan plan(signature, types, wanted);
    variable_list written;
    if (plan.writes) {
      written = at::GradMode::is_enabled() ? run_differentiable_backward(given, all, line, types, wanted)
                                           : run_backward(signature, given, saved_tensors(all), line, types, wanted);
    }
    for (std::size_t i = 0; i < types.size(); ++i) {
      const int source = plan.sources[i];
      if (source == kUpstream) results[i] = given[0];
      else if (source >= 0) results[i] = written[static_cast<std::size_t>(source)];
    }
    const int reached = reached_by(upstream.size(), [&](std::size_t i) { return upstream[i].defined(); });
    for (int i = 0; i < signature.operands; ++i)
      if (signature.keeps_before_operand[i] >= reached) results[static_cast<std::size_t>(i) + 1] = Tensor();
    return results;  // autograd sums a broadcast operand's to its shape
  }
};

inline std::vector<Tensor> differentiable(at::TensorList tensors, std::string_view line, const optional_tensor& state) {
  return Fused::apply(tensors, Fused::call{std::string(line), state});
}

}  // namespace onepass::autograd

#include "src/torch/autograd/autograd_group.h"
#if __has_include(<Python.h>)
#include "src/torch/autograd/fast_path.h"
#endif

TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def("differentiable(Tensor[] tensors, str line, Tensor? dropout_state) -> Tensor[]",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::differentiable)));
  m.def(
      "differentiable_group(Tensor[] tensors, str line, Tensor? dropout_state, int count, int own, bool stack) -> "
      "Tensor[]",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::differentiable_group)));
  m.def("joined(Tensor[] all) -> Tensor[]",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(onepass::autograd::joined)));
}

// As if torch had allocated the tensor's memory: what resizes it takes other memory from torch, and gives this back.
extern "C" __attribute__((visibility("default"))) void onepass_let_resize(void* tensor) {
  c10::StorageImpl* storage = static_cast<at::Tensor*>(tensor)->storage().unsafeGetStorageImpl();
  storage->set_allocator(c10::GetCPUAllocator());
  storage->set_resizable(true);
}

extern "C" __attribute__((visibility("default"))) void onepass_autograd(const onepass::line_library* with) {
  onepass::autograd::library = *with;
}
