// The autograd function in C++, which takes more of torch than its stable ABI: compiled at first use.
#include "src/torch/autograd.h"

#include <dlfcn.h>

#include <algorithm>

#include "src/compiler.h"
#include "src/settings.h"
#include "src/torch/prepared.h"

namespace onepass::binding {
namespace {

const line_facts* find(const char* text) {
  try {
    return &prepared(text).facts;
  } catch (const spec::line_error&) {
    return nullptr;
  }
}

bool plan(const line_facts& facts, int x, const std::int64_t* operand_types, std::uint64_t wanted, int* sources) {
  const auto& prepared = *static_cast<const prepared_line*>(facts.line);
  const auto operands = spec::operand_facts_of(operand_types, static_cast<std::size_t>(facts.operands));
  const auto type = static_cast<dtype>(x);
  const spec::gradients gradients = prepared.contraction
                                        ? spec::plan_gradients(prepared.contraction->parts, type, operands, wanted).all
                                        : spec::plan_gradients(prepared.line, type, operands, wanted);
  std::copy(gradients.inputs.begin(), gradients.inputs.end(), sources);
  return !gradients.outputs.empty();
}

// As CMakeLists.txt compiles it for the torch that is there when the library is built.
program program_for(const std::string& torch_root, const std::string& torch_version) {
  return {"// torch " + torch_version + "\n#include \"src/torch/autograd_function.h\"\n",
          "autograd for torch " + torch_version,
          {"-O2", "-isystem", torch_root + "/include", "-isystem", torch_root + "/include/torch/csrc/api/include", "-L",
           torch_root + "/lib", "-ltorch_cpu", "-lc10"}};
}

}  // namespace

void open_autograd(const std::string& torch_root, const std::string& torch_version) {
  static const bool opened = [&] {
    const std::string built = settings_now().library_dir + "/autograd-" + torch_version + ".so";
    void* handle = dlopen(built.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) handle = compile_and_open(program_for(torch_root, torch_version));
    const line_library library{find, plan};
    using configure = void (*)(const line_library*);
    reinterpret_cast<configure>(symbol(handle, "onepass_autograd"))(&library);
    return true;
  }();
  static_cast<void>(opened);
}

}  // namespace onepass::binding
