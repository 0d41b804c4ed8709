// The autograd function in C++, which takes more of torch than its stable ABI: compiled at first use.
#include "src/torch/autograd/autograd.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>

#include "src/compiler.h"
#include "src/settings.h"
#include "src/torch/linear/chunks.h"

namespace onepass::binding {
namespace {

using optional_tensor = std::optional<Tensor>;

using held_line = std::shared_ptr<const prepared_line>;

const line_signature* find(const char* text, void** held) {
  try {
    auto* const line = new held_line(prepared(text));
    *held = line;
    return &(*line)->signature;
  } catch (const spec::line_error&) {
    return nullptr;
  }
}

void release(void* held) { delete static_cast<held_line*>(held); }

bool is_ready_on_cpu(const line_signature& signature, std::uint64_t boolean_masks, int x) {
  return static_cast<const prepared_line*>(signature.line)->is_ready_on_cpu(boolean_masks, static_cast<dtype>(x));
}

bool plan(const line_signature& signature, int x, const std::int64_t* operand_types, std::uint64_t wanted,
          int* sources) {
  const auto& prepared = *static_cast<const prepared_line*>(signature.line);
  const auto operands = spec::operand_facts_of(operand_types, static_cast<std::size_t>(signature.operands));
  const auto type = static_cast<dtype>(x);
  const spec::gradients gradients =
      prepared.attention     ? spec::plan_gradients(prepared.attention->parts, type, operands, wanted).all
      : prepared.contraction ? spec::plan_gradients(prepared.contraction->parts, type, operands, wanted).all
                             : spec::plan_gradients(prepared.line, type, operands, wanted);
  std::copy(gradients.inputs.begin(), gradients.inputs.end(), sources);
  return !gradients.outputs.empty();
}

optional_tensor borrowed(tensor_handle lent) {
  if (lent == nullptr) return {};
  AtenTensorHandle own = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(static_cast<AtenTensorHandle>(lent), &own));
  return Tensor(own);
}

// Tensors that `make` gives, or its error, in the form that the two libraries share.
template <class Make>
int handed_over(const Make& make, tensor_handle* results, const char** error) {
  thread_local std::string message;
  try {
    const std::vector<Tensor> made = make();
    for (std::size_t i = 0; i < made.size(); ++i) {
      AtenTensorHandle own = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(made[i].get(), &own));
      results[i] = own;
    }
    return static_cast<int>(made.size());
  } catch (const std::exception& e) {
    message = e.what();
    *error = message.c_str();
    return dynamic_cast<const std::out_of_range*>(&e) != nullptr ? kOutOfRange : kFailed;
  }
}

int forward_of(const line_forward& given, tensor_handle* results, const char** error) {
  return handed_over(
      [&] {
        const auto& line = *static_cast<const prepared_line*>(given.line.line);
        std::vector<Tensor> operands;
        operands.reserve(static_cast<std::size_t>(given.line.operands));
        for (int i = 0; i < given.line.operands; ++i) operands.push_back(*borrowed(given.operands[i]));
        const Tensor x = *borrowed(given.x);
        const optional_tensor state = borrowed(given.dropout_state);
        const forward_call call{x, operands, line, state, given.save};
        return line.line.linear >= 0 ? forward_of_contraction(call) : forward(call);
      },
      results, error);
}

int backward_of(const line_backward& given, tensor_handle* results, const char** error) {
  return handed_over(
      [&] {
        const auto& line = *static_cast<const prepared_line*>(given.line.line);
        std::vector<Tensor> gradients;
        gradients.reserve(static_cast<std::size_t>(given.gradient_count));
        for (int i = 0; i < given.gradient_count; ++i) gradients.push_back(*borrowed(given.gradients[i]));
        std::vector<optional_tensor> operands;
        operands.reserve(static_cast<std::size_t>(given.line.operands));
        for (int i = 0; i < given.line.operands; ++i) operands.push_back(borrowed(given.operands[i]));
        const std::vector<std::int64_t> types(given.types + 1, given.types + 1 + given.line.operands);
        const optional_tensor x = borrowed(given.x), resumed = borrowed(given.resumed),
                              statistics = borrowed(given.statistics), state = borrowed(given.dropout_state);
        const backward_call call{gradients, x, operands, resumed, statistics, state, line, types, given.wanted};
        if (line.line.linear < 0) return backward(call);
        const optional_tensor product = borrowed(given.product), behind = borrowed(given.resumed_behind);
        return backward_of_contraction(call, {static_cast<dtype>(given.types[0]), product, behind});
      },
      results, error);
}

// As CMakeLists.txt compiles it for the torch that is there when the library is built.
program program_for(const torch_here& torch) {
  return {"// torch " + torch.version + "\n#include \"src/torch/autograd/autograd_function.h\"\n",
          "autograd for torch " + torch.version,
          {"-O2", "-isystem", torch.root + "/include", "-isystem", torch.root + "/include/torch/csrc/api/include",
           "-isystem", torch.python_include, "-L", torch.root + "/lib", "-ltorch_python", "-ltorch_cpu", "-lc10"}};
}

}  // namespace

void* open_autograd(const torch_here& torch, bool may_compile) {
  static std::mutex mutex;
  static void* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened != nullptr) return opened;
  const std::string built = settings_now().library_dir + "/autograd-" + torch.version + ".so";
  void* handle = dlopen(built.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr && !may_compile) return nullptr;
  if (handle == nullptr) handle = compile_and_open(program_for(torch));
  const line_library library{find, release, is_ready_on_cpu, plan, forward_of, backward_of};
  using configure = void (*)(const line_library*);
  reinterpret_cast<configure>(symbol(handle, "onepass_autograd"))(&library);
  let_products_add(reinterpret_cast<void (*)(void*, void*, void*)>(symbol(handle, "onepass_add_product")));
  let_storages_resize(reinterpret_cast<void (*)(void*)>(symbol(handle, "onepass_let_resize")));
  return opened = handle;
}

}  // namespace onepass::binding
