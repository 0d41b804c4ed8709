// Ways as text.
#include "src/cuda/row/way.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <sstream>
#include <utility>

namespace onepass::cuda {
namespace {

constexpr const char* kKinds[] = {"rows", "streamed", "parts", "tiles"};

struct bounds_of_number {
  int least, most;
};
constexpr bounds_of_number kThreads{32, 1024}, kFlag{0, 1};

// Calls body(name, number, bounds) for each number that a kind has; of flags, an int.
template <class Way, class Body>
void each_number(Way& w, const Body& body) {
  const auto flag = [&](const char* name, auto& value) {
    int number = value ? 1 : 0;
    body(name, number, kFlag);
    if constexpr (!std::is_const_v<std::remove_reference_t<decltype(value)>>) value = number != 0;
  };
  switch (w.kind) {
    case way_kind::rows:
      body("numbers", w.row.numbers, bounds_of_number{1, 128});
      body("block", w.row.block, kThreads);
      body("threads", w.row.threads, kThreads);
      body("resident", w.row.resident, bounds_of_number{32, 2048});
      body("stages", w.row.stages, bounds_of_number{0, 8});
      flag("recomputes", w.row.recomputes), flag("ahead", w.row.ahead);
      body("cluster", w.row.cluster, bounds_of_number{1, 16});
      body("across", w.row.across, bounds_of_number{0, 1024});
      return;
    case way_kind::streamed:
      body("threads", w.stream.threads, kThreads);
      body("steps", w.stream.steps, bounds_of_number{1, 1024});
      body("vectors", w.stream.vectors, bounds_of_number{1, 16});
      body("resident", w.stream.resident, bounds_of_number{32, 2048});
      return;
    case way_kind::parts:
    case way_kind::tiles:
      body("threads", w.tile.threads, w.kind == way_kind::parts ? bounds_of_number{0, 1024} : kThreads);
      body("unroll", w.tile.unroll, bounds_of_number{0, 8});
      body("resident", w.tile.resident, bounds_of_number{0, 2048});
      body("blocks", w.tile.blocks_per_sm, bounds_of_number{0, 64});
      body("tiles", w.tile.tiles, bounds_of_number{0, 64});
      return;
  }
}

}  // namespace

std::string text_of(const way& of) {
  std::string text = kKinds[static_cast<int>(of.kind)];
  each_number(of, [&](const char* name, int number, bounds_of_number) {
    if (number != 0) text += std::string(" ") + name + "=" + std::to_string(number);
  });
  return text;
}

std::optional<way> way_of(std::string_view text) {
  std::istringstream in{std::string(text)};
  std::string kind, word;
  in >> kind;
  const auto* const found = std::find(std::begin(kKinds), std::end(kKinds), kind);
  if (found == std::end(kKinds)) return {};
  way result{.kind = static_cast<way_kind>(found - std::begin(kKinds))};
  result.row.cluster = 0;
  each_number(result, [](const char*, int& number, bounds_of_number) { number = 0; });
  bool known = true;
  while (in >> word) {
    bool is_number = false;
    each_number(result, [&](const char* name, int& number, bounds_of_number) {
      const std::string begin = std::string(name) + "=";
      if (!word.starts_with(begin)) return;
      const char* const end = word.data() + word.size();
      const auto [stop, error] = std::from_chars(word.data() + begin.size(), end, number);
      is_number = error == std::errc{} && stop == end;
    });
    known = known && is_number;
  }
  each_number(result, [&](const char*, int number, bounds_of_number limits) {
    known = known && number >= limits.least && number <= limits.most;
  });
  const auto are_warps = [](int threads) { return std::has_single_bit(static_cast<unsigned>(threads)); };
  if (result.kind == way_kind::rows) known = known && are_warps(result.row.block) && are_warps(result.row.threads);
  if (result.kind == way_kind::streamed) known = known && are_warps(result.stream.threads);
  const bool has_tiles = result.tile.threads > 0;
  if (has_tiles && std::min({result.tile.unroll, result.tile.resident, result.tile.blocks_per_sm}) == 0) return {};
  return known ? std::optional<way>(result) : std::nullopt;
}

}  // namespace onepass::cuda
