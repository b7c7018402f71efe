#include "parvl/launch/child_process.h"

#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "parvl/base/check.h"

namespace parvl {
namespace {

// In the child: never returns. Only calls that are safe between fork and exec.
[[noreturn]] void become(char* const* arguments, char* const* environment, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before the line above
  ::setpgid(0, 0);                        // an interrupt from the terminal reaches it through us alone, once
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) ::signal(signal, SIG_DFL);
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);  // listeners and clients are no business of a child
  ::execvpe(arguments[0], arguments, environment);
  constexpr char kText[] = "parvl: the command cannot be started: ";
  const char* reason = ::strerrordesc_np(errno);
  if (::write(STDERR_FILENO, kText, sizeof kText - 1) < 0 ||
      ::write(STDERR_FILENO, arguments[0], std::strlen(arguments[0])) < 0 || ::write(STDERR_FILENO, ": ", 2) < 0 ||
      ::write(STDERR_FILENO, reason, std::strlen(reason)) < 0 || ::write(STDERR_FILENO, "\n", 1) < 0) {
  }
  ::_exit(2);
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

absl::StatusOr<ChildProcess> start_child(const ChildCommand& command) {
  PARVL_CHECK(!command.arguments.empty(), "nothing to start");
  std::vector<std::string> arguments = command.arguments, environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const auto& [key, value] : command.environment) replaced = replaced || key == name;
    if (!replaced) environment.push_back(text);
  }
  for (const auto& [key, value] : command.environment) environment.push_back(key + "=" + value);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  ChildProcess out;
  const pid_t parent = ::getpid();
  out.pid = ::fork();
  if (out.pid == 0) become(argv.data(), envp.data(), parent);
  if (out.pid < 0) return failed("cannot start a process: ", std::strerror(errno));
  out.descriptor = static_cast<int>(::syscall(SYS_pidfd_open, out.pid, 0));  // glibc 2.36 declares it for C alone
  if (out.descriptor >= 0) return out;
  const int error = errno;
  ::kill(out.pid, SIGKILL);
  ::waitpid(out.pid, nullptr, 0);
  return failed("cannot watch a process: ", std::strerror(error));
}

int reap_child(const ChildProcess& child) {
  int status = 0;
  PARVL_CHECK(::waitpid(child.pid, &status, 0) == child.pid, "a process that nobody can wait for");
  ::kill(-child.pid, SIGKILL);  // what it started and left
  return status;
}

}  // namespace parvl
