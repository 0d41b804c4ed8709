// The text that NVRTC compiles: a kernel's header, a line's type and a Config.
#include "src/cuda/runtime/source.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "src/cuda/kernels.h"
#include "src/cuda/row/tuning.h"

namespace onepass::cuda {
namespace {

constexpr const char* kPrefix = "onepass_";  // of kernels' names, which no other function's begins with

}  // namespace

std::string heading(const request& r, const std::string& header) {
  std::string text;
  const auto define = [&](const char* name, int value) {
    text += std::string("#define ONEPASS_") + name + ' ' + std::to_string(value) + '\n';
  };
  define("RESULT_BITS", result_bits(r)), define("OPERANDS", room_for(r.operands)), define("KEEPS", room_for(r.keeps));
  define("PARAMETERS", room_for(r.parameters));
  if (r.has_groups) text += "#define ONEPASS_GROUPS\n";
  return text + "#include \"onepass/kernel/" + header + ".cuda.h\"\nONEPASS_BEGIN\n";
}

std::string type_field(const char* name, dtype type) {
  return std::string("  static constexpr dtype ") + name + " = dtype::" + name_of(type) + ";\n";
}

std::string number_field(const char* name, int value) {
  return std::string("  static constexpr int ") + name + " = " + std::to_string(value) + ";\n";
}

std::string fields(const request& r, const configuration& c) {
  std::string text;
  auto field = [&](const char* type, const char* name, const std::string& value) {
    text += std::string("  static constexpr ") + type + " " + name + " = " + value + ";\n";
  };
  auto number = [&](const char* name, int value) { text += number_field(name, value); };
  auto flag = [&](const char* name, bool value) { field("bool", name, value ? "true" : "false"); };
  auto bits = [&](const char* name, uint64 value) { field("uint64", name, std::to_string(value) + "ull"); };
  text += std::string("  using arithmetic = ") + (r.x == dtype::f64 ? "double" : "float") + ";\n";
  text += std::string("  using index = ") + (c.small ? "int" : "int64") + ";\n" + type_field("kX", r.x);
  std::string operands = "{", kept = "{";
  for (dtype type : r.operand) operands += std::string("dtype::") + name_of(type) + ", ";
  for (dtype own : r.kept) kept += std::string("dtype::") + name_of(result_dtype(r.x, own)) + ", ";
  field("dtype", "kOperand[kMaxOperands]", operands + "}");
  field("dtype", "kKept[kMaxKeeps]", kept + "}");
  text += type_field("kY", result_dtype(r.x, r.result));
#define ONEPASS_NUMBER(member, name) number(#name, c.member);
#define ONEPASS_FLAG(member, name) flag(#name, c.member);
#define ONEPASS_SET(member, name) bits(#name, c.member);
  ONEPASS_CONFIGURATION(ONEPASS_NUMBER, ONEPASS_FLAG, ONEPASS_SET)
#undef ONEPASS_NUMBER
#undef ONEPASS_FLAG
#undef ONEPASS_SET
  number("kThreads", c.threads > 0 ? c.threads : c.across * c.down);
  number("kMembers", c.members), number("kFeatures", r.features), flag("kInHalves", r.rope >= 0);
  bits("kWantsColumn", r.wants_column), bits("kWantsTensor", r.wants_tensor);
  flag("kWantsDx", r.wants_dx), flag("kWantsRecompute", r.wants_recompute);
  return text;
}

std::string function_of(const request& r, const configuration& c) {
  static constexpr const char* kSuffix[] = {"", "_streamed", "_paired", "_parts", "_combined", "_tiles"};
  return std::string(r.rowwise ? "rowwise" : "elementwise") + (r.backward ? "_backward" : "_forward") +
         kSuffix[static_cast<int>(c.of)];
}

std::string source(const request& r, const configuration& c) {
  const char* const header = c.of == part::streamed ? "streamed"
                             : c.of == part::paired ? "paired"
                             : c.of != part::whole  ? "split_rows"
                             : r.rowwise            ? "rowwise"
                                                    : "elementwise";
  std::string text =
      heading(r, std::string("row/") + header) + "using the_line = " + r.line + ";\nstruct config {\n" + fields(r, c);
  const std::string function = function_of(r, c);
  const char* block = has_whole_rows(r, c) ? "blockIdx.x / config::kCluster" : c.flat ? "blockIdx.x" : "blockIdx.y";
  // Where several tensors share the launch, a block has the arguments of its own.
  const std::string type = c.members == 0 ? "arguments" : "members<" + std::to_string(c.members) + ">",
                    given = c.members == 0 ? "a" : std::string("a.at(") + block + ")";
  return text + "};\n" + kernel_text(function, "config, the_line", bounds(c), type, given) + "ONEPASS_END\n";
}

std::string kernel_name(const std::string& function) {
  if (std::find(std::begin(kKernels), std::end(kKernels), function) == std::end(kKernels))
    throw std::logic_error("onepass: src/cuda/kernels.h lacks " + function);
  return kPrefix + function;
}

std::string bounds(int threads, int blocks_per_sm, int cluster) {
  return "__launch_bounds__(" + std::to_string(threads) +
         (blocks_per_sm > 0 ? ", " + std::to_string(blocks_per_sm) : "") + ") " +
         (cluster > 0 ? "__cluster_dims__(" + std::to_string(cluster) + ", 1, 1) " : "");
}

std::string bounds(const configuration& c) {
  return bounds(c.across * c.down, std::max(c.blocks_per_sm, 1), c.cluster > 1 ? c.cluster : 0);
}

std::string kernel_text(const std::string& function, const std::string& types, const std::string& bounds,
                        const std::string& arguments_type, const std::string& given) {
  return "extern \"C\" __global__ void " + bounds + kernel_name(function) + "(const __grid_constant__ " +
         arguments_type + " a) {\n  " + function + "<" + types + ">(" + given + ");\n}\n";
}

const kernel& load(const std::string& source, int device, void* stream, const std::string& label) {
  const std::size_t begin = source.rfind(std::string(" ") + kPrefix) + 1, end = source.find('(', begin);
  return load(source, source.substr(begin, end - begin).c_str(), device, stream, label);
}

std::string column_sum_source(dtype parts, int sums, bool grouped) {
  const int threads = static_cast<int>(kTuning.column_sum_threads);
  return "#define ONEPASS_SUMS " + std::to_string(sums) +
         "\n#include \"onepass/kernel/row/column_sum.cuda.h\"\nONEPASS_BEGIN\n" +
         kernel_text("add_columns",
                     std::string(parts == dtype::f64 ? "double" : "float") + ", " + std::to_string(threads) + ", " +
                         std::to_string(kTuning.column_sum_columns) + (grouped ? ", true" : ""),
                     bounds(threads), "column_sum_arguments") +
         "ONEPASS_END\n";
}

std::string label(const request& r, const configuration& c, const std::string& arch) {
  return arch + " " + name_of(r.x) + (r.backward ? " backward " : " forward ") +
         (c.cluster > 1 ? std::to_string(c.cluster) + "*" : "") + std::to_string(c.across) + "x" +
         std::to_string(c.down) + "x" + std::to_string(r.rowwise ? c.held_vectors : c.unroll) +
         (c.only_statistics    ? " statistics "
          : c.saves_statistics ? " saving "
                               : " ") +
         (r.wants_recompute ? "recomputing " : "") +
         (c.members > 0 ? "of " + std::to_string(c.members) + " tensors " : "") + r.line;
}

}  // namespace onepass::cuda
