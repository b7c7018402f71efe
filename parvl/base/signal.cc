#include "parvl/base/signal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "parvl/base/check.h"

namespace parvl {
namespace {

// A handler can reach nothing but statics; lock-free atomics are allowed in it.
std::atomic<int> g_signal{0};
std::atomic<bool> g_in_use{false};
int g_pipe[2] = {-1, -1};
struct sigaction g_former_int, g_former_term;

void on_signal(int number) {
  const int saved_errno = errno;
  int none = 0;
  if (!g_signal.compare_exchange_strong(none, number)) _exit(128 + number);
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = ::write(g_pipe[1], &byte, 1);
  errno = saved_errno;
}

// With the signal's own end afterwards, so that a shell knows that it was this.
void say_and_end(int number) {
  constexpr char kInterrupted[] = "parvl: interrupted\n", kTerminated[] = "parvl: terminated by SIGTERM\n";
  [[maybe_unused]] const ssize_t written = number == SIGINT
                                               ? ::write(STDERR_FILENO, kInterrupted, sizeof kInterrupted - 1)
                                               : ::write(STDERR_FILENO, kTerminated, sizeof kTerminated - 1);
  ::signal(number, SIG_DFL);
  ::raise(number);  // once this handler is left
}

}  // namespace

StopSignal::StopSignal() {
  PARVL_CHECK(!g_in_use.exchange(true), "a second StopSignal in one process");
  g_signal = 0;
  PARVL_CHECK(::pipe2(g_pipe, O_CLOEXEC | O_NONBLOCK) == 0, "cannot make a pipe");
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &action, &g_former_int);
  ::sigaction(SIGTERM, &action, &g_former_term);
}

StopSignal::~StopSignal() {
  ::sigaction(SIGINT, &g_former_int, nullptr);
  ::sigaction(SIGTERM, &g_former_term, nullptr);
  ::close(g_pipe[0]);
  ::close(g_pipe[1]);
  g_in_use = false;
}

bool StopSignal::requested() const { return g_signal != 0; }
int StopSignal::signal() const { return g_signal; }
int StopSignal::descriptor() const { return g_pipe[0]; }

void say_when_interrupted() {
  sigset_t held;
  sigemptyset(&held);
  for (const int number : {SIGINT, SIGTERM}) {
    struct sigaction action;
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler == SIG_DFL) ::signal(number, say_and_end);
    sigaddset(&held, number);
  }
  ::sigprocmask(SIG_UNBLOCK, &held, nullptr);
}

void ignore_broken_pipes() { ::signal(SIGPIPE, SIG_IGN); }

void end_if_reader_left(int descriptor) {
  pollfd state{descriptor, POLLOUT, 0};
  if (::poll(&state, 1, 0) < 1 || (state.revents & (POLLERR | POLLHUP)) == 0) return;
  ::signal(SIGPIPE, SIG_DFL);
  ::raise(SIGPIPE);
}

}  // namespace parvl
