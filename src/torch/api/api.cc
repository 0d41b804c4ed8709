// What Python asks of the library without tensors, through ctypes: text in, JSON out.
#include "src/torch/api/api.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>

#include "src/cache/disk_cache.h"
#include "src/choose/choose.h"
#include "src/compiler.h"
#include "src/cpu/row/common_lines.h"
#include "src/cpu/row/run.h"
#include "src/cpu/simd.h"
#include "src/cuda/attention/tuning.h"
#include "src/cuda/prebuild.h"
#include "src/cuda/row/tuned.h"
#include "src/process.h"
#include "src/settings.h"
#include "src/line/defined.h"
#include "src/plan/frame.h"
#include "src/plan/plan.h"
#include "src/line/words.h"
#include "src/torch/autograd/autograd.h"
#include "src/torch/api/json.h"
#include "src/torch/call/prepared.h"

namespace onepass::binding {
namespace {

const char* answer(const std::function<void(json&)>& write) {
  thread_local std::string text;
  auto failed = [](const char* kind, const char* what) {
    json error;
    error.begin('{').field("error", kind).field("message", what).end('}');
    return error.text();
  };
  try {
    json out;
    write(out);
    text = out.text();
  } catch (const spec::line_error& e) {
    text = failed("line", e.what());
  } catch (const cannot_compile& e) {
    text = failed("cannot_compile", e.what());
  } catch (const interrupted& e) {
    text = failed("interrupted", e.what());
  } catch (const std::exception& e) {
    text = failed("runtime", e.what());
  }
  return text.c_str();
}

const char* kind_name(word_kind kind) {
  switch (kind) {
    case word_kind::activation: return "activation";
    case word_kind::affine: return "affine";
    case word_kind::gate: return "gate";
    case word_kind::dropout: return "dropout";
    case word_kind::mask: return "mask";
    case word_kind::keep: return "keep";
    case word_kind::rounding: return "rounding";
    case word_kind::row: return "row";
    case word_kind::rotary: return "rotary";
    case word_kind::contraction: return "contraction";
    case word_kind::feature: return "feature";
  }
  return "";
}

const char* operand_name(operand_kind kind) {
  switch (kind) {
    case operand_kind::column: return "column";
    case operand_kind::tensor: return "tensor";
    case operand_kind::target: return "target";
    case operand_kind::matrix: return "matrix";
    case operand_kind::keys: return "keys";
    case operand_kind::values: return "values";
    default: return "none";
  }
}

void describe_word(json& out, const descriptor& about) {
  out.field("name", about.name).field("kind", kind_name(about.kind)).field("operand", operand_name(about.operand));
  out.field("operand_name", about.operand_name).field("operands", about.operands);
  out.field("parameter_name", about.parameter).field("dtypes", about.dtypes).field("option", about.option);
  out.field("formula", about.formula).field("meaning", about.meaning);
  out.key("flops").begin('[').value(about.flops_forward).value(about.flops_backward).end(']');
  out.key("properties").begin('[');
  for (const spec::named_property& property : spec::kProperties)
    if (about.*property.of) out.value(property.name);
  out.end(']');
}

// Numbers of Python's, which have any value.
struct size_given {
  const char* name;
  std::int64_t value, least = 0;
};

void check_sizes(std::initializer_list<size_given> all) {
  constexpr double kMostElements = 0x1p58;  // and as many operations
  double product = 1;
  for (const size_given& size : all) {
    if (size.value < size.least) {
      throw std::invalid_argument(std::string("onepass: ") + size.name + " must be at least " +
                                  std::to_string(size.least) + ", got " + std::to_string(size.value));
    }
    product *= std::max<double>(static_cast<double>(size.value), 1);
    if (product > kMostElements)
      throw std::invalid_argument(std::string("onepass: ") + size.name + " is too large, got " +
                                  std::to_string(size.value));
  }
}

dtype checked_dtype(int number) {
  const auto type = static_cast<dtype>(number);
  if (!is_floating(type) || std::string_view(name_of(type)) == "none")
    throw std::invalid_argument("onepass: expected a floating-point dtype, got number " + std::to_string(number));
  return type;
}

// What a call of these sizes is taken for where nothing more is known of it: dense, and values as long as the keys.
choice::call call_of(const prepared_line& line, const choice::sizes& of) {
  const prepared_line& own = line.attention ? line.attention->scores : line;
  choice::call c{.of = own.contraction->parts, .sizes = of, .named = line.line.how};
  c.sizes.saves_product = of.saves_product && line.reads.product;
  if (!line.attention) return c;
  c.values = true, c.value_depth = of.depth, c.gives_more = line.line.keeps > 0;
  return c;
}

// chip: "cpu", a CUDA device that is here ("cuda:0"), or a chip that need not be ("sm_90a").
choice::decision choose_on(const std::string& chip, const choice::call& c) {
  if (chip == "cpu") return choose(c, nullptr);
  const cuda::device_facts facts = cuda::facts_named(chip);
  return choose(c, &facts);
}

void describe_way(json& out, const choice::way& way, bool is_chosen) {
  out.begin('{').field("strategy", spec::name_of(way.how));
  out.field("bytes", static_cast<std::int64_t>(way.bytes)).field("why_not", way.why_not).field("kernel", way.kernel);
  out.field("chosen", is_chosen).key("seconds");
  if (std::isfinite(way.seconds)) out.value(way.seconds);
  else out.null();
  out.end('}');
}

std::optional<cuda::way> checked_way(std::string_view text) {
  if (text.empty()) return {};
  const std::optional<cuda::way> way = cuda::way_of(text);
  if (!way) throw std::invalid_argument("onepass: no way of a kernel is called '" + std::string(text) + "'");
  return way;
}

cuda::heard_call heard_by(const std::string& key) {
  for (cuda::heard_call& call : cuda::heard())
    if (call.key == key) return std::move(call);
  throw std::invalid_argument("onepass: no call was heard whose key is '" + key + "'");
}

void describe_heard(json& out) {
  out.begin('[');
  for (const cuda::heard_call& call : cuda::heard()) {
    out.begin('{').field("key", call.key).field("line", call.r.words).field("backward", call.r.backward);
    out.field("rows", std::int64_t{call.a.rows}).field("columns", std::int64_t{call.a.columns});
    out.field("dtype", torch_name_of(call.r.x)).end('}');
  }
  out.end(']');
}

void describe_launched(json& out) {
  out.begin('[');
  for (const cuda::launched_kernel& kernel : cuda::launched_kernels()) {
    out.begin('{').field("name", kernel.name).field("backward", kernel.backward).field("registers", kernel.registers);
    out.field("spilled", kernel.spilled).field("threads", kernel.threads).field("flops", kernel.flops).end('}');
  }
  out.end(']');
}

}  // namespace
}  // namespace onepass::binding

using onepass::binding::answer;
using onepass::binding::json;

const char* onepass_words() {
  return answer([](json& out) {
    out.begin('[');
    for (const onepass::descriptor* about : onepass::spec::words()) {
      out.begin('{');
      onepass::binding::describe_word(out, *about);
      out.key("defaults");
      out.begin('[');
      const bool has_some = about->parameter[0] != '\0' && about->with_number[0] == '\0' && !about->parameter_required;
      for (const double number : has_some ? onepass::spec::defaults_of(*about) : std::vector<double>())
        out.value(number);
      out.end(']');
      out.end('}');
    }
    out.end(']');
  });
}

const char* onepass_dtypes() {
  return answer([](json& out) {
    out.begin('[');
#define ONEPASS_NAME(name, torch_name, scalar_type, storage) out.value(#torch_name);
    ONEPASS_DTYPES(ONEPASS_NAME)
#undef ONEPASS_NAME
    out.end(']');
  });
}

const char* onepass_define_word(const char* name, const char* kind, const char* operand, const char* operand_name,
                                const char* parameters, int sums, int flops_forward, int flops_backward,
                                bool maps_zero_to_zero, bool needs_elements, double of_nothing, const char* formula,
                                const char* meaning, const char* source) {
  return answer([&](json& out) {
    using onepass::operand_kind;
    using onepass::spec::defined_kind;
    const std::string_view looks_at = kind, takes = operand;
    onepass::spec::defined_word word{.name = name,
                                     .kind = looks_at == "row"      ? defined_kind::row
                                             : looks_at == "ending" ? defined_kind::ending
                                                                    : defined_kind::elementwise,
                                     .operand = takes == "column"   ? operand_kind::column
                                                : takes == "tensor" ? operand_kind::tensor
                                                                    : operand_kind::none,
                                     .operand_name = operand_name,
                                     .flops_forward = flops_forward,
                                     .flops_backward = flops_backward,
                                     .maps_zero_to_zero = maps_zero_to_zero,
                                     .sums = sums,
                                     .of_nothing = of_nothing,
                                     .needs_elements = needs_elements,
                                     .formula = formula,
                                     .meaning = meaning,
                                     .source = source};
    std::istringstream names(parameters);
    for (std::string one; std::getline(names, one, ',');) word.parameters.push_back(one);
    out.begin('{').field("type", onepass::spec::define(std::move(word))->defined).end('}');
  });
}

const char* onepass_undefine_word(const char* name) {
  return answer([name](json& out) {
    const onepass::descriptor* about = onepass::spec::undefine(name);
    if (about != nullptr) onepass::binding::forget_lines_with(about);
    out.begin('{').field("was_defined", about != nullptr).end('}');
  });
}

const char* onepass_describe(const char* text) {
  return answer([text](json& out) {
    const auto held = onepass::binding::prepared(text);
    const onepass::binding::prepared_line& prepared = *held;
    const onepass::spec::line& line = prepared.line;
    const onepass::line_signature& signature = prepared.signature;
    out.begin('{').field("text", line.text).field("old_strategy", line.old_strategy);
    out.field("rowwise", line.rowwise()).field("keeps", line.keeps).field("dropouts", line.dropouts);
    out.field("statistics", line.statistics(onepass::dtype::f32))
        .field("statistics_of_16_bits", line.statistics(onepass::dtype::bf16))
        .field("reads_x", signature.reads_x);
    out.key("numbers").begin('[');  // of each result, whether it is one number a row
    for (int i = 0; i < line.results(); ++i) out.value(line.result(i).is_number());
    out.end(']').field("group", line.group()).key("scales").begin('[');  // of these, whether it is codes' scale
    for (int i = 0; i < line.results(); ++i) out.value(line.result(i).shape == onepass::spec::result_shape::scale);
    out.end(']').key("differentiable").begin('[');
    for (int i = 0; i < line.results(); ++i) out.value(line.result(i).is_differentiable());
    out.end(']').key("own_dtypes").begin('[');  // null: x's
    for (int i = 0; i < line.results(); ++i) {
      if (line.result(i).own == onepass::dtype::none) out.null();
      else out.value(onepass::torch_name_of(line.result(i).own));
    }
    out.end(']');
    out.field("reads_statistics", signature.reads_statistics).field("reads_product", signature.reads_product);
    out.key("weight");  // which operand the contraction takes
    if (signature.weight < 0) out.null();
    else out.value(signature.weight);
    out.field("scores", signature.scores)
        .field("values", signature.values)
        .field("keeps_before", signature.keeps_before)
        .field("x_for_weight", signature.x_for_weight);
    out.key("operands_for_weight").begin('[');
    for (int i = 0; i < line.operands; ++i) out.value((signature.operands_for_weight >> i & 1) != 0);
    out.end(']');
    out.key("resumes_behind");
    if (signature.resumes_behind < 0) out.null();
    else out.value(signature.resumes_behind);
    out.field("without_dropout", onepass::spec::without_dropout(line));
    out.key("resumes_from");  // which of the results: 0, or 1 + the keep's number
    if (signature.resumes_from < 0) out.null();
    else out.value(signature.resumes_from);
    out.key("reads_operands").begin('[');
    for (bool read : prepared.reads.operands) out.value(read);
    out.end(']').key("words").begin('[');
    for (const onepass::spec::word& w : line.words) {
      out.begin('{');
      onepass::binding::describe_word(out, *w.about);
      out.key("parameters");
      out.begin('[');
      for (const double number : w.parameters) out.value(number);
      out.end(']');
      out.key("activation");
      if (w.activation == nullptr) out.null();
      else out.value(w.activation->name);
      out.key("dtype");
      if (w.stored == onepass::dtype::none) out.null();
      else out.value(onepass::spec::name_in_lines(w.stored));
      out.field("group", w.group).key("strategy");
      if (w.about->kind != onepass::word_kind::contraction) out.null();
      else out.value(onepass::spec::name_of(line.how));
      out.end('}');
    }
    out.end(']').end('}');
  });
}

const char* onepass_cost(const char* text, std::int64_t rows, std::int64_t columns, std::int64_t columns_behind,
                         std::int64_t matrices, int dtype) {
  return answer([=](json& out) {
    onepass::binding::check_sizes(
        {{"rows", rows}, {"columns", columns}, {"columns behind", columns_behind}, {"matrices", matrices}});
    const auto prepared = onepass::binding::prepared(text);
    const onepass::spec::line& line = prepared->line;
    const auto cost =
        onepass::spec::estimate(line, rows, columns, columns_behind, onepass::binding::checked_dtype(dtype), matrices);
    out.begin('{')
        .key("forward")
        .begin('{')
        .field("bytes", cost.forward.bytes)
        .field("flops", cost.forward.flops)
        .end('}');
    out.key("backward").begin('{').field("bytes", cost.backward.bytes).field("flops", cost.backward.flops).end('}');
    out.field("saved_bytes", cost.saved_bytes).end('}');
  });
}

const char* onepass_check_shape(const char* text, const std::int64_t* sizes, int dim) {
  return answer([=](json& out) {
    const auto prepared = onepass::binding::prepared(text);
    const std::string why_not = onepass::spec::why_not_shape(prepared->line, {dim, sizes}, "x");
    if (!why_not.empty()) throw std::runtime_error("onepass: " + why_not);
    out.begin('{').end('}');
  });
}

const char* onepass_strategies(const char* text, std::int64_t rows, std::int64_t columns, std::int64_t columns_behind,
                               std::int64_t matrices, int dtype, bool saves, const char* chip) {
  return answer([=](json& out) {
    onepass::binding::check_sizes(
        {{"rows", rows}, {"columns", columns}, {"columns behind", columns_behind}, {"matrices", matrices}});
    const auto prepared = onepass::binding::prepared(text);
    const onepass::choice::sizes of{.rows = rows,
                                    .depth = columns,
                                    .columns = columns_behind,
                                    .type = onepass::binding::checked_dtype(dtype),
                                    .saves_product = saves,
                                    .matrices = matrices};
    const auto found = onepass::binding::choose_on(chip, onepass::binding::call_of(*prepared, of));
    std::vector<onepass::spec::strategy> told;
    out.begin('[');
    for (const onepass::choice::way& way : found.ways) {
      if (std::find(told.begin(), told.end(), way.how) != told.end()) continue;
      told.push_back(way.how);
      onepass::binding::describe_way(out, found.of(way.how), way.how == found.chosen().how);
    }
    out.end(']');
  });
}

const char* onepass_launches(const char* text, std::int64_t rows, std::int64_t columns, int dtype, bool saves,
                             const char* chip) {
  return answer([=](json& out) {
    onepass::binding::check_sizes({{"rows", rows}, {"columns", columns}});
    const auto prepared = onepass::binding::prepared(text);
    const onepass::cuda::device_facts facts = onepass::cuda::facts_named(chip);
    out.begin('[');
    for (const auto& of : onepass::cuda::forward_launches(prepared->line, facts, onepass::binding::checked_dtype(dtype),
                                                          rows, columns, saves)) {
      out.begin('{').field("kernel", of.kernel).field("cluster", of.cluster).field("threads", of.threads);
      out.field("rows", of.rows).field("blocks", of.blocks).end('}');
    }
    out.end(']');
  });
}

const char* onepass_beside_engines() {
  return answer([](json& out) {
    out.begin('{').key("cuda").begin('[');
    for (const onepass::cuda::beside_engines& of : onepass::cuda::kBesideEngines) {
      out.begin('{').field("boolean_mask", of.boolean_mask).field("trains", of.trains).field("dropout", of.dropout);
      out.field("odd_keys", of.odd_keys).field("head_dim", of.head_dim).field("least_head_dim", of.least_head_dim);
      out.field("least_queries", of.least_queries).end('}');
    }
    const onepass::choice::beside_cpu_engine& cpu = onepass::choice::kBesideCpuEngine;
    out.end(']').key("cpu").begin('{').field("weights", cpu.weights).field("weights_of_bf16", cpu.weights_of_bf16);
    out.field("queries", cpu.queries).end('}').end('}');
  });
}

const char* onepass_gradients(const char* text, int dtype, const std::int64_t* operand_types, std::uint64_t wanted) {
  return answer([=](json& out) {
    const auto prepared = onepass::binding::prepared(text);
    const onepass::spec::line& line = prepared->line;
    const auto facts = onepass::spec::operand_facts_of(operand_types, static_cast<std::size_t>(line.operands));
    const auto plan = onepass::spec::plan_gradients(line, static_cast<onepass::dtype>(dtype), facts, wanted);
    out.begin('{').key("inputs").begin('[');  // null: unwanted; -1: the upstream gradient; else the output's index
    for (const int source : plan.inputs) {
      if (source == onepass::kUnwanted) out.null();
      else out.value(source);
    }
    out.end(']').key("outputs").begin('[');
    for (const auto& output : plan.outputs) {
      out.begin('{')
          .field("input", output.input)
          .field("dtype", static_cast<int>(output.type))
          .field("column", output.column)
          .field("has", output.has)
          .field("unit", output.unit)
          .end('}');
    }
    out.end(']').end('}');
  });
}

const char* onepass_common_lines() {
  return answer([](json& out) {
    out.begin('[');
    for (const std::string& line : onepass::cpu::common_lines()) out.value(line);
    out.end(']');
  });
}

const char* onepass_cpu_prepare(const char* text, std::uint64_t boolean_masks, int dtype, bool may_compile) {
  return answer([=](json& out) {
    const auto prepared = onepass::binding::prepared(text);
    const auto x = static_cast<onepass::dtype>(dtype);
    if (may_compile) prepared->prepare_on_cpu(boolean_masks, x);
    out.begin('{').field("ready", may_compile || prepared->is_ready_on_cpu(boolean_masks, x)).end('}');
  });
}

void onepass_interrupt() { onepass::interrupt_programs(); }

const char* onepass_cuda_prebuild(const char* text, const char* arch, int dtype, int operand_dtype,
                                  std::int64_t columns) {
  return answer([=](json& out) {
    const auto prepared = onepass::binding::prepared(text);
    const onepass::spec::line& line = prepared->line;
    const auto labels = onepass::cuda::prebuild(line, arch, onepass::binding::checked_dtype(dtype),
                                                onepass::binding::checked_dtype(operand_dtype), columns);
    out.begin('{').key("built").begin('[');
    for (const std::string& label : labels) out.value(label);
    out.end(']').end('}');
  });
}

const char* onepass_open_autograd(const char* torch_root, const char* torch_version, const char* python_include,
                                  bool may_compile) {
  return answer([=](json& out) {
    void* handle = onepass::binding::open_autograd({torch_root, torch_version, python_include}, may_compile);
    out.begin('{').field("handle", static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(handle))).end('}');
  });
}

const char* onepass_info() {
  return answer([](json& out) {
    out.begin('{').field("simd_target", onepass::cpu::simd_target());
    out.field("cache_directory", onepass::cache::directory().string());
    out.field("prebuilt_directory", onepass::cache::prebuilt_directory().string());
    out.field("compiler", onepass::compiler_program()).end('}');
  });
}

void onepass_configure(const char* include_dir, const char* library_dir, const char* (*find_nvrtc)(),
                       void (*warn)(const char*)) {
  onepass::settings_now() = {include_dir, library_dir, find_nvrtc, warn};
}

const char* onepass_tuning(const char* action, const char* key, const char* way, const char* label) {
  return answer([=](json& out) {
    namespace cuda = onepass::cuda;
    using onepass::binding::heard_by;
    const std::string_view does = action;
    const std::optional<cuda::way> given = onepass::binding::checked_way(way);
    if (does == "heard") return onepass::binding::describe_heard(out);
    if (does == "launched") return onepass::binding::describe_launched(out);
    if (does == "ways") {
      out.begin('[');
      for (const cuda::way& other : cuda::other_ways(heard_by(key), given)) out.value(cuda::text_of(other));
      out.end(']');
      return;
    }
    bool done = true;
    if (does == "build") cuda::build_way(heard_by(key), given.value());
    else if (does == "use") cuda::use_way(key, given);
    else if (does == "keep") done = cuda::keep_way(key, given, label);
    else cuda::listen(does == "listen");
    out.begin('{').field("done", done).end('}');
  });
}

const char* onepass_cache(const char* action) {
  return answer([action](json& out) {
    if (std::string_view(action) == "clear") {
      out.begin('{').field("removed", static_cast<std::int64_t>(onepass::cache::clear())).end('}');
      return;
    }
    out.begin('[');
    for (const onepass::cache::entry& e : onepass::cache::list()) {
      out.begin('{').field("label", e.label).field("kind", e.kind).field("bytes", static_cast<std::int64_t>(e.bytes));
      out.field("age", e.age_seconds).end('}');
    }
    out.end(']');
  });
}
