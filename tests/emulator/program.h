// A kernel as the emulator runs it: PTX, read into instructions whose operands are registers. Constants and special
// registers have registers of their own, which are set before a thread begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace onepass::emulator {

struct thread;
struct warp;
struct instruction;

using step = void (*)(thread&, const instruction&);
// What the threads of a warp do together: those of the mask, which have all come here.
using joint_step = void (*)(warp&, std::uint32_t mask, const instruction&);

struct operand {
  int reg;
  std::int64_t offset;  // of an address
};

struct instruction {
  step run = nullptr;
  joint_step run_together = nullptr;
  int guard = -1;  // the predicate that it depends on
  bool guard_is = true;
  int target = -1;             // of a branch
  int mask = -1;               // operand that says which threads of a warp take part, if not all
  bool of_four_warps = false;  // which take it as one: the first is told
  bool opens = false;          // what it takes first is in braces
  bool yields = false;         // others go on behind it
  std::int64_t number = 0;     // whatever its modifiers say in numbers: bytes, columns, dimensions
  std::vector<operand> of;
  std::string name;
  int line = 0;  // of the text
};

// What registers are set to before a thread begins.
enum class special { tid_x, tid_y, ntid_x, ntid_y, ctaid_x, ctaid_y, nctaid_x, nctaid_y, laneid, cluster_rank };

struct program {
  std::string name;
  std::vector<instruction> code;
  int registers = 0, thread_bytes = 0;           // thread_bytes: of local memory
  std::uint32_t static_shared = 0, cluster = 1;  // bytes; blocks
  std::uint32_t dynamic_align = 16;
  std::uint32_t parameter_bytes = 0;
  std::vector<std::pair<int, std::uint64_t>> constants;
  std::vector<std::pair<int, special>> specials;
  std::vector<int> dynamic_shared;                        // registers of symbols behind all static ones
  std::vector<std::pair<int, std::uint32_t>> parameters;  // registers of addresses, and how far in
};

// Shared memory begins here, so that no address in it is 0.
inline constexpr std::uint32_t kSharedBase = 1024;

// Throws std::runtime_error, with the line, for what the emulator does not know.
program read_program(const std::string& ptx);

using parts = std::vector<std::string>;  // of a name: "add", "rn", "f32"
inline bool has(const parts& of, const char* part) { return std::find(of.begin(), of.end(), part) != of.end(); }

// Fills in what an instruction does, from its name's parts. False: unknown.
bool find_scalar(const parts&, instruction&);
bool find_joint(const parts&, instruction&);
bool find_memory(const parts&, instruction&);
bool find_asynchronous(const parts&, instruction&);

}  // namespace onepass::emulator
