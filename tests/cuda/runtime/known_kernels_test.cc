// Kernels by keys: one for each key, built once.
#include "src/cuda/runtime/known_kernels.h"

#include <gtest/gtest.h>

#include "onepass/lane/types.h"

namespace onepass::cuda {
namespace {

TEST(KnownKernels, AreBuiltOnce) {
  known_kernels known;
  kernel first{}, second{};
  int builds = 0;
  const auto find = [&](const kernel_key& key, const kernel& fresh) -> const kernel& {
    return known.find_or_build(key, [&]() -> const kernel& {
      ++builds;
      return fresh;
    });
  };
  EXPECT_EQ(&find(kernel_key(0, dtype::bf16), first), &first);
  EXPECT_EQ(&find(kernel_key(0, dtype::bf16), second), &first);
  EXPECT_EQ(&find(kernel_key(1, dtype::bf16), second), &second);
  EXPECT_EQ(builds, 2);
}

TEST(KnownKernels, KeysTellValuesAndTextsApart) {
  const std::string a = "a", ab = "ab", b = "b", bc = "bc";
  const dtype few[2] = {dtype::f32, dtype::bf16}, others[2] = {dtype::bf16, dtype::f32};
  EXPECT_EQ(kernel_key(a, 1, few).bytes(), kernel_key(a, 1, few).bytes());
  EXPECT_NE(kernel_key(a, 1, few).bytes(), kernel_key(a, 1, others).bytes());
  EXPECT_NE(kernel_key(a, bc).bytes(), kernel_key(ab, std::string("c")).bytes());
  EXPECT_NE(kernel_key(a, true).bytes(), kernel_key(b, true).bytes());
}

}  // namespace
}  // namespace onepass::cuda
