// Runs another program, here a compiler, which does not outlive this process and can be given up.
#include "src/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <optional>

extern char** environ;

namespace onepass {
namespace {

constexpr std::size_t kMostOutput = 65536;
constexpr int kPollMilliseconds = 20;

// The compiler's driver starts others, which a signal to it would leave behind. So a shell is the first of their group,
// starts the program as it stands in "$@", and beside it waits for the end of a pipe that this process holds: that
// comes however this process ends, and ends the group.
constexpr const char* kWatched =
    "\"$@\" </dev/null 3<&- & program=$!; exec >/dev/null 2>&1; { read -r nothing; kill -s KILL 0; } <&3 & exec 3<&-; "
    "wait $program";

std::atomic<unsigned> interruptions{0};

class pipe_ends {
 public:
  pipe_ends() {
    int made[2];
    if (pipe2(made, O_CLOEXEC) != 0) return;  // programs that other threads start have none of it
    for (int i = 0; i < 2; ++i) {
      ends_[i] = fcntl(made[i], F_DUPFD_CLOEXEC, kFirst);
      close(made[i]);
    }
  }
  ~pipe_ends() { close_reader(), close_writer(); }
  pipe_ends(const pipe_ends&) = delete;
  pipe_ends& operator=(const pipe_ends&) = delete;
  int reader() const { return ends_[0]; }
  int writer() const { return ends_[1]; }
  void close_reader() { close_end(0); }
  void close_writer() { close_end(1); }

 private:
  void close_end(int which) {
    if (ends_[which] >= 0) close(ends_[which]);
    ends_[which] = -1;
  }
  static constexpr int kFirst = 10;  // the child's 1 to 3 stand for something else
  int ends_[2] = {-1, -1};
};

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> all;
  all.reserve(texts.size() + 1);
  for (const std::string& text : texts) all.push_back(const_cast<char*>(text.c_str()));
  all.push_back(nullptr);
  return all;
}

std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto is_set = [&](const auto& v) { return text.starts_with(v.first + "="); };
    if (std::none_of(variables.begin(), variables.end(), is_set)) all.push_back(text);
  }
  for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
  return all;
}

// 0 where it cannot be.
pid_t start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            const pipe_ends& output, const pipe_ends& watched) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output.writer(), 1);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_adddup2(&actions, watched.reader(), 3);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none), sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none), posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = 0;
  const int failed = posix_spawn(&child, "/bin/sh", &actions, &attributes, pointers_to(command).data(),
                                 pointers_to(environment).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return failed ? 0 : child;
}

// What there is to read; false at the end.
bool drain(int from, std::string& into) {
  char some[4096];
  const ssize_t got = read(from, some, sizeof some);
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  into.append(some, std::min(static_cast<std::size_t>(got), kMostOutput - std::min(kMostOutput, into.size())));
  return got > 0;
}

std::optional<int> exit_status(pid_t child, int how) {
  int status = 0;
  pid_t ended = 0;
  do ended = waitpid(child, &status, how);
  while (ended < 0 && errno == EINTR);
  if (ended == 0) return {};
  if (ended < 0) return -1;  // somebody else's handler of SIGCHLD was first
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

run_result run_program(const std::vector<std::string>& command,
                       const std::vector<std::pair<std::string, std::string>>& variables) {
  const interruption now;
  std::vector<std::string> shell{"sh", "-c", kWatched, "sh"};
  shell.insert(shell.end(), command.begin(), command.end());
  pipe_ends output, watched;
  run_result result{-1, {}};
  if (std::min({output.reader(), output.writer(), watched.reader(), watched.writer()}) < 0) return result;
  const pid_t child = start(shell, environment_with(variables), output, watched);
  output.close_writer(), watched.close_reader();
  if (child == 0) return result;
  fcntl(output.reader(), F_SETFL, O_NONBLOCK);
  std::optional<int> status;
  try {
    for (bool open = true; !status;) {
      pollfd reader{output.reader(), POLLIN, 0};
      if (open && poll(&reader, 1, kPollMilliseconds) > 0) open = drain(output.reader(), result.output);
      now.check();
      status = exit_status(child, open ? WNOHANG : 0);
    }
  } catch (...) {
    kill(-child, SIGKILL);
    exit_status(child, 0);
    throw;
  }
  std::size_t before = 0;
  do before = result.output.size(), drain(output.reader(), result.output);
  while (result.output.size() > before);
  result.status = *status;
  return result;
}

void interrupt_programs() { ++interruptions; }

interruption::interruption() : began_(interruptions) {}
void interruption::check() const {
  if (interruptions != began_) throw interrupted();
}

}  // namespace onepass
