// Loaded into `parvl train` by tests/e2e/train_*.py in front of the C library: something happens at a chosen moment of
// saving a checkpoint. The moments are the calls that touch a path or descriptor of a checkpoint that is being written,
// in order.
//
// FAULT=kill:N      the process dies without warning at moment N; a write writes half of its bytes first
// FAULT=stop:N      the process stops at moment N, as by SIGSTOP
// FAULT=full:N      from moment N on the disk is full: nothing can be made or written
// FAULT=slow:MS     every sync takes MS milliseconds
// FAULT=noexchange:0   renameat2 is not there, as on network file systems
// FAULT=killexchange:N as noexchange, and dies after the N-th rename of a directory
// FAULT_RANK=R      only in rank R of a launched run, and only until the run is started again
// FAULT_COUNT=FILE  writes the number of moments to FILE at the end; of rank R of a launched run to FILE.R
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

const char* setting(const char* name) { return std::getenv(name) != nullptr ? std::getenv(name) : ""; }
// Not for another rank's process, nor for what starts the ranks, nor after a restart.
bool is_meant() {
  const std::string rank = setting("FAULT_RANK"), attempt = setting("TORCHELASTIC_RESTART_COUNT");
  return rank.empty() || (rank == setting("RANK") && attempt == "0");
}
const std::string kFault = is_meant() ? setting("FAULT") : "";
const std::string kKind = kFault.substr(0, kFault.find(':'));
const long kAt = kFault.find(':') == std::string::npos ? 0 : std::atol(kFault.c_str() + kFault.find(':') + 1);
long g_moments = 0, g_renames = 0;
bool g_ours[4096] = {};  // descriptors of files of the checkpoint

bool is_ours(const char* path) { return path != nullptr && std::strstr(path, "/.step-") != nullptr; }
bool is_ours(int fd) { return fd >= 0 && fd < 4096 && g_ours[fd]; }

template <typename F>
F* next(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

// One more moment; true when the disk is full.
bool moment(bool needs_space) {
  ++g_moments;
  if (kKind == "kill" && g_moments == kAt) die();
  if (kKind == "stop" && g_moments == kAt) ::kill(::getpid(), SIGSTOP);
  if (kKind == "full" && g_moments >= kAt && needs_space) {
    errno = ENOSPC;
    return true;
  }
  return false;
}

int opened(const char* path, int flags, int fd) {
  if (fd >= 0 && fd < 4096) g_ours[fd] = is_ours(path) && (flags & (O_CREAT | O_DIRECTORY)) != 0;
  return fd;
}

struct Report {
  ~Report() {
    if (*setting("FAULT_COUNT") == '\0') return;
    const std::string rank = setting("RANK");
    if (FILE* file = std::fopen((setting("FAULT_COUNT") + (rank.empty() ? "" : "." + rank)).c_str(), "w")) {
      std::fprintf(file, "%ld\n", g_moments);
      std::fclose(file);
    }
  }
} g_report;

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (is_ours(path) && (flags & O_CREAT) && moment(true)) return -1;
  static auto* real = next<int(const char*, int, ...)>("open");
  return opened(path, flags, real(path, flags, mode));
}

int mkdir(const char* path, mode_t mode) {
  if (is_ours(path) && moment(true)) return -1;
  static auto* real = next<int(const char*, mode_t)>("mkdir");
  return real(path, mode);
}

ssize_t write(int fd, const void* data, size_t bytes) {
  static auto* real = next<ssize_t(int, const void*, size_t)>("write");
  if (is_ours(fd)) {
    if (kKind == "kill" && g_moments + 1 == kAt) real(fd, data, bytes / 2);
    if (moment(true)) return -1;
  }
  return real(fd, data, bytes);
}

int fsync(int fd) {
  static auto* real = next<int(int)>("fsync");
  if (is_ours(fd)) {
    if (moment(true)) return -1;
    if (kKind == "slow") {
      const timespec pause{kAt / 1000, kAt % 1000 * 1000000};
      ::nanosleep(&pause, nullptr);
    }
  }
  return real(fd);
}

int rename(const char* from, const char* to) {
  static auto* real = next<int(const char*, const char*)>("rename");
  struct stat info;
  const bool directory = ::stat(from, &info) == 0 && S_ISDIR(info.st_mode);
  if (is_ours(from) && moment(false)) return -1;
  const int result = real(from, to);
  if (result == 0 && directory && kKind == "killexchange" && ++g_renames == kAt) die();
  return result;
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) {
  static auto* real = next<int(int, const char*, int, const char*, unsigned int)>("renameat2");
  if (is_ours(from) && moment(false)) return -1;
  if (kKind == "noexchange" || kKind == "killexchange") {
    errno = EINVAL;
    return -1;
  }
  return real(from_dir, from, to_dir, to, flags);
}

}  // extern "C"
