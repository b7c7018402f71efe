// Linked into the programs that compute: makes OpenMP's waiting threads spin briefly.
//
// libgomp lets a waiting thread spin for about a millisecond. When anything else runs on one of the cores (another
// process, or our own network thread), every parallel loop then costs that much: a decoding step of 30 ms took 600 ms.
// A short spin is as fast on a quiet machine. libgomp reads its environment in its constructor, before main, so the
// program starts itself again with the variable set, before any library's constructor has run (about 10 ms). A variable
// that the user has set is left alone.
#include <unistd.h>

#include <climits>
#include <cstring>

namespace {

constexpr char kSpin[] = "GOMP_SPINCOUNT=1000";
constexpr int kMaxVariables = 4096;

bool starts_with(const char* text, const char* prefix) { return std::strncmp(text, prefix, std::strlen(prefix)) == 0; }

// Nothing is initialised yet, the C library neither: no allocation, only system calls.
void start_with_short_spin(int /*argc*/, char** argv, char** envp) {
  static char* variables[kMaxVariables + 2];
  static char path[PATH_MAX];
  int count = 0;
  for (; envp[count] != nullptr; ++count) {
    if (starts_with(envp[count], "GOMP_SPINCOUNT=") || starts_with(envp[count], "OMP_WAIT_POLICY=")) return;
    if (count == kMaxVariables) return;
    variables[count] = envp[count];
  }
  static char spin[sizeof kSpin];
  std::memcpy(spin, kSpin, sizeof kSpin);
  variables[count] = spin;
  if (readlink("/proc/self/exe", path, sizeof path - 1) > 0) execve(path, argv, variables);
  // No /proc, or the file is gone: it runs as it is.
}

__attribute__((section(".preinit_array"), used)) void (*const kBeforeConstructors)(int, char**,
                                                                                   char**) = start_with_short_spin;

}  // namespace
