// Backward of a norm and a `linear` of few features in one pass (onepass/kernel/linear/norm_backward_sm90.cuda.h): its
// launches.
#include "src/cuda/linear/norm_backward.h"

#include <algorithm>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/row/launch.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

constexpr int kRows = 64, kColumns = 256, kThreads = 512, kStages = 4,
              kBehind = 1;  // as in kernel/linear/norm_backward_sm90.cuda.h
constexpr int kTileBytes = 64 * 128, kTiles = kColumns / 64, kGradientThreads = 256, kGradientColumns = 32;
constexpr unsigned kSharedBytes = 1024 + kTiles * kTileBytes + kStages * (kTiles + 1) * kTileBytes;

std::string kernel_of(const std::string& config, int threads, const char* arguments, const char* function) {
  return "#include \"onepass/kernel/linear/norm_backward_sm90.cuda.h\"\nONEPASS_BEGIN\nstruct config {\n" + config +
         "};\n" + kernel_text(function, "config", bounds(threads, 1), arguments) + "ONEPASS_END\n";
}

}  // namespace

narrow_plan plan_narrow(int64 rows, int64 depth, const device_facts& chip) {
  narrow_plan p{};
  p.tiles = ceil_div(rows, kRows);
  p.slices = static_cast<int>(ceil_div(depth, kColumns));
  p.teams = static_cast<int>(std::min<int64>(chip.sm_count / p.slices, p.tiles));
  p.stride = int64{p.slices} * kColumns;
  return p;
}

std::string source(const narrow_call& of) {
  const std::string config = type_field("kX", of.type) +
                             "  static constexpr bool kCentres = " + (of.centres ? "true" : "false") +
                             ";\n  static constexpr int kStages = " + std::to_string(kStages) +
                             ", kBehind = " + std::to_string(kBehind) + ";\n";
  return kernel_of(config, kThreads, "narrow_arguments", "narrow_linear_backward");
}

void launch(const narrow_call& of, const narrow_plan& plan, int device, void* stream) {
  static known_kernels known;
  const kernel& built = known.find_or_build(kernel_key(device, of.type, of.centres), [&]() -> const kernel& {
    return load(source(of), device, stream, facts(device).arch_name + " norm and linear, backward");
  });
  const bool is_bf16 = of.type == dtype::bf16;
  const auto map = [&](const void* data, int64 rows, int64 stride) {
    return describe_matrix(built, {data, is_bf16, rows, of.depth, stride, kRows, 64});
  };
  struct alignas(64) {  // narrow_arguments
    tensor_map x, dx, matrix;
    const void* gradient;
    int64 rows, depth, features, stride;
    double inverse_columns;
    const float* statistics;
    float* shares;
    unsigned* ready;
    float* products;
    int slices, teams;
  } const arguments{.x = map(of.x, of.rows, of.x_stride),
                    .dx = map(of.dx, of.rows, of.depth),
                    .matrix = map(of.folded, of.features, of.depth),
                    .gradient = of.gradient,
                    .rows = of.rows,
                    .depth = of.depth,
                    .features = of.features,
                    .stride = of.gradient_stride,
                    .inverse_columns = 1.0 / static_cast<double>(of.depth),
                    .statistics = of.statistics,
                    .shares = of.shares,
                    .ready = of.ready,
                    .products = of.products,
                    .slices = plan.slices,
                    .teams = plan.teams};
  launch(built, {static_cast<unsigned>(plan.slices * plan.teams), 1}, {kThreads, 1}, kSharedBytes, false, stream,
         &arguments);
}

std::string source(const narrow_gradients_call& of) {
  return kernel_of(type_field("kMatrix", of.type) + type_field("kScale", of.scale_type) +
                       type_field("kBias", of.bias_type) + type_field("kResultBias", of.result_bias_type),
                   kGradientThreads, "narrow_gradients_arguments", "narrow_gradients");
}

void launch(const narrow_gradients_call& of, const narrow_plan& plan, int device, void* stream) {
  arguments sums{};
  sums.columns = plan.part();
  sums.column_partial = of.parts, sums.parts = plan.teams;
  const view total{of.products, {}, dtype::f32, 1};
  reduce_columns(sums_of(sums, dtype::f32, plan.teams, 1, &total), dtype::f32, device, stream);
  struct {  // narrow_gradients_arguments
    const float* products;
    const void *matrix, *scale, *bias;
    void *matrix_gradient, *scale_gradient, *bias_gradient, *result_bias_gradient;
    int64 depth, features, stride, matrix_stride;
  } const arguments{.products = of.products,
                    .matrix = of.matrix,
                    .scale = of.scale,
                    .bias = of.bias,
                    .matrix_gradient = of.matrix_gradient,
                    .scale_gradient = of.scale_gradient,
                    .bias_gradient = of.bias_gradient,
                    .result_bias_gradient = of.result_bias_gradient,
                    .depth = of.depth,
                    .features = of.features,
                    .stride = plan.stride,
                    .matrix_stride = of.matrix_stride};
  static known_kernels known;
  const kernel_key key(device, of.type, of.scale_type, of.bias_type, of.result_bias_type);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(of), device, stream, facts(device).arch_name + " norm and linear, parameters");
  });
  launch(built, {static_cast<unsigned>(ceil_div(of.depth, kGradientColumns)), 1}, {kGradientThreads, 1}, 0, false,
         stream, &arguments);
}

}  // namespace onepass::cuda
