// Lines that this build's table does not have are compiled from these headers.
#include "onepass/core.h"

namespace onepass {
namespace {

[[maybe_unused]] const bool is_set = [] {
  set_include_dir(ONEPASS_INCLUDE_DIR);
  return true;
}();

}  // namespace
}  // namespace onepass
