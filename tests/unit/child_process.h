// A process of a test's own that can be stopped and killed, and is talked to in lines.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/check.h"

namespace parvl {

// One end of the talk. Lines end with a line break, which is not part of them.
class LineSocket {
 public:
  explicit LineSocket(int fd) : fd_(fd) {}
  ~LineSocket() { ::close(fd_); }
  LineSocket(const LineSocket&) = delete;
  LineSocket& operator=(const LineSocket&) = delete;
  void say(const std::string& line) const {
    const std::string bytes = line + "\n";
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t sent = ::send(fd_, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (sent <= 0) return;
      done += static_cast<size_t>(sent);
    }
  }
  // "" when the other end has gone.
  std::string hear() const {
    std::string line;
    for (char c = 0; ::recv(fd_, &c, 1, 0) == 1 && c != '\n';) line += c;
    return line;
  }

 private:
  const int fd_;
};

// Started while the test has no other thread, so that it may start its own. Killed when destroyed.
class ChildProcess {
 public:
  explicit ChildProcess(const std::function<void(LineSocket&)>& body) {
    int ends[2];
    PARVL_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
    pid_ = ::fork();
    PARVL_CHECK(pid_ >= 0, "a process");
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(ends[0]);
      {
        LineSocket parent(ends[1]);
        body(parent);
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    talk_ = std::make_unique<LineSocket>(ends[0]);
  }
  ~ChildProcess() { kill(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const LineSocket& talk() const { return *talk_; }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Until the system says that it has stopped.
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    PARVL_CHECK(::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status), "it stops");
  }
  void go_on() const { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_ = -1;
  std::unique_ptr<LineSocket> talk_;
};

}  // namespace parvl
