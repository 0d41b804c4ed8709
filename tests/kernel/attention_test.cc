// Lines with `scores`, with `values` or without, forward and backward, against the same in double.
#include <algorithm>
#include <map>

#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/backward.h"
#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/plan/contraction.h"
#include "src/plan/plan.h"
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

using doubles = std::vector<double>;

struct attention_case {
  const char* line;  // without `values`; `mask`, or `times` behind softmax, takes a tensor of the scores' size
  int64 rows, keys, head_dim, value_head_dim;
  dtype type;
  bool padded = false;   // `mask` is a key-padding mask: booleans that all rows of a matrix share
  bool between = false;  // rows of the results' matrices lie between each other, as those of heads do
  bool multiplies() const { return std::string_view(line).ends_with("times"); }
};
constexpr int64 kBatches = 2;
constexpr double kFactor = 0.125;

struct gradients {
  doubles queries, keys, values, mask;
};

// In double. A row that is all masked has probabilities of 0.
class exact_attention {
 public:
  exact_attention(const attention_case& of, const std::vector<float>& q, const std::vector<float>& k,
                  const std::vector<float>& tensor, bool causal)
      : of_(of), q_(q), k_(k) {
    const std::vector<float> mask = of.multiplies() ? std::vector<float>() : tensor;
    if (of.multiplies()) factors_ = tensor;
    weights.resize(static_cast<std::size_t>(kBatches * of.rows * of.keys));
    for (int64 r = 0; r < kBatches * of.rows; ++r) {
      double most = -INFINITY, sum = 0;
      for (int64 c = 0; c < of.keys; ++c) {
        double score = 0;
        for (int64 d = 0; d < of.head_dim; ++d)
          score += double{q_[at(r * of.head_dim + d)]} * k_[at(key(r, c) * of.head_dim + d)];
        score *= kFactor;
        if (!mask.empty()) score += mask[at(r * of.keys + c)];
        if (causal && c > r % of.rows) score = -INFINITY;
        weights[at(r * of.keys + c)] = score;
        most = std::max(most, score);
      }
      for (int64 c = 0; c < of.keys; ++c) {
        double& w = weights[at(r * of.keys + c)];
        sum += w = most == -INFINITY ? 0.0 : std::exp(w - most);
      }
      for (int64 c = 0; c < of.keys && sum > 0; ++c) weights[at(r * of.keys + c)] /= sum;
    }
    probabilities = weights;
    for (std::size_t i = 0; i < factors_.size(); ++i) weights[i] *= factors_[i];
  }
  doubles result(const std::vector<float>& values) const {
    doubles y(at(kBatches * of_.rows * of_.value_head_dim));
    for (int64 r = 0; r < kBatches * of_.rows; ++r)
      for (int64 c = 0; c < of_.keys; ++c)
        for (int64 d = 0; d < of_.value_head_dim; ++d)
          y[at(r * of_.value_head_dim + d)] +=
              weights[at(r * of_.keys + c)] * values[at(key(r, c) * of_.value_head_dim + d)];
    return y;
  }
  gradients backward(const std::vector<float>& values, const std::vector<float>& dy) const {
    gradients g{doubles(q_.size()), doubles(k_.size()), doubles(values.size()), doubles(weights.size())};
    for (int64 r = 0; r < kBatches * of_.rows; ++r) {
      doubles dw(at(of_.keys));
      double product = 0;
      for (int64 c = 0; c < of_.keys; ++c) {
        const double w = weights[at(r * of_.keys + c)];
        for (int64 d = 0; d < of_.value_head_dim; ++d) {
          const double up = dy[at(r * of_.value_head_dim + d)];
          dw[at(c)] += up * values[at(key(r, c) * of_.value_head_dim + d)];
          g.values[at(key(r, c) * of_.value_head_dim + d)] += w * up;
        }
        product += w * dw[at(c)];
      }
      for (int64 c = 0; c < of_.keys; ++c) {
        const std::size_t i = at(r * of_.keys + c);
        const double factor = factors_.empty() ? 1.0 : factors_[i], p = probabilities[i];
        const double score = p * (factor * dw[at(c)] - product);
        g.mask[i] = factors_.empty() ? score : p * dw[at(c)];
        for (int64 d = 0; d < of_.head_dim; ++d) {
          g.queries[at(r * of_.head_dim + d)] += kFactor * score * k_[at(key(r, c) * of_.head_dim + d)];
          g.keys[at(key(r, c) * of_.head_dim + d)] += kFactor * score * q_[at(r * of_.head_dim + d)];
        }
      }
    }
    return g;
  }
  doubles weights, probabilities;

 private:
  static std::size_t at(int64 i) { return static_cast<std::size_t>(i); }
  int64 key(int64 row, int64 column) const { return row / of_.rows * of_.keys + column; }
  const attention_case of_;
  const std::vector<float>&q_, &k_;
  std::vector<float> factors_;
};

// A call's tensors on the device.
class attention_on_device {
 public:
  explicit attention_on_device(const attention_case& of)
      : of_(of),
        parts_(spec::parse(std::string("scores | ") + of.line)),
        q_(drawn(count(of.rows, of.head_dim), of.type, 1)),
        k_(drawn(count(of.keys, of.head_dim), of.type, 2)),
        v_(drawn(count(of.keys, of.value_head_dim), of.type, 3)),
        dy_(drawn(count(of.rows, of.value_head_dim), of.type, 4)),
        request_(parts_.behind, false) {
    const bool masked = parts_.behind.operands > 0;
    if (masked) mask_ = drawn(count(of.rows, of.keys), of.type, 5);
    for (std::size_t i = 0; masked && !of.multiplies() && i < mask_.size();
         ++i) {  // one row is all masked, others in part
      if (i / static_cast<std::size_t>(of.keys) == 1 || i % 7 == 0) mask_[i] = -INFINITY;
    }
    request_.line = spec::type_text(parts_.behind, of.padded ? 1 : 0, false);
    request_.x = of.type, request_.operand[0] = of.padded ? dtype::boolean : masked ? of.type : dtype::none;
    a_.rows = kBatches * of.rows, a_.columns = of.keys, a_.matrix_rows = of.rows;
    const int64 sizes[kMaxDims] = {1, 1, kBatches, of.rows};
    for (int d = 0; d < kMaxDims; ++d) set_size(a_, d, sizes[d]);
    a_.inverse_columns = 1.0 / static_cast<double>(of.keys);
    spec::fill_parameters(parts_.behind, of.type, a_);
    a_.x = a_.y = view{nullptr, {0, 0, of.rows * of.keys, of.keys}, of.type, 1};
    if (of.padded) {
      a_.operand[0] = view{put_padding(), {0, 0, of.keys, 0}, dtype::boolean, 1};
    } else if (masked) {
      a_.operand[0] = a_.y, a_.operand[0].data = put("mask", mask_);
    }
    put("q", q_), put("k", keys_there()), put("v", v_), put("dy", dy_);
    a_.dropout_state = static_cast<const int64*>(state_.data());
  }

  std::vector<doubles> made;

  bool causal() const { return spec::is_causal(parts_.behind); }
  exact_attention exact() const { return {of_, q_, k_, mask_, causal()}; }

  // `launch` computes probabilities.
  template <class Launch>
  void expect_probabilities(const Launch& launch) {
    const device_tensor y(count(of_.rows, of_.keys), of_.type);
    a_.y.data = y.data();
    launch(*this);
    EXPECT_LT(distance(y.host(), exact().weights), bound());
  }
  void expect_attention() {
    device_tensor y(count(of_.rows, of_.value_head_dim), of_.type);
    device_tensor statistics(static_cast<std::size_t>(2 * kBatches * of_.rows), dtype::f32);
    a_.statistics = statistics.data();
    attention_call call = described();
    call.values = rows_of("v", of_.keys, of_.value_head_dim), call.y = written(y, of_.rows, of_.value_head_dim);
    launch_forward_sm90(call, 0, nullptr);
    expect_near(read(y, of_.rows, of_.value_head_dim), exact().result(v_), bound(), "the result");
    const device_tensor softmax(
        static_cast<std::size_t>(kBatches * ceil_div(of_.rows, kWarpgroupRows) * kWarpgroupRows * 4), dtype::f32);
    expect_gradients([&](const device_tensor& dq, const device_tensor& dk, const device_tensor& dv) {
      const backward_sm90_call backward{.forward = call,
                                        .grad_output = rows_of("dy", of_.rows, of_.value_head_dim),
                                        .output = written(y, of_.rows, of_.value_head_dim),
                                        .statistics = static_cast<softmax_statistics*>(softmax.data()),
                                        .grad_queries = written(dq, of_.rows, of_.head_dim),
                                        .grad_keys = written(dk, of_.keys, of_.head_dim),
                                        .grad_values = written(dv, of_.keys, of_.value_head_dim)};
      ASSERT_TRUE(fits(backward));
      launch_backward_sm90(backward, 0, nullptr);
    });
  }
  // Calls launch(dq, dk, dv); the request has the mask's gradient.
  template <class Launch>
  void expect_gradients(const Launch& launch) {
    const bool wants_mask = !mask_.empty() && !of_.padded;
    const device_tensor dq(q_.size(), of_.type), dk(k_.size(), of_.type), dv(v_.size(), of_.type),
        dmask(std::max<std::size_t>(mask_.size(), 1), of_.type);
    if (wants_mask) {
      request_.wants_tensor = 1;
      a_.operand_gradient[0] = a_.operand[0], a_.operand_gradient[0].data = dmask.data();
    }
    launch(dq, dk, dv);
    const gradients g = exact().backward(v_, dy_);
    expect_near(read(dq, of_.rows, of_.head_dim), g.queries, 2 * bound(), "queries");
    expect_near(read(dk, of_.keys, of_.head_dim), g.keys, 2 * bound(), "keys");
    expect_near(read(dv, of_.keys, of_.value_head_dim), g.values, 2 * bound(), "values");
    if (wants_mask) {
      EXPECT_LT(distance(dmask.host(), g.mask), 2 * bound()) << "mask";
    }
  }

  attention_call described() const {
    attention_call call{.behind = request_, .a_behind = a_, .causal = causal()};
    for (int i = 0; i < parts_.behind.operands; ++i) call.prefetched.push_back(i);
    call.leading_masks = spec::leading_masks(parts_.behind);
    call.queries = rows_of("q", of_.rows, of_.head_dim), call.keys = rows_of("k", of_.keys, of_.head_dim);
    return call;
  }
  void launch_forward_sm80(int device) {
    request before(parts_.before, false);
    before.line = spec::type_text(parts_.before, 0, false), before.x = of_.type;
    arguments a{};
    set_rows(a, kBatches * of_.rows);
    a.columns = of_.head_dim;
    a.x = a.y = view{there_.at("q")->data(), {0, 0, 0, of_.head_dim}, of_.type, 1};
    const probabilities_sm80_call call{{.before = before,
                                        .a_before = a,
                                        .behind = request_,
                                        .a_behind = a_,
                                        .matrix = there_.at("k")->data(),
                                        .matrix_stride = of_.head_dim,
                                        .k = of_.head_dim},
                                       1,
                                       kBatches,
                                       0,
                                       of_.keys * of_.head_dim};
    ASSERT_TRUE(fits(call));
    if (of_.value_head_dim == 0) {
      launch_probabilities_sm80(call, device, nullptr);
      return;
    }
    const device_tensor y(count(of_.rows, of_.value_head_dim), of_.type),
        statistics(static_cast<std::size_t>(2 * kBatches * of_.rows), dtype::f32);
    a_.statistics = statistics.data();
    const attention_sm80_call with{call,
                                   there_.at("v")->data(),
                                   of_.value_head_dim,
                                   0,
                                   of_.keys * of_.value_head_dim,
                                   of_.value_head_dim,
                                   written(y, of_.rows, of_.value_head_dim),
                                   causal()};
    ASSERT_EQ(why_not_attention_sm80(parts_, of_.head_dim, of_.value_head_dim, of_.type, facts(device)), "");
    ASSERT_TRUE(fits(with));
    launch_attention_sm80(with, device, nullptr);
    expect_near(read(y, of_.rows, of_.value_head_dim), exact().result(v_), bound(), "the result");
    expect_statistics(statistics.host());
    if (why_not_backward_sm80(parts_, of_.head_dim, of_.value_head_dim, of_.type, facts(device)).empty())
      expect_gradients_sm80(device, y);
  }
  void expect_gradients_sm80(int device, const device_tensor& y) {
    const device_tensor softmax(static_cast<std::size_t>(kBatches * of_.rows * 4), dtype::f32);
    expect_gradients([&](const device_tensor& dq, const device_tensor& dk, const device_tensor& dv) {
      const backward_sm80_call call{.behind = request_,
                                    .a_behind = a_,
                                    .causal = causal(),
                                    .queries = there_.at("q")->data(),
                                    .grad_output = there_.at("dy")->data(),
                                    .output = written(y, of_.rows, of_.value_head_dim),
                                    .keys = rows_of("k", of_.keys, of_.head_dim),
                                    .values = rows_of("v", of_.keys, of_.value_head_dim),
                                    .rows_of_batch = of_.rows,
                                    .statistics = static_cast<softmax_statistics*>(softmax.data()),
                                    .grad_queries = written(dq, of_.rows, of_.head_dim),
                                    .grad_keys = written(dk, of_.keys, of_.head_dim),
                                    .grad_values = written(dv, of_.keys, of_.value_head_dim)};
      ASSERT_TRUE(fits(call));
      launch_backward_sm80(call, device, nullptr);
    });
  }

 private:
  // The largest score, and 1 / Σ exp(score - largest), of each row.
  void expect_statistics(const doubles& found) const {
    const doubles weights = exact().probabilities;
    const std::size_t rows = static_cast<std::size_t>(kBatches * of_.rows), keys = static_cast<std::size_t>(of_.keys);
    for (std::size_t r = 0; r < rows; ++r) {
      const double most = *std::max_element(weights.begin() + static_cast<std::ptrdiff_t>(r * keys),
                                            weights.begin() + static_cast<std::ptrdiff_t>((r + 1) * keys));
      ASSERT_NEAR(found[rows + r], most, 0.02 * most) << "the largest weight is exp(0) / sum";
    }
  }
  // A line with dropout has no expected result: it is compared with another kernel's.
  void expect_near(const doubles& found, const doubles& right, double most, const char* what) {
    made.push_back(found);
    if (parts_.behind.dropouts == 0) {
      EXPECT_LT(distance(found, right), most) << what;
    }
  }
  double bound() const { return of_.type == dtype::f16 ? 2e-3 : 1e-2; }
  static std::size_t count(int64 rows, int64 columns) { return static_cast<std::size_t>(kBatches * rows * columns); }
  void* put(const char* name, const std::vector<float>& elements) {
    if (elements.empty()) return nullptr;
    there_[name] = std::make_unique<device_tensor>(elements, of_.type);
    return there_[name]->data();
  }
  // The second matrix has no key left, if it has few.
  bool is_kept(std::size_t key) const {
    const auto keys = static_cast<std::size_t>(of_.keys), in_matrix = key % keys;
    return in_matrix % 11 != 3 && in_matrix + 17 < keys && (key < keys || keys > 256);
  }
  // Masked keys are NaN, except where a GEMM with zeros follows.
  std::vector<float> keys_there() const {
    std::vector<float> keys = k_;
    for (std::size_t i = 0; of_.padded && of_.value_head_dim == 0 && i < keys.size(); ++i)
      if (!is_kept(i / static_cast<std::size_t>(of_.head_dim))) keys[i] = NAN;
    return keys;
  }
  void* put_padding() {
    const auto keys = static_cast<std::size_t>(of_.keys), rows = static_cast<std::size_t>(of_.rows);
    std::vector<float> kept(kBatches * keys);
    for (std::size_t i = 0; i < kept.size(); ++i) kept[i] = is_kept(i);
    for (std::size_t i = 0; i < mask_.size(); ++i)
      mask_[i] = kept[i / (rows * keys) * keys + i % keys] != 0.0f ? 0.0f : -INFINITY;
    there_["mask"] = std::make_unique<device_tensor>(kept, dtype::boolean);
    return there_["mask"]->data();
  }
  strided_matrices written(const device_tensor& t, int64 rows, int64 numbers) const {
    if (of_.between) return {t.data(), 0, numbers, 0, kBatches * numbers};
    return {t.data(), 0, rows * numbers, 0, numbers};
  }
  // The numbers of such a tensor, matrix by matrix.
  doubles read(const device_tensor& t, int64 rows, int64 numbers) const {
    const doubles there = t.host();
    if (!of_.between) return there;
    doubles apart(there.size());
    for (int64 i = 0; i < kBatches * rows * numbers; ++i) {
      const int64 batch = i / numbers % kBatches, row = i / numbers / kBatches;
      apart[static_cast<std::size_t>((batch * rows + row) * numbers + i % numbers)] =
          there[static_cast<std::size_t>(i)];
    }
    return apart;
  }
  batched_rows rows_of(const char* name, int64 rows, int64 numbers) const {
    return {there_.at(name)->data(), 1, kBatches, 1, rows, numbers, 0, rows * numbers, 0, numbers};
  }

  const attention_case of_;
  const spec::contraction parts_;
  const std::vector<float> q_, k_, v_, dy_;
  std::vector<float> mask_;
  request request_;
  arguments a_{};
  static constexpr int64 kState[2] = {1234, 8};
  const device_tensor state_{kState};
  std::map<std::string, std::unique_ptr<device_tensor>> there_;
};

using EmulatedAttention = Emulated;

TEST_F(EmulatedAttention, AttentionSm90) {
  attention_on_device({"mul(0.125) | softmax", 100, 200, 64, 64, dtype::bf16}).expect_attention();
  attention_on_device({"mul(0.125) | mask | softmax", 70, 136, 40, 72, dtype::f16}).expect_attention();
  attention_on_device({"mul(0.125) | causal | softmax", 200, 200, 128, 128, dtype::bf16}).expect_attention();
  attention_on_device({"mul(0.125) | mask | softmax", 70, 264, 64, 64, dtype::bf16, true}).expect_attention();
}
TEST_F(EmulatedAttention, RowsOfResultsLieBetweenEachOther) {
  const attention_case of{.line = "mul(0.125) | causal | softmax",
                          .rows = 72,
                          .keys = 136,
                          .head_dim = 64,
                          .value_head_dim = 40,
                          .type = dtype::f16,
                          .between = true};
  attention_on_device(of).expect_attention();
  attention_on_device(of).launch_forward_sm80(0);
  attention_on_device(of).launch_forward_sm80(1);
}
TEST_F(EmulatedAttention, ATensorBehindSoftmax) {
  const attention_case of{"mul(0.125) | softmax | times", 70, 136, 64, 64, dtype::bf16};
  attention_on_device(of).expect_attention();
  attention_on_device(of).launch_forward_sm80(1);
}
TEST_F(EmulatedAttention, DropoutIsTheSameOnSm90AndSm80) {
  const attention_case of{"mul(0.125) | causal | softmax | dropout(0.3)", 72, 136, 64, 64, dtype::f16};
  attention_on_device tiles(of), warps(of);
  tiles.expect_attention(), warps.launch_forward_sm80(1);
  ASSERT_EQ(tiles.made.size(), 4u);
  ASSERT_EQ(warps.made.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_LT(distance(tiles.made[i], warps.made[i]), 4e-3) << i;
}
TEST_F(EmulatedAttention, LargeHeadDim) {
  attention_on_device({"mul(0.125) | mask | softmax", 136, 72, 256, 256, dtype::bf16}).expect_attention();
}
TEST_F(EmulatedAttention, TwoPassProbabilities) {
  for (const attention_case& of : {attention_case{"mul(0.125) | softmax", 130, 264, 64, 0, dtype::bf16},
                                   attention_case{"mul(0.125) | mask | softmax", 60, 136, 128, 0, dtype::f16},
                                   attention_case{"mul(0.125) | causal | softmax", 136, 136, 32, 0, dtype::bf16}})
    attention_on_device(of).expect_probabilities(
        [](attention_on_device& on) { launch_forward_sm90(on.described(), 0, nullptr); });
}
TEST_F(EmulatedAttention, RegisterResidentProbabilities) {
  for (const attention_case& of :
       {attention_case{"mul(0.125) | softmax", 130, 512, 64, 0, dtype::bf16},
        attention_case{"mul(0.125) | mask | softmax", 70, 1000, 64, 0, dtype::f16},
        attention_case{"mul(0.125) | mask | softmax", 130, 512, 64, 0, dtype::bf16, true},
        attention_case{"mul(0.125) | mask | softmax", 70, 250, 128, 0, dtype::f16, true},
        attention_case{"mul(0.25) | mul(0.5) | mask | softmax", 70, 520, 64, 0, dtype::bf16, true}})
    attention_on_device(of).expect_probabilities(
        [](attention_on_device& on) { ASSERT_TRUE(launch_probabilities_sm90(on.described(), 0, nullptr)); });
}
TEST_F(EmulatedAttention, AttentionSm80) {
  for (const int device : {0, 1, 2})
    for (const attention_case& of : {attention_case{"mul(0.125) | softmax", 130, 100, 64, 64, dtype::bf16},
                                     attention_case{"mul(0.125) | mask | softmax", 60, 77, 200, 40, dtype::f16},
                                     attention_case{"mul(0.125) | causal | softmax", 200, 200, 40, 72, dtype::bf16},
                                     attention_case{"mul(0.125) | mask | softmax", 70, 131, 128, 128, dtype::bf16},
                                     attention_case{"mul(0.125) | mask | softmax", 40, 261, 64, 64, dtype::f16, true},
                                     attention_case{"mul(0.125) | mask | softmax", 70, 77, 64, 64, dtype::bf16, true},
                                     attention_case{"mul(0.125) | mask | softmax", 33, 131, 256, 256, dtype::bf16}})
      attention_on_device(of).launch_forward_sm80(device);
}
TEST_F(EmulatedAttention, ProbabilitiesSm80) {
  for (const int device : {0, 1})
    for (const attention_case& of : {attention_case{"mul(0.125) | softmax", 130, 100, 64, 0, dtype::bf16},
                                     attention_case{"mul(0.125) | mask | softmax", 60, 77, 200, 0, dtype::f16},
                                     attention_case{"mul(0.125) | causal | softmax", 136, 136, 40, 0, dtype::bf16}})
      attention_on_device(of).expect_probabilities(
          [device](attention_on_device& on) { on.launch_forward_sm80(device); });
}

}  // namespace
}  // namespace onepass::cuda
