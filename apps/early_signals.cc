// Holds SIGINT and SIGTERM back while the program's libraries start (libtorch's take a fifth of a second), so that
// nobody's Ctrl-C ends it without a word: main lets them through once it can say one (say_when_interrupted). Runs
// before the libraries' constructors; a process that starts itself again, as short_spin.cc has it do, keeps what it
// holds back.
#include <signal.h>

namespace {

// Nothing is initialised yet, the C library neither: only system calls.
void hold_signals(int /*argc*/, char** /*argv*/, char** /*envp*/) {
  sigset_t held;
  sigemptyset(&held);
  sigaddset(&held, SIGINT);
  sigaddset(&held, SIGTERM);
  sigprocmask(SIG_BLOCK, &held, nullptr);
}

__attribute__((section(".preinit_array"), used)) void (*const kBeforeConstructors)(int, char**, char**) = hold_signals;

}  // namespace
