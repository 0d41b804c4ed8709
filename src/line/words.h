// The vocabulary: every word's descriptor, gathered from the words themselves.
#pragma once

#include <string_view>
#include <vector>

#include "onepass/word/descriptor.h"

namespace onepass::spec {

// Ours, and behind them those that users have defined (defined.h).
std::vector<const descriptor*> words();        // in the order of the documentation
std::vector<const descriptor*> activations();  // those that gate(...) takes

const descriptor* find(const std::vector<const descriptor*>& among, std::string_view name);  // null: no such word
std::string_view nearest(const std::vector<const descriptor*>& among, std::string_view name);

}  // namespace onepass::spec
