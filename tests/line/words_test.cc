// The vocabulary's properties: what planners and the Python front know words by.
#include "src/line/words.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "src/line/defined.h"

namespace onepass::spec {
namespace {

std::set<std::string> words_that(bool descriptor::*property) {
  std::set<std::string> names;
  for (const descriptor* word : words())
    if (word->*property && word->kind != word_kind::activation) names.insert(word->name);
  return names;
}

using names = std::set<std::string>;

TEST(words, have_the_properties_of_their_mathematics) {
  EXPECT_EQ(words_that(&descriptor::scales), (names{"scale", "mul", "times"}));
  EXPECT_EQ(words_that(&descriptor::adds), (names{"bias", "add"}));
  EXPECT_EQ(words_that(&descriptor::is_linear),
            (names{"scale", "mul", "times", "div", "gated", "dropout", "rope", "keep"}));
  EXPECT_EQ(words_that(&descriptor::maps_zero_to_zero),
            (names{"scale", "mul", "times", "dropout", "keep", "round", "gate"}));
  EXPECT_EQ(words_that(&descriptor::is_causal), names{"causal"});
  EXPECT_EQ(words_that(&descriptor::normalises), (names{"layer_norm", "rms_norm"}));
  EXPECT_EQ(words_that(&descriptor::centres), names{"layer_norm"});
  EXPECT_EQ(words_that(&descriptor::is_softmax), names{"softmax"});
  EXPECT_EQ(words_that(&descriptor::backward_from_result), (names{"softmax", "log_softmax"}));
  for (const descriptor* word : words()) {
    EXPECT_EQ(is_mask(*word), word->name == std::string("mask"));
    EXPECT_EQ(is_bias(*word), word->name == std::string("bias"));
  }
}

TEST(words, all_properties_are_told) {
  for (const named_property& each : kProperties) {
    descriptor one{.name = "one", .kind = word_kind::affine};
    one.*each.of = true;
    int count = 0;
    for (const named_property& other : kProperties) count += one.*other.of;
    EXPECT_EQ(count, 1) << each.name;
  }
}

TEST(words, of_users_keep_zeros_if_they_say_so) {
  for (const bool keeps : {false, true}) {
    const descriptor* about = define({.name = "own", .maps_zero_to_zero = keeps, .source = ""});
    EXPECT_EQ(about->maps_zero_to_zero, keeps);
    undefine("own");
  }
}

}  // namespace
}  // namespace onepass::spec
