// Programs that are run: what they print, and that they end.
#include "src/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace onepass {
namespace {

using namespace std::chrono_literals;

run_result shell(const std::string& script) { return run_program({"sh", "-c", script}); }

TEST(Process, GivesStatusAndOutput) {
  const run_result result = shell("echo out; echo err >&2; exit 3");
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.output, "out\nerr\n");
  EXPECT_EQ(shell("kill -9 $$").status, 128 + SIGKILL);
  EXPECT_EQ(run_program({"/nonexistent/compiler"}).status, 127);
}

TEST(Process, ArgumentsAndVariablesAreNotRead) {
  const std::string text = "a b'c\"$HOME `x`\n*";
  EXPECT_EQ(run_program({"printf", "%s", text}).output, text);
  EXPECT_EQ(run_program({"sh", "-c", "printf %s \"$GIVEN\""}, {{"GIVEN", text}}).output, text);
}

TEST(Process, OfMuchOutputTheFirstIsKept) {
  const run_result result = shell("yes | head -c 1000000");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.output.size(), 65536u);
}

// Programs that leave their numbers in a file, one started by the other, and sleep.
struct sleepers {
  sleepers() {
    std::string pattern = (std::filesystem::temp_directory_path() / "onepass-test-XXXXXX").string();
    folder = mkdtemp(pattern.data());
    script = "sleep 600 & echo $! >" + folder + "/inner; echo $$ >" + folder + "/outer; mv " + folder + "/outer " +
             folder + "/started; wait";
  }
  ~sleepers() { std::filesystem::remove_all(folder); }
  int number(const char* of) const {
    int number = 0;
    std::ifstream(folder + "/" + of) >> number;
    return number;
  }
  bool wait_for_start() const {
    return until([&] { return number("started") > 0; });
  }
  bool have_ended() const {
    return until([&] { return !runs(number("inner")) && !runs(number("started")); });
  }

  static bool runs(int process) {  // one that has ended may still wait for its parent's question
    std::ifstream in("/proc/" + std::to_string(process) + "/stat");
    std::string skipped, state;
    return (in >> skipped >> skipped >> state) && state != "Z";
  }
  template <class Condition>
  static bool until(const Condition& holds) {
    for (int turn = 0; turn < 1000; ++turn, std::this_thread::sleep_for(10ms))
      if (holds()) return true;
    return false;
  }

  std::string folder, script;
};

TEST(Process, AnInterruptionEndsAllThatRuns) {
  const sleepers programs;
  std::thread other([&] {
    EXPECT_TRUE(programs.wait_for_start());
    interrupt_programs();
  });
  EXPECT_THROW(shell(programs.script), interrupted);
  other.join();
  EXPECT_TRUE(programs.have_ended());
  EXPECT_EQ(shell("exit 0").status, 0) << "the next one runs";
}

TEST(Process, NoneOutlivesAProcessThatIsKilled) {
  const sleepers programs;
  const pid_t child = fork();
  if (child == 0) {
    shell(programs.script);
    _exit(0);
  }
  ASSERT_TRUE(programs.wait_for_start());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(programs.have_ended());
}

}  // namespace
}  // namespace onepass
