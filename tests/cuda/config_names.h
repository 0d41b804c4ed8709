// The members of its Config that a CUDA kernel reads, and whether a source defines them.
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
inline const headers kGemm = {"linear/gemm_sm90.cuda.h", "linear/gemm_tiles.cuda.h", "linear/folded_norm.cuda.h"};
inline const headers kSmallM = {"linear/small_m.cuda.h", "linear/prologue.cuda.h"};
inline const headers kSmallK = {"linear/small_k.cuda.h", "linear/prologue.cuda.h", "common/warp_mma.cuda.h"};
inline const headers kAttention = {"attention/forward_sm90.cuda.h", "attention/tiles_sm90.cuda.h"};
inline const headers kProbabilities = {"attention/probabilities_sm90.cuda.h", "attention/tiles_sm90.cuda.h"};
inline const headers kAttentionBackward = {"attention/backward_sm90.cuda.h", "attention/tiles_sm90.cuda.h"};
inline const headers kProbabilitiesBackward = {"attention/probabilities_backward_sm90.cuda.h"};
inline const headers kWarpAttention = {"attention/forward_sm80.cuda.h", "linear/prologue.cuda.h",
                                       "common/warp_mma.cuda.h"};
// Those of lines without `linear`.
inline headers plain_headers() {
  headers names;
  for (const std::string folder : {"row", "common"})
    for (const auto& file :
         std::filesystem::directory_iterator(ONEPASS_SOURCE_DIR "/include/onepass/kernel/" + folder)) {
      const std::string name = folder + "/" + file.path().filename().string();
      if (name.ends_with(".cuda.h") && name != "common/warp_mma.cuda.h") names.insert(name);
    }
  names.insert("linear/small_n.cuda.h");
  return names;
}

// The members of Config that these headers read.
inline std::set<std::string> config_names(const headers& of) {
  std::set<std::string> read;
  const std::regex use("Config::(k\\w+)");
  for (const std::string& name : of) {
    std::ifstream in(ONEPASS_SOURCE_DIR "/include/onepass/kernel/" + name);
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
