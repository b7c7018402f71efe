#include "parvl/media/sandbox.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

namespace parvl {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "the system call filter does not know this processor"
#endif

// What computing on memory and talking over open descriptors takes; all else fails with EPERM. No file is opened, no
// socket made, no process started.
constexpr int kAllowed[] = {
    SYS_read,        SYS_write,         SYS_recvfrom,     SYS_recvmsg,      SYS_sendto,       SYS_sendmsg,
    SYS_ppoll,       SYS_close,         SYS_brk,          SYS_mmap,         SYS_munmap,       SYS_mprotect,
    SYS_mremap,      SYS_madvise,       SYS_futex,        SYS_rt_sigreturn, SYS_rt_sigaction, SYS_rt_sigprocmask,
    SYS_sigaltstack, SYS_clock_gettime, SYS_gettimeofday, SYS_getpid,       SYS_gettid,       SYS_tgkill,
    SYS_sched_yield, SYS_getrandom,     SYS_exit,         SYS_exit_group,   SYS_fstat,        SYS_restart_syscall,
    SYS_getrusage,
#if defined(SYS_poll)
    SYS_poll,
#endif
#if defined(PARVL_ADDRESS_SANITIZER)  // with which UndefinedBehaviorSanitizer finds out whether memory may be read
    SYS_pipe2,
#if defined(SYS_pipe)
    SYS_pipe,
#endif
#endif
};

absl::Status set_limit(__rlimit_resource resource, rlim_t value) {
  const rlimit limit{value, value};
  if (::setrlimit(resource, &limit) == 0) return absl::OkStatus();
  return failed("a media worker cannot limit itself: ", std::strerror(errno));
}

// Descriptors of the server that its program did not mark close-on-exec, connections of clients among them.
absl::Status close_all_but(int keep) {
  const unsigned int kept = static_cast<unsigned int>(keep);
  if (::syscall(SYS_close_range, kept + 1, ~0u, 0) != 0) {
    return failed("a media worker cannot close what it inherited: ", std::strerror(errno));
  }
  for (int descriptor = 0; descriptor < keep; ++descriptor) {
    if (descriptor != STDERR_FILENO) ::close(descriptor);
  }
  return absl::OkStatus();
}

absl::Status filter_system_calls() {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
  };
  for (const int call : kAllowed) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    return failed("a media worker cannot give up its rights: ", std::strerror(errno), " (the kernel needs seccomp)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status give_up_rights(int64_t memory_bytes, int keep) {
  PARVL_RETURN_IF_ERROR(close_all_but(keep));
  if (kSandboxBoundsMemory) PARVL_RETURN_IF_ERROR(set_limit(RLIMIT_AS, static_cast<rlim_t>(memory_bytes)));
  PARVL_RETURN_IF_ERROR(set_limit(RLIMIT_CORE, 0));
  PARVL_RETURN_IF_ERROR(set_limit(RLIMIT_FSIZE, 0));
  return filter_system_calls();
}

}  // namespace parvl
