// What a CUDA skeleton reads of its Config, and whether a source defines it.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

namespace onepass::cuda {

using headers = std::set<std::string>;
inline const headers kTiled = {"linear.cuda.h",          "linear_tiles.cuda.h",  "input_rows.cuda.h",
                               "rows_ahead.cuda.h",      "deferred_norm.cuda.h", "narrow_linear.cuda.h",
                               "narrow_gradients.cuda.h"};
inline const headers kStreamed = {"streamed_linear.cuda.h", "input_rows.cuda.h"};
inline const headers kResident = {"resident_linear.cuda.h", "input_rows.cuda.h", "shared_matrix.cuda.h"};
inline const headers kAttention = {"attention.cuda.h", "score_tiles.cuda.h"};
inline const headers kHeldScores = {"held_scores.cuda.h", "score_tiles.cuda.h"};
inline const headers kAttentionGradients = {"attention_gradients.cuda.h", "passing_tiles.cuda.h",
                                            "score_columns.cuda.h", "score_tiles.cuda.h"};
inline const headers kScoreGradients = {"score_gradients.cuda.h", "score_strips.cuda.h"};
inline const headers kScores = {"scores.cuda.h", "input_rows.cuda.h", "shared_matrix.cuda.h"};
inline const headers kWarpAttention = {"warp_attention.cuda.h", "warp_rows.cuda.h", "scores.cuda.h",
                                       "input_rows.cuda.h", "shared_matrix.cuda.h"};
inline const headers kWarpGradients = {"warp_attention_gradients.cuda.h", "warp_rows.cuda.h"};
// Of lines without `linear`.
inline headers plain_headers() {
  headers names;
  for (const auto& file : std::filesystem::directory_iterator(ONEPASS_SOURCE_DIR "/include/onepass/skeleton")) {
    const std::string name = file.path().filename();
    const bool contracts = kTiled.contains(name) || kStreamed.contains(name) || kResident.contains(name) ||
                           kWarpAttention.contains(name) || kWarpGradients.contains(name) ||
                           kAttention.contains(name) || kHeldScores.contains(name) ||
                           kAttentionGradients.contains(name) || kScoreGradients.contains(name);
    if (name.ends_with(".cuda.h") && !contracts) names.insert(name);
  }
  return names;
}

// Members of Config in skeletons.
inline std::set<std::string> config_names(const headers& skeletons) {
  std::set<std::string> read;
  const std::regex use("Config::(k\\w+)");
  for (const std::string& name : skeletons) {
    std::ifstream in(ONEPASS_SOURCE_DIR "/include/onepass/skeleton/" + name);
    EXPECT_TRUE(in.good()) << name;
    const std::string text(std::istreambuf_iterator<char>(in), {});
    for (std::sregex_iterator found(text.begin(), text.end(), use), end; found != end; ++found)
      read.insert((*found)[1]);
  }
  return read;
}

inline void expect_defined(const std::set<std::string>& names, const std::string& source) {
  EXPECT_GT(names.size(), 5u);
  for (const std::string& name : names)
    EXPECT_TRUE(std::regex_search(source, std::regex("\\b" + name + "\\b"))) << name;
}

}  // namespace onepass::cuda
