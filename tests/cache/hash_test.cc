// FNV-1a-128 against the published vectors (IETF draft-eastlake-fnv).
#include "src/cache/hash.h"

#include <gtest/gtest.h>

namespace onepass::cache {
namespace {

TEST(Hash, PublishedVectors) {
  EXPECT_EQ(hash().hex(), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(hash().add("a").hex(), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(hash().add("foobar").hex(), "343e1662793c64bf6f0d3597ba446f18");
}

TEST(Hash, PiecesAreTheWhole) { EXPECT_EQ(hash().add("foo").add("").add("bar").hex(), hash().add("foobar").hex()); }

TEST(Hash, BytesAreUnsignedAndZeroCounts) {
  EXPECT_NE(hash().add(std::string_view("\0", 1)).hex(), hash().hex());
  EXPECT_NE(hash().add("\xff").hex(), hash().add("\x7f").hex());
}

}  // namespace
}  // namespace onepass::cache
