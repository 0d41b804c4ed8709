// Several tensors' calls of a line in one launch: which of them share one, and who has how many of its blocks.
#pragma once

#include <string>
#include <vector>

#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

// One tensor's call. flat: it is one long row, whose length is its own.
struct member {
  arguments* a;
  bool flat;
};

// Tensors that share a launch, by number. One alone has the kernels of its call, which may be a long row's three.
struct batch {
  std::vector<int> members;
  std::vector<plan> plans;
};
// Each member is in one batch, and gets its blocks there. Column sums have as many parts of a member as it has blocks.
// Tensors that are aligned, broadcast or strided unlike each other are in different ones: a kernel is compiled for
// that.
std::vector<batch> batches(const request&, const std::vector<member>&, int device, void* stream);
void launch(const request&, const batch&, const std::vector<member>&, int device, void* stream);

// What makes of any calls such batches. Numbers of equal keys, at most so many at a time:
std::vector<std::vector<int>> alike(const std::vector<std::string>& keys, int64 most);
// Members for which a kernel is compiled to have room: few numbers, so that there are few kernels.
int64 room_for_members(std::size_t count, int64 most);
// An entry of a launch that has no tensor.
arguments no_member();
// A tensor of one row has no row stride: it gets the longest tensor's, so that both share a kernel.
void lay_out_single_rows(const std::vector<arguments*>&);
// The configuration's bytes, but for what a batch decides.
std::string key_of(configuration);
// How many of about so many blocks each gets, so that none has many more of the steps than another; `most` in all.
std::vector<unsigned> share(const std::vector<int64>& steps, int64 blocks, int64 most);

}  // namespace onepass::cuda
