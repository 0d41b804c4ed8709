// The operators below autograd, called from what is compiled with autograd_function.h: through the dispatcher, or where
// only a device's kernels would see the tensors, by the library's functions.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "onepass/lane/types.h"
#include "src/line/signature.h"

namespace onepass::autograd {

using at::Tensor;
using optional_tensor = std::optional<Tensor>;
using optional_tensors = c10::List<optional_tensor>;
using torch::autograd::variable_list;

inline line_library library;  // filled in by the library, once, before the first call

// A line's signature, which stays as long as this.
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

// A line as it is called: for one tensor, or for a list of them.
struct line_call {
  const line_signature& signature;
  const std::string& line;
  std::int64_t count = 0;  // tensors of the list; 0: one tensor, no list
  std::int64_t own = 0;    // bits: operands of which each tensor of a list has one of its own
  bool stack = false;      // whether the results of a list are stacked

  bool is_list() const { return count > 0; }
  std::int64_t tensors() const { return is_list() ? count : 1; }
  std::int64_t results() const { return stack ? 1 : tensors(); }  // of each kind
};

// What forward left for backward. As a list, in this order: the four, the operands, each tensor's x, each tensor's
// value to resume from; those that backward does not read are left out. A call of one tensor always has an entry for x.
struct saved_tensors {
  optional_tensor dropout_state, statistics, product, resumed_behind;
  std::vector<optional_tensor> operands;
  variable_list x, resumed;

  saved_tensors(const line_call& call, const variable_list& all, std::size_t operand_tensors)
      : dropout_state(given(all[0])), statistics(given(all[1])), product(given(all[2])), resumed_behind(given(all[3])) {
    operands.reserve(operand_tensors);
    auto next = all.begin() + kOperands;
    for (std::size_t i = 0; i < operand_tensors; ++i) operands.push_back(given(*next++));
    const std::int64_t count = call.signature.reads_x || !call.is_list() ? call.tensors() : 0;
    x.assign(next, next + count), next += count;
    resumed.assign(next, all.end());
  }

  static constexpr std::size_t kResumedBehind = 3, kOperands = 4;  // where they begin
  static optional_tensor given(const Tensor& t) { return t.defined() ? optional_tensor(t) : std::nullopt; }
  static optional_tensor first(const variable_list& some) { return some.empty() ? std::nullopt : given(some[0]); }
};

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
  explicit keys_of_call(c10::DispatchKeySet passed = {})
      : unseen_(local_.excluded_.add(c10::DispatchKey::BackendSelect) | passed) {}  // always there, for factories
  bool reach_kernel(const Tensor& t) const {
    const c10::DispatchKey key = ((t.key_set() | local_.included_) - unseen_).highestPriorityTypeId();
    return key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA;
  }
  bool reach_kernel(const optional_tensor& t) const { return !t || reach_kernel(*t); }

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

// The same of what was saved, which may be a view that is negated when it is read.
inline bool reaches_kernels(const saved_tensors& saved) {
  const keys_of_call keys;
  const auto reaches = [&](const optional_tensor& t) { return keys.reach_kernel(t); };
  return reaches(saved_tensors::first(saved.x)) && reaches(saved_tensors::first(saved.resumed)) &&
         reaches(saved.statistics) && reaches(saved.product) && reaches(saved.resumed_behind) &&
         std::all_of(saved.operands.begin(), saved.operands.end(), reaches);
}

inline tensor_handle lent(const Tensor& t) { return t.defined() ? const_cast<Tensor*>(&t) : nullptr; }
inline tensor_handle lent(const optional_tensor& t) { return t ? lent(*t) : nullptr; }
inline tensor_handle lent(const variable_list& some) { return some.empty() ? nullptr : lent(some[0]); }

template <class Call, class Function>
std::vector<Tensor> without_dispatcher(const Function& function, const Call& call) {
  tensor_handle handles[kMostResults];
  const char* error = nullptr;
  const int count = function(call, handles, &error);
  TORCH_CHECK_INDEX(count != kOutOfRange, error);
  TORCH_CHECK(count >= 0, error);
  std::vector<Tensor> results;
  results.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    const std::unique_ptr<Tensor> own(static_cast<Tensor*>(handles[i]));
    results.push_back(std::move(*own));
  }
  return results;
}

// For one tensor.
inline std::vector<Tensor> run_kernels(const line_signature& signature, at::TensorList tensors,
                                       const optional_tensor& state, bool save) {
  tensor_handle operands[kMostOperands];
  for (int i = 0; i < signature.operands; ++i) operands[i] = lent(tensors[static_cast<std::size_t>(i) + 1]);
  return without_dispatcher(library.forward, line_forward{signature, lent(tensors[0]), operands, lent(state), save});
}

// tensors: x of each tensor, then the operands.
inline std::vector<Tensor> run_forward(const line_call& call, at::TensorList tensors, const optional_tensor& state) {
  const line_signature& signature = call.signature;
  if (call.is_list()) {
    using list = std::vector<Tensor>(at::TensorList, at::TensorList, std::string_view, const optional_tensor&, bool,
                                     std::int64_t, bool);
    static const auto op = operation<list>("onepass::group_forward");
    const auto count = static_cast<std::size_t>(call.count);
    return op.call(tensors.slice(0, count), tensors.slice(count), call.line, state, signature.reads_statistics,
                   call.own, call.stack);
  }
  if (reaches_kernels(tensors))
    return run_kernels(signature, tensors, state, signature.weight >= 0 || signature.reads_statistics);
  using elementwise = std::vector<Tensor>(const Tensor&, at::TensorList, std::string_view, const optional_tensor&);
  using rowwise = std::vector<Tensor>(const Tensor&, at::TensorList, std::string_view, const optional_tensor&, bool);
  if (signature.weight >= 0) {
    static const auto linear = operation<rowwise>("onepass::linear_forward"),
                      scores = operation<rowwise>("onepass::scores_forward"),
                      attention = operation<rowwise>("onepass::attention_forward");
    const auto& op = contraction_of(signature, linear, scores, attention);
    return op.call(tensors[0], tensors.slice(1), call.line, state, true);
  }
  if (signature.rowwise) {
    static const auto op = operation<rowwise>("onepass::rowwise_forward");
    return op.call(tensors[0], tensors.slice(1), call.line, state, signature.reads_statistics);
  }
  static const auto op = operation<elementwise>("onepass::elementwise_forward");
  return op.call(tensors[0], tensors.slice(1), call.line, state);
}

// types: of x, then of the operands.
inline std::vector<Tensor> run_backward(const line_call& call, at::TensorList upstream, const saved_tensors& saved,
                                        at::IntArrayRef types, std::int64_t wanted) {
  const line_signature& signature = call.signature;
  if (!call.is_list() && reaches_kernels(upstream) && reaches_kernels(saved)) {
    tensor_handle gradients[kMostResults], operands[kMostOperands];
    for (std::size_t i = 0; i < upstream.size(); ++i) gradients[i] = lent(upstream[i]);
    for (int i = 0; i < signature.operands; ++i) operands[i] = lent(saved.operands[static_cast<std::size_t>(i)]);
    return without_dispatcher(
        library.backward, line_backward{signature, gradients, static_cast<int>(upstream.size()), lent(saved.x),
                                        operands, lent(saved.resumed), lent(saved.statistics), lent(saved.product),
                                        lent(saved.resumed_behind), lent(saved.dropout_state), types.data(), wanted});
  }
  const optional_tensors operands(saved.operands);
  const at::IntArrayRef operand_types = types.slice(1);
  if (call.is_list()) {
    using list = std::vector<Tensor>(at::TensorList, at::TensorList, const optional_tensors&, at::TensorList,
                                     const optional_tensor&, const optional_tensor&, std::string_view, at::IntArrayRef,
                                     std::int64_t, std::int64_t, bool);
    static const auto op = operation<list>("onepass::group_backward");
    return op.call(upstream, saved.x, operands, saved.resumed, saved.statistics, saved.dropout_state, call.line,
                   operand_types, wanted, call.own, call.stack);
  }
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
  const optional_tensor x = saved_tensors::first(saved.x), resumed = saved_tensors::first(saved.resumed);
  if (signature.weight >= 0) {
    static const auto linear = operation<contraction>("onepass::linear_backward"),
                      scores = operation<contraction>("onepass::scores_backward"),
                      attention = operation<contraction>("onepass::attention_backward");
    const auto& op = contraction_of(signature, linear, scores, attention);
    return op.call(upstream, x, operands, resumed, saved.statistics, saved.product, saved.resumed_behind,
                   saved.dropout_state, call.line, types, wanted);
  }
  if (signature.rowwise) {
    static const auto op = operation<rowwise>("onepass::rowwise_backward");
    return op.call(upstream, x, operands, resumed, saved.statistics, saved.dropout_state, call.line, operand_types,
                   wanted);
  }
  static const auto op = operation<elementwise>("onepass::elementwise_backward");
  return op.call(upstream, x, operands, resumed, saved.dropout_state, call.line, operand_types, wanted);
}

// What run_backward gives where it may be differentiated again: python/onepass/autograd.py knows its derivative.
inline std::vector<Tensor> run_differentiable_backward(const line_call& call, at::TensorList upstream,
                                                       const variable_list& saved, at::IntArrayRef types,
                                                       std::int64_t wanted) {
  using differentiable = std::vector<Tensor>(at::TensorList, const optional_tensors&, std::string_view, at::IntArrayRef,
                                             std::int64_t, std::int64_t, std::int64_t, bool);
  static const auto op = operation<differentiable>("onepass::differentiable_backward");
  optional_tensors some;
  for (const Tensor& t : saved) some.push_back(saved_tensors::given(t));
  return op.call(upstream, some, call.line, types, wanted, call.count, call.own, call.stack);
}

}  // namespace onepass::autograd
