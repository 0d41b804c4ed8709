// Ways that `onepass tune` measured: kept in the disk cache, and used in the place of the table's from then on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/cuda/row/configuration.h"

namespace onepass::cuda {

// None where nothing was tuned for such a call.
std::vector<plan> choose_tuned(const request&, const arguments&, const device_facts&, const configuration& described);

// What a way is kept by: chip, direction, dtype, line, how rows lie, whether columns are summed, and the row length's
// class, of which there are eight between a power of two and the next.
std::string tuning_key(const request&, const arguments&, const device_facts&, const configuration& described);

// A call that went by while somebody listened.
struct heard_call {
  std::string key;
  request r;
  arguments a;  // of which memory may be gone
  device_facts chip;
  configuration described;
};
// A kernel that was launched meanwhile, and what limits it.
struct launched_kernel {
  std::string name;
  bool backward;
  int registers, spilled;  // of a thread; bytes
  int threads;             // that an SM has room for
  int flops;               // of an element, in words beside the row word
};
// From here on each kind of call is heard once, and every launch; what was heard before is forgotten.
void listen(bool);
bool is_listening();
std::vector<heard_call> heard();
std::vector<launched_kernel> launched_kernels();
void hear_launch(const request&, const plan&, const kernel&, const device_facts&);

// Ways whose kernels differ: the table's for other lengths and lines, or, where one is given, those a step from it.
std::vector<way> other_ways(const heard_call&, const std::optional<way>& near);
// Into the cache on disk, for the chip that was heard.
void build_way(const heard_call&, const way&);

// For this process. Without one, the table's, whatever the cache has.
void use_way(const std::string& key, const std::optional<way>&);
// For all that come. False where the cache cannot be written.
bool keep_way(const std::string& key, const std::optional<way>&, const std::string& label);

}  // namespace onepass::cuda
