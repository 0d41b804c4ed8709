// The vocabulary: every word's descriptor, gathered from the words themselves.
#pragma once

#include <string_view>
#include <vector>

#include "onepass/word/descriptor.h"

namespace onepass::spec {

// Properties of words, by the names under which the vocabulary tells them.
struct named_property {
  const char* name;
  bool descriptor::*of;
};
inline constexpr named_property kProperties[] = {
    {"maps_zero_to_zero", &descriptor::maps_zero_to_zero},
    {"is_linear", &descriptor::is_linear},
    {"scales", &descriptor::scales},
    {"adds", &descriptor::adds},
    {"is_causal", &descriptor::is_causal},
    {"normalises", &descriptor::normalises},
    {"centres", &descriptor::centres},
    {"is_softmax", &descriptor::is_softmax},
    {"backward_from_result", &descriptor::backward_from_result},
    {"gives_number", &descriptor::gives_number},
    {"gives_codes", &descriptor::gives_codes},
    {"by_groups", &descriptor::by_groups},
    {"by_channels", &descriptor::by_channels},
};

// Ours, and behind them those that users have defined (defined.h).
std::vector<const descriptor*> words();        // in the order of the documentation
std::vector<const descriptor*> activations();  // those that gate(...) takes

std::vector<const descriptor*> channel_words();  // those that take the option "channels", as they are with it

const descriptor* find(const std::vector<const descriptor*>& among, std::string_view name);  // null: no such word
std::string_view nearest(const std::vector<const descriptor*>& among, std::string_view name);

}  // namespace onepass::spec
