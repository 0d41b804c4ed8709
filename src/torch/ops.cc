// The dispatcher's operators: one forward and one backward per skeleton, functional, without autograd of their own.
#include <torch/csrc/stable/library.h>

#include "src/cpu/run.h"
#include "src/torch/check.h"
#include "src/torch/contraction.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

std::vector<Tensor> elementwise_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                        optional_tensor dropout_state) {
  return forward({x, operands, prepared(line), dropout_state, false});
}

std::vector<Tensor> rowwise_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                    optional_tensor dropout_state, bool save_statistics) {
  return forward({x, operands, prepared(line), dropout_state, save_statistics});
}

std::vector<Tensor> elementwise_backward(std::vector<Tensor> gradients, optional_tensor x,
                                         std::vector<optional_tensor> operands, optional_tensor resumed,
                                         optional_tensor dropout_state, std::string line,
                                         std::vector<int64_t> operand_types, int64_t wanted) {
  return backward(
      {gradients, x, operands, resumed, std::nullopt, dropout_state, prepared(line), operand_types, wanted});
}

std::vector<Tensor> rowwise_backward(std::vector<Tensor> gradients, optional_tensor x,
                                     std::vector<optional_tensor> operands, optional_tensor resumed,
                                     optional_tensor statistics, optional_tensor dropout_state, std::string line,
                                     std::vector<int64_t> operand_types, int64_t wanted) {
  return backward({gradients, x, operands, resumed, statistics, dropout_state, prepared(line), operand_types, wanted});
}

std::vector<Tensor> contraction_forward(Tensor x, std::vector<Tensor> operands, std::string line,
                                        optional_tensor dropout_state, bool save) {
  return forward_of_contraction({x, operands, prepared(line), dropout_state, save});
}

std::vector<Tensor> contraction_backward(std::vector<Tensor> gradients, optional_tensor x,
                                         std::vector<optional_tensor> operands, optional_tensor resumed,
                                         optional_tensor statistics, optional_tensor product,
                                         optional_tensor resumed_behind, optional_tensor dropout_state,
                                         std::string line, std::vector<int64_t> types, int64_t wanted) {
  ONEPASS_CHECK(!types.empty(), "onepass: backward takes x's dtype and those of the operands");
  const std::vector<int64_t> operand_types(types.begin() + 1, types.end());
  return backward_of_contraction(
      {gradients, x, operands, resumed, statistics, dropout_state, prepared(line), operand_types, wanted},
      {static_cast<dtype>(types[0]), product, resumed_behind});
}

void in_torch_threads(int64 count, int64 grain, void (*body)(void*, int64, int64), void* context) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

}  // namespace
}  // namespace onepass::binding

STABLE_TORCH_LIBRARY(onepass, m) {
  onepass::cpu::set_parallel_for(onepass::binding::in_torch_threads);
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
  for (const char* skeleton : {"linear", "scores", "attention"}) {
    const std::string name = skeleton;
    m.def((name + "_forward(Tensor x, Tensor[] operands, str line, Tensor? dropout_state, bool save) -> Tensor[]")
              .c_str());
    m.def((name +
           "_backward(Tensor[] gradients, Tensor? x, Tensor?[] operands, Tensor? resumed, Tensor? statistics, "
           "Tensor? product, Tensor? resumed_behind, Tensor? dropout_state, str line, int[] types, int wanted) -> "
           "Tensor[]")
              .c_str());
  }
}

#define ONEPASS_REGISTER(device)                                                        \
  STABLE_TORCH_LIBRARY_IMPL(onepass, device, m) {                                       \
    m.impl("elementwise_forward", TORCH_BOX(&onepass::binding::elementwise_forward));   \
    m.impl("rowwise_forward", TORCH_BOX(&onepass::binding::rowwise_forward));           \
    m.impl("elementwise_backward", TORCH_BOX(&onepass::binding::elementwise_backward)); \
    m.impl("rowwise_backward", TORCH_BOX(&onepass::binding::rowwise_backward));         \
    m.impl("linear_forward", TORCH_BOX(&onepass::binding::contraction_forward));        \
    m.impl("linear_backward", TORCH_BOX(&onepass::binding::contraction_backward));      \
    m.impl("scores_forward", TORCH_BOX(&onepass::binding::contraction_forward));        \
    m.impl("scores_backward", TORCH_BOX(&onepass::binding::contraction_backward));      \
    m.impl("attention_forward", TORCH_BOX(&onepass::binding::contraction_forward));     \
    m.impl("attention_backward", TORCH_BOX(&onepass::binding::contraction_backward));   \
  }
ONEPASS_REGISTER(CPU)
ONEPASS_REGISTER(CUDA)
