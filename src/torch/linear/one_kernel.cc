// A line with `linear` in one kernel on CUDA (src/cuda/linear).
#include "src/torch/linear/one_kernel.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstdint>

#include "src/cuda/linear/small_n.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/linear/small_k.h"
#include "src/cuda/linear/small_m.h"
#include "src/torch/linear/small_n.h"
#include "src/torch/call/frame.h"
#include "src/torch/matrix_product.h"
#include "src/torch/call/run.h"

namespace onepass::binding {
namespace {

// The matrix with a deferred norm folded in (onepass/kernel/linear/folded_norm.cuda.h).
struct folded_matrix {
  Tensor matrix, sums;  // [N, K]; and [2, padded N]: the sums of its rows, and their products with the norm's bias
};
// before: the frame of the norm's line, with its operands.
folded_matrix fold_norm(const spec::contraction::affine_norm& norm, const frame& before, const Tensor& w,
                        void* stream) {
  const std::int64_t size[2] = {w.size(0), w.size(1)}, padded[2] = {2, cuda::padded_columns(w.size(0))};
  folded_matrix into{empty(size, 2, dtype_of(w), before.on), empty(padded, 2, dtype::f32, before.on)};
  auto* sums = static_cast<float*>(into.sums.data_ptr());
  const auto operand = [&](int i) { return i < 0 ? view{} : before.a.operand[i]; };
  const view scale = operand(norm.scale), bias = operand(norm.bias);
  cuda::launch(cuda::fold_call{.matrix = w.data_ptr(),
                               .scale = scale.data,
                               .bias = bias.data,
                               .folded = into.matrix.data_ptr(),
                               .sums = sums,
                               .offsets = sums + padded[1],
                               .k = w.size(1),
                               .stride = w.stride(0),
                               .type = dtype_of(w),
                               .scale_type = scale.type,
                               .bias_type = bias.type,
                               .centres = norm.centres,
                               .columns = w.size(0)},
               before.on.index, stream);
  return into;
}

bool begins_at_16_bytes(const frame& f) {
  return std::all_of(f.a.operand, f.a.operand + f.line.line.operands,
                     [](const view& v) { return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0; });
}

// One call: the frames of prologue and epilogue.
class one_kernel_call {
 public:
  one_kernel_call(const forward_call& call, const Tensor& w, spec::strategy how)
      : call_(call),
        w_(w),
        c_(*call.line.contraction),
        on_(device_of(call.x)),
        type_(dtype_of(w)),
        how_(how),
        by_warps_(how == spec::strategy::small_m || how == spec::strategy::small_k),
        defers_(how == spec::strategy::deferred),
        needs_statistics_(defers_ && cuda::needs_statistics(w.size(0))),
        saves_product_(call.save_statistics && call.line.reads.product),
        saves_statistics_(call.save_statistics && c_.before.reads.statistics),
        input_(is_small_n() ? call.x : as_matrix(call.x, w.size(1))),
        result_(make_result()) {
    if (by_warps_ || is_small_n() || defers_) enter_before();
    enter_behind();
  }

  // Empty where addresses or strides do not suit the kernel.
  std::optional<std::vector<Tensor>> run() {
    return is_small_n() ? run_small_n() : by_warps_ ? run_by_warps() : run_tiled();
  }

 private:
  bool is_small_n() const { return how_ == spec::strategy::small_n; }
  std::optional<std::vector<Tensor>> run_small_n() {
    const cuda::request before = request_of(*before_, false), behind = request_of(*behind_, false);
    const cuda::small_n_call of{before, before_->a, behind, behind_->a};
    const cuda::device_facts& chip = cuda::facts(on_.index);
    if (!cuda::why_not_small_n(before, before_->a, chip).empty()) return {};
    const torch::stable::accelerator::DeviceGuard guard(on_.index);
    cuda::launch(of, cuda::plan_small_n(of, chip), on_.index, current_stream(on_.index));
    return results();
  }
  std::optional<std::vector<Tensor>> run_by_warps() {
    const cuda::request before = request_of(*before_, false), behind = request_of(*behind_, false);
    const cuda::warp_linear_call of{.before = before,
                                    .a_before = before_->a,
                                    .behind = behind,
                                    .a_behind = behind_->a,
                                    .matrix = w_.data_ptr(),
                                    .matrix_stride = w_.stride(0),
                                    .k = w_.size(1)};
    if (w_.stride(1) != 1 || !cuda::fits(of)) return {};
    const torch::stable::accelerator::DeviceGuard guard(on_.index);
    const auto launch = how_ == spec::strategy::small_m ? cuda::launch_small_m : cuda::launch_small_k;
    launch(of, on_.index, current_stream(on_.index));
    return results();
  }
  std::optional<std::vector<Tensor>> run_tiled() {
    const cuda::request before = before_ ? request_of(*before_, false) : cuda::request();
    const cuda::request behind = request_of(*behind_, false);
    const arguments none{};
    cuda::linear_call of{.before = before,
                         .a_before = before_ ? before_->a : none,
                         .behind = behind,
                         .a_behind = behind_->a,
                         .defers = defers_,
                         .input = input_.data_ptr(),
                         .input_stride = input_.stride(0),
                         .matrix = w_.data_ptr(),
                         .matrix_stride = w_.stride(0),
                         .k = w_.size(1),
                         .sums = nullptr,
                         .offsets = nullptr};
    if (w_.stride(1) != 1 || input_.stride(1) != 1 || !cuda::fits(of) || (defers_ && !begins_at_16_bytes(*before_)))
      return {};
    const torch::stable::accelerator::DeviceGuard guard(on_.index);
    void* stream = current_stream(on_.index);
    std::optional<folded_matrix> folded;
    if (defers_) {
      if (needs_statistics_) run_statistics(*before_);
      folded = fold_norm(c_.parts.norm, *before_, w_, stream);
      of.matrix = folded->matrix.data_ptr(), of.matrix_stride = of.k;
      of.sums = static_cast<const float*>(folded->sums.data_ptr());
      of.offsets = of.sums + folded->sums.size(1);
    }
    cuda::launch(of, on_.index, stream);
    return results();
  }

  Tensor make_result() const {
    const spec::shape shape = shape_of(call_.x);
    std::vector<std::int64_t> sizes(shape.sizes, shape.sizes + shape.dim);
    sizes.back() = w_.size(0);
    return empty(sizes.data(), shape.dim, type_, on_);
  }
  void enter_before() {
    frame& f = before_.emplace(is_small_n() ? line_with_features(call_, w_) : c_.before, call_.x, "x");
    if (is_small_n()) operands_ = operands_with_features(call_, w_);
    f.enter(call_.x, is_small_n() ? operands_ : call_.operands, 0, call_.dropout_state);
    keep(f, kept_);
    if (saves_statistics_ || needs_statistics_) statistics_ = f.fresh_statistics();
    f.lay_out(true);
  }
  void enter_behind() {
    frame& f = behind_.emplace(saves_product_ ? c_.behind_keeping : c_.behind, result_, "x");
    f.enter(result_, call_.operands, c_.parts.weight + 1, call_.dropout_state);
    f.input(result_, f.a.y);
    keep(f, kept_behind_);
    f.lay_out(true);
  }
  static void keep(frame& f, std::vector<Tensor>& kept) {
    kept.reserve(static_cast<std::size_t>(f.line.line.keeps));
    for (int k = 0; k < f.line.line.keeps; ++k) kept.push_back(f.output(f.a.kept[k], f.type));
  }
  std::vector<Tensor> results() const {
    std::vector<Tensor> all{result_};
    all.insert(all.end(), kept_.begin(), kept_.end());
    all.insert(all.end(), kept_behind_.begin() + saves_product_, kept_behind_.end());
    if (saves_product_) all.push_back(kept_behind_.front());
    if (saves_statistics_) all.push_back(*statistics_);
    return all;
  }

  const forward_call& call_;
  const Tensor& w_;
  const prepared_contraction& c_;
  const device on_;
  const dtype type_;
  const spec::strategy how_;
  const bool by_warps_, defers_;
  const bool needs_statistics_, saves_product_, saves_statistics_;
  const Tensor input_;
  Tensor result_;
  std::optional<frame> before_, behind_;
  std::vector<Tensor> operands_, kept_, kept_behind_;
  std::optional<Tensor> statistics_;
};

}  // namespace

std::optional<std::vector<Tensor>> forward_in_one_kernel(const forward_call& call, const choice::way& way) {
  const Tensor& w = call.operands[static_cast<std::size_t>(call.line.contraction->parts.weight)];
  return one_kernel_call(call, w, way.how).run();
}

}  // namespace onepass::binding
