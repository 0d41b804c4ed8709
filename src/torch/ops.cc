// The dispatcher's operators: one forward and one backward per kind of kernel, and for several tensors at once;
// functional, without autograd of their own.
#include <torch/csrc/stable/library.h>

#include "src/cpu/threads.h"
#include "src/line/signature.h"
#include "src/torch/check.h"
#include "src/torch/linear/linear.h"
#include "src/torch/lists/group.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

// Backward's tensors are where the gradients are; forward names each operand itself.
struct same_device {
  const device on;
  void check(const char* what, const Tensor& t) const {
    require_device(t, on, [what] { return what; });
  }
  void check(const char* what, const optional_tensor& t) const {
    if (t) check(what, *t);
  }
  template <class T>
  void check(const char* what, const std::vector<T>& all) const {
    for (const T& t : all) check(what, t);
  }
};
template <class... Saved>
void require_devices(const std::vector<Tensor>& gradients, const Saved&... saved) {
  ONEPASS_CHECK(!gradients.empty(), "onepass: backward takes gradients");
  const same_device as_first{device_of(gradients[0])};
  as_first.check("a gradient", gradients);
  (as_first.check("a tensor that backward reads", saved), ...);
}

std::vector<Tensor> elementwise_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                        optional_tensor dropout_state) {
  return forward({x, operands, *prepared(line), dropout_state, false});
}

std::vector<Tensor> rowwise_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                    optional_tensor dropout_state, bool save_statistics) {
  return forward({x, operands, *prepared(line), dropout_state, save_statistics});
}

std::vector<Tensor> elementwise_backward(std::vector<Tensor> gradients, optional_tensor x,
                                         std::vector<optional_tensor> operands, optional_tensor resumed,
                                         optional_tensor dropout_state, std::string line,
                                         std::vector<int64_t> operand_types, int64_t wanted) {
  require_devices(gradients, x, operands, resumed, dropout_state);
  return backward(
      {gradients, x, operands, resumed, std::nullopt, dropout_state, *prepared(line), operand_types, wanted});
}

std::vector<Tensor> rowwise_backward(std::vector<Tensor> gradients, optional_tensor x,
                                     std::vector<optional_tensor> operands, optional_tensor resumed,
                                     optional_tensor statistics, optional_tensor dropout_state, std::string line,
                                     std::vector<int64_t> operand_types, int64_t wanted) {
  require_devices(gradients, x, operands, resumed, statistics, dropout_state);
  return backward({gradients, x, operands, resumed, statistics, dropout_state, *prepared(line), operand_types, wanted});
}

std::vector<Tensor> contraction_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                        optional_tensor dropout_state, bool save) {
  return forward_of_contraction({x, operands, *prepared(line), dropout_state, save});
}

std::vector<Tensor> contraction_backward(std::vector<Tensor> gradients, optional_tensor x,
                                         std::vector<optional_tensor> operands, optional_tensor resumed,
                                         optional_tensor statistics, optional_tensor product,
                                         optional_tensor resumed_behind, optional_tensor dropout_state,
                                         std::string line, std::vector<int64_t> types, int64_t wanted) {
  ONEPASS_CHECK(!types.empty(), "onepass: backward takes x's dtype and those of the operands");
  require_devices(gradients, x, operands, resumed, statistics, product, resumed_behind, dropout_state);
  const std::vector<int64_t> operand_types(types.begin() + 1, types.end());
  return backward_of_contraction(
      {gradients, x, operands, resumed, statistics, dropout_state, *prepared(line), operand_types, wanted},
      {static_cast<dtype>(types[0]), product, resumed_behind});
}

std::vector<Tensor> linear_forward_with_gradients(Tensor x, std::vector<Tensor> operands, std::string line,
                                                  optional_tensor dropout_state, std::vector<Tensor> gradients,
                                                  std::vector<int64_t> types, int64_t wanted) {
  ONEPASS_CHECK(!types.empty(), "onepass: backward takes x's dtype and those of the operands");
  const std::vector<int64_t> operand_types(types.begin() + 1, types.end());
  return forward_with_gradients({x, operands, *prepared(line), dropout_state, true}, gradients, operand_types, wanted);
}

// Where the factor is 1, which only the device knows, nothing is read or written.
void times_(Tensor x, Tensor factor) {
  require_device(factor, device_of(x), [] { return "factor"; });
  ONEPASS_CHECK(factor.numel() == 1 && factor.dim() == x.dim(),
                "onepass: factor must be one number, of x's dimensions");
  const std::vector<Tensor> gradients{x};
  const std::vector<optional_tensor> operands{factor};
  const std::vector<std::int64_t> types{static_cast<std::int64_t>(dtype_of(factor)) + kBroadcast};
  const std::shared_ptr<const prepared_line> line = prepared("times");
  const optional_tensor input = x;  // which a gradient of the factor would read
  backward_call call{gradients, input, operands, std::nullopt, std::nullopt, std::nullopt, *line, types, 1};
  call.dx = &x;
  backward(call);
}

std::vector<Tensor> forward_of_group(std::vector<Tensor> xs, std::vector<Tensor> operands, std::string line,
                                     optional_tensor dropout_state, bool save, int64_t own, bool stack) {
  const group_of of{static_cast<int64_t>(xs.size()), static_cast<std::uint64_t>(own), stack};
  const std::shared_ptr<const prepared_line> of_line = prepared(line);
  return forward(group_forward{xs, operands, *of_line, dropout_state, save, of});
}

std::vector<Tensor> backward_of_group(std::vector<Tensor> gradients, std::vector<Tensor> xs,
                                      std::vector<optional_tensor> operands, std::vector<Tensor> resumed,
                                      optional_tensor statistics, optional_tensor dropout_state, std::string line,
                                      std::vector<int64_t> operand_types, int64_t wanted, int64_t own, bool stack) {
  require_devices(gradients, xs, operands, resumed, statistics, dropout_state);
  const std::shared_ptr<const prepared_line> held = prepared(line);
  const prepared_line& of_line = *held;
  const int64_t count =
      stack ? gradients[0].size(0) : static_cast<int64_t>(gradients.size()) / (1 + of_line.line.keeps);
  const group_backward call{
      gradients,     xs,      operands,      resumed, statistics,
      dropout_state, of_line, operand_types, wanted,  {count, static_cast<std::uint64_t>(own), stack}};
  std::vector<Tensor> results;
  for (const std::vector<Tensor>& some : backward(call)) results.insert(results.end(), some.begin(), some.end());
  return results;
}

void in_torch_threads(int64 count, int64 grain, void (*body)(void*, int64, int64), void* context) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}
int torch_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace
}  // namespace onepass::binding

STABLE_TORCH_LIBRARY(onepass, m) {
  onepass::cpu::set_parallel_for(onepass::binding::in_torch_threads, onepass::binding::torch_threads);
  m.def("elementwise_forward(Tensor x, Tensor[] operands, str line, Tensor? dropout_state) -> Tensor[]");
  m.def(
      "rowwise_forward(Tensor x, Tensor[] operands, str line, Tensor? dropout_state, bool save_statistics) -> "
      "Tensor[]");
  m.def(
      "elementwise_backward(Tensor[] gradients, Tensor? x, Tensor?[] operands, Tensor? resumed, "
      "Tensor? dropout_state, str line, int[] operand_types, int wanted) -> Tensor[]");
  m.def(
      "rowwise_backward(Tensor[] gradients, Tensor? x, Tensor?[] operands, Tensor? resumed, Tensor? statistics, "
      "Tensor? dropout_state, str line, int[] operand_types, int wanted) -> Tensor[]");
  m.def(
      "group_forward(Tensor[] xs, Tensor[] operands, str line, Tensor? dropout_state, bool save, int own, bool stack) "
      "-> Tensor[]");
  m.def(
      "group_backward(Tensor[] gradients, Tensor[] xs, Tensor?[] operands, Tensor[] resumed, Tensor? statistics, "
      "Tensor? dropout_state, str line, int[] operand_types, int wanted, int own, bool stack) -> Tensor[]");
  m.def(
      "linear_forward_with_gradients(Tensor x, Tensor[] operands, str line, Tensor? dropout_state, Tensor[] gradients, "
      "int[] types, int wanted) -> Tensor[]");
  m.def("times_(Tensor(a!) x, Tensor factor) -> ()");
  for (const char* kind : {"linear", "scores", "attention"}) {
    const std::string name = kind;
    m.def((name + "_forward(Tensor x, Tensor[] operands, str line, Tensor? dropout_state, bool save) -> Tensor[]")
              .c_str());
    m.def((name +
           "_backward(Tensor[] gradients, Tensor? x, Tensor?[] operands, Tensor? resumed, Tensor? statistics, "
           "Tensor? product, Tensor? resumed_behind, Tensor? dropout_state, str line, int[] types, int wanted) -> "
           "Tensor[]")
              .c_str());
  }
}

#define ONEPASS_REGISTER(device)                                                                          \
  STABLE_TORCH_LIBRARY_IMPL(onepass, device, m) {                                                         \
    m.impl("elementwise_forward", TORCH_BOX(&onepass::binding::elementwise_forward));                     \
    m.impl("rowwise_forward", TORCH_BOX(&onepass::binding::rowwise_forward));                             \
    m.impl("elementwise_backward", TORCH_BOX(&onepass::binding::elementwise_backward));                   \
    m.impl("rowwise_backward", TORCH_BOX(&onepass::binding::rowwise_backward));                           \
    m.impl("group_forward", TORCH_BOX(&onepass::binding::forward_of_group));                              \
    m.impl("group_backward", TORCH_BOX(&onepass::binding::backward_of_group));                            \
    m.impl("linear_forward", TORCH_BOX(&onepass::binding::contraction_forward));                          \
    m.impl("linear_backward", TORCH_BOX(&onepass::binding::contraction_backward));                        \
    m.impl("linear_forward_with_gradients", TORCH_BOX(&onepass::binding::linear_forward_with_gradients)); \
    m.impl("times_", TORCH_BOX(&onepass::binding::times_));                                               \
    m.impl("scores_forward", TORCH_BOX(&onepass::binding::contraction_forward));                          \
    m.impl("scores_backward", TORCH_BOX(&onepass::binding::contraction_backward));                        \
    m.impl("attention_forward", TORCH_BOX(&onepass::binding::contraction_forward));                       \
    m.impl("attention_backward", TORCH_BOX(&onepass::binding::contraction_backward));                     \
  }
ONEPASS_REGISTER(CPU)
ONEPASS_REGISTER(CUDA)
