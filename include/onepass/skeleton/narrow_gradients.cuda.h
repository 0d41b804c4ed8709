// The parameters' gradients of a norm and a `linear` of few features, of what narrow_linear.cuda.h gives: with its
// products less the means, G, and the gradient's column sums s, of the matrix G ∘ scale + s bias, of scale Σ W ∘ G,
// of bias Wᵀ s; of a bias behind the product s.
//
// Config: kMatrix, kScale, kBias, kResultBias (dtype::none: there is none).
#pragma once

#include "onepass/skeleton/narrow_linear.cuda.h"

ONEPASS_BEGIN

struct narrow_gradients_arguments {
  const float* products;              // [64, stride], then s, then Σ r mean
  const void *matrix, *scale, *bias;  // [features, depth], its rows `matrix_stride` apart; [depth], or null
  void *matrix_gradient, *scale_gradient, *bias_gradient, *result_bias_gradient;  // or null
  int64 depth, features, stride, matrix_stride;
};

// Blocks of 256 threads have 32 columns each.
template <class Config>
ONEPASS_FUNCTION void narrow_gradients(const narrow_gradients_arguments& a) {
  using number = typename stored<Config::kMatrix>::type;
  const int across = static_cast<int>(threadIdx.x) % 32, down = static_cast<int>(threadIdx.x) / 32;
  const int64 column = static_cast<int64>(blockIdx.x) * 32 + across;
  const float *sums = a.products + kFeatures * a.stride, *means = sums + kFeatures;
  if constexpr (Config::kResultBias != dtype::none) {
    const auto feature = static_cast<int64>(threadIdx.x);
    if (blockIdx.x == 0 && feature < a.features)
      store_as<1>(Config::kResultBias, a.result_bias_gradient, feature, pack<float, 1>(sums[feature]), 1);
  }
  __shared__ float shared[2][8][32];
  float of_scale = 0, of_bias = 0;
  if (column < a.depth) {
    float scale = 1, bias = 0;
    if constexpr (Config::kScale != dtype::none) scale = load_as<1>(Config::kScale, a.scale, column).v[0];
    if constexpr (Config::kBias != dtype::none) bias = load_as<1>(Config::kBias, a.bias, column).v[0];
    for (int64 feature = down; feature < a.features; feature += 8) {
      const float g = a.products[feature * a.stride + column] - means[feature], s = sums[feature];
      const float w = from_storage<Config::kMatrix, float>(
          static_cast<const number*>(a.matrix)[feature * a.matrix_stride + column]);
      if (a.matrix_gradient != nullptr)
        static_cast<number*>(a.matrix_gradient)[feature * a.depth + column] =
            to_storage<Config::kMatrix>(fmaf(g, scale, s * bias));
      of_scale = fmaf(w, g, of_scale);
      of_bias = fmaf(w, s, of_bias);
    }
  }
  shared[0][down][across] = of_scale, shared[1][down][across] = of_bias;
  __syncthreads();
  if (down >= 2 || column >= a.depth) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += shared[down][i][across];
  if constexpr (Config::kScale != dtype::none) {
    if (down == 0 && a.scale_gradient != nullptr)
      store_as<1>(Config::kScale, a.scale_gradient, column, pack<float, 1>(total), 1);
  }
  if constexpr (Config::kBias != dtype::none) {
    if (down == 1 && a.bias_gradient != nullptr)
      store_as<1>(Config::kBias, a.bias_gradient, column, pack<float, 1>(total), 1);
  }
}

ONEPASS_END
