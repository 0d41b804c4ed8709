// Backward of probabilities in one kernel, run in the emulator.
#include "src/cuda/attention/probabilities_backward.h"

#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

struct gradients {
  std::vector<double> queries, keys;
};

// In double, from probabilities w, their gradients g, queries and keys.
gradients expected(const probabilities_sizes& of, float factor, const std::vector<float>& q,
                   const std::vector<float>& k, const std::vector<float>& w, const std::vector<float>& g) {
  const auto rows = static_cast<std::size_t>(of.query_heads * of.rows), keys = static_cast<std::size_t>(of.keys),
             head_dim = static_cast<std::size_t>(of.head_dim), batches = static_cast<std::size_t>(of.batches);
  gradients to{std::vector<double>(q.size()), std::vector<double>(k.size())};
  for (std::size_t b = 0; b < batches; ++b) {
    for (std::size_t r = b * rows; r < (b + 1) * rows; ++r) {
      double product = 0;
      for (std::size_t c = 0; c < keys; ++c) product += double{w[r * keys + c]} * g[r * keys + c];
      for (std::size_t c = 0; c < keys; ++c) {
        const double score = w[r * keys + c] * (g[r * keys + c] - product) * factor;
        for (std::size_t d = 0; d < head_dim; ++d) {
          to.queries[r * head_dim + d] += score * k[(b * keys + c) * head_dim + d];
          to.keys[(b * keys + c) * head_dim + d] += score * q[r * head_dim + d];
        }
      }
    }
  }
  return to;
}

void expect_right(const probabilities_sizes& of, dtype type) {
  const auto rows = static_cast<std::size_t>(of.batches * of.query_heads * of.rows),
             keys = static_cast<std::size_t>(of.keys), head_dim = static_cast<std::size_t>(of.head_dim),
             batches = static_cast<std::size_t>(of.batches);
  const std::vector<float> q = drawn(rows * head_dim, type, 1), k = drawn(batches * keys * head_dim, type, 2),
                           g = drawn(rows * keys, type, 3);
  std::vector<float> w = drawn(rows * keys, type, 4);
  for (float& x : w) x = from_bits(to_bits(std::exp(x) / static_cast<float>(keys), type), type);
  const device_tensor q_there(q, type), k_there(k, type), w_there(w, type), g_there(g, type), to_q(q.size(), type),
      to_k(k.size(), type);
  std::vector<std::unique_ptr<device_tensor>> parts;
  const auto rows_of = [&](const device_tensor& t, int64 group, int64 matrix_rows, int64 columns) {
    const int64 matrix = matrix_rows * columns;
    return batched_rows{t.data(), 1, of.batches, group, matrix_rows, columns, 0, group * matrix, matrix, columns};
  };
  const probabilities_backward_call call{.type = type,
                                         .factor = 0.125f,
                                         .queries = rows_of(q_there, of.query_heads, of.rows, of.head_dim),
                                         .keys = rows_of(k_there, 1, of.keys, of.head_dim),
                                         .probabilities = rows_of(w_there, of.query_heads, of.rows, of.keys),
                                         .grad_probabilities = rows_of(g_there, of.query_heads, of.rows, of.keys),
                                         .grad_queries = to_q.data(),
                                         .grad_keys = to_k.data()};
  ASSERT_TRUE(launch_probabilities_backward(
      call,
      [&](int64 count) {
        parts.push_back(std::make_unique<device_tensor>(static_cast<std::size_t>(count), dtype::f32));
        return parts.back()->data();
      },
      0, nullptr));
  const gradients right = expected(of, 0.125f, q, k, w, g);
  const double bound = type == dtype::f16 ? 1e-3 : 6e-3;
  EXPECT_LT(distance(to_q.host(), right.queries), bound) << "queries";
  EXPECT_LT(distance(to_k.host(), right.keys), bound) << "keys";
}

using EmulatedProbabilitiesBackward = Emulated;

TEST_F(EmulatedProbabilitiesBackward, OfOneBatch) { expect_right({1, 1, 512, 64, 512}, dtype::bf16); }
TEST_F(EmulatedProbabilitiesBackward, OfOddSizes) { expect_right({3, 1, 100, 40, 504}, dtype::bf16); }
TEST_F(EmulatedProbabilitiesBackward, OfQueriesThatShareKeys) { expect_right({2, 3, 72, 64, 512}, dtype::f16); }
TEST_F(EmulatedProbabilitiesBackward, OfFewKeys) {
  expect_right({5, 1, 130, 64, 256}, dtype::bf16);
  expect_right({3, 1, 200, 40, 168}, dtype::f16);
  expect_right({7, 1, 128, 64, 128}, dtype::bf16);
  expect_right({3, 2, 70, 128, 104}, dtype::bf16);
  expect_right({3, 1, 70, 64, 8}, dtype::f16);
}
TEST_F(EmulatedProbabilitiesBackward, OfManyRowTiles) {
  expect_right({2, 1, 1600, 64, 128}, dtype::bf16);
  expect_right({30, 1, 64, 128, 64}, dtype::f16);
}
TEST_F(EmulatedProbabilitiesBackward, OfTwoAtoms) {
  expect_right({2, 1, 200, 128, 256}, dtype::bf16);
  expect_right({2, 2, 130, 104, 200}, dtype::f16);
}
TEST_F(EmulatedProbabilitiesBackward, OfLargeClusters) {
  expect_right({2, 1, 192, 64, 2048}, dtype::bf16);
  expect_right({1, 1, 128, 128, 2048}, dtype::bf16);
}

}  // namespace
}  // namespace onepass::cuda
