#include "parvl/launch/supervisor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "parvl/base/check.h"
#include "parvl/launch/child_process.h"

namespace parvl {
namespace {

// A port that is free now.
absl::StatusOr<int64_t> free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool ok = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!ok) return failed("no free port for the ranks to meet at: ", std::strerror(error));
  return ntohs(address.sin_port);
}

constexpr double kGraceAfterFailure_s = 10;

struct Rank {
  int64_t rank = 0;
  ChildProcess process;
  std::optional<int> ended;
};

// One attempt: the ranks from their start to their end.
class Attempt {
 public:
  Attempt(const LaunchOptions& options, int64_t attempt) : options_(options), attempt_(attempt) {}
  Attempt(const Attempt&) = delete;
  ~Attempt() {
    for (Rank& rank : ranks_) {
      if (!rank.ended.has_value()) {
        ::kill(-rank.process.pid, SIGKILL);
        ::kill(rank.process.pid, SIGKILL);  // its group may not be there yet
        ::waitpid(rank.process.pid, nullptr, 0);
      }
      if (rank.process.descriptor >= 0) ::close(rank.process.descriptor);
    }
  }

  absl::Status start() {
    int64_t port = options_.master_port;
    if (port == 0) {
      PARVL_ASSIGN_OR_RETURN(port, free_port());
    }
    for (int64_t local = 0; local < options_.processes; ++local) PARVL_RETURN_IF_ERROR(start_rank(local, port));
    return absl::OkStatus();
  }

  // Until all have ended. `first`: the rank that ended badly first; null: none did. `stopped`: we were asked to end.
  absl::Status watch(const Rank*& first, bool& stopped) {
    first = nullptr;
    std::optional<int> grace_ms;  // set once they have been asked to end
    for (;;) {
      std::vector<pollfd> waits;
      std::vector<Rank*> alive;
      for (Rank& rank : ranks_) {
        if (rank.ended.has_value()) continue;
        waits.push_back({rank.process.descriptor, POLLIN, 0});
        alive.push_back(&rank);
      }
      if (alive.empty()) return absl::OkStatus();
      if (!stopped && options_.stop_descriptor >= 0) waits.push_back({options_.stop_descriptor, POLLIN, 0});
      const int ready = ::poll(waits.data(), waits.size(), grace_ms.value_or(-1));
      if (ready < 0 && errno != EINTR) return failed("cannot wait for the ranks: ", std::strerror(errno));
      if (ready == 0) kill_the_rest();
      for (size_t i = 0; i < alive.size() && ready > 0; ++i) {
        if (waits[i].revents == 0) continue;
        reap(*alive[i]);
        // SIGTERM is what they were asked to end by.
        const bool as_asked = stopped && WIFSIGNALED(*alive[i]->ended) && WTERMSIG(*alive[i]->ended) == SIGTERM;
        if (first == nullptr && *alive[i]->ended != 0 && !as_asked) first = alive[i];
      }
      const bool asked = !stopped && waits.size() > alive.size() && ready > 0 && waits.back().revents != 0;
      stopped = stopped || asked;
      if (grace_ms.has_value() || (first == nullptr && !stopped)) continue;
      // Without the one that failed the others have nothing to finish.
      grace_s_ = first != nullptr ? std::min(options_.grace_s, kGraceAfterFailure_s) : options_.grace_s;
      signal_all(SIGTERM);
      grace_ms = static_cast<int>(grace_s_ * 1e3);
    }
  }

 private:
  absl::Status start_rank(int64_t local, int64_t port) {
    const auto process = start_child({options_.command, rank_environment(options_, local, port, attempt_)});
    if (!process.ok()) return with_context(process.status(), absl::StrCat("rank ", local));
    Rank& rank = ranks_.emplace_back();
    rank.rank = options_.node * options_.processes + local;
    rank.process = *process;
    return absl::OkStatus();
  }

  static void reap(Rank& rank) { rank.ended = reap_child(rank.process); }

  void kill_the_rest() {
    for (const Rank& rank : ranks_) {
      if (rank.ended.has_value() || !options_.log) continue;
      options_.log(
          absl::StrCat("rank ", rank.rank, " did not end within ", grace_s_, " s of being asked to, and is killed"));
    }
    signal_all(SIGKILL);
  }

  void signal_all(int signal) {
    for (const Rank& rank : ranks_) {
      if (!rank.ended.has_value()) ::kill(signal == SIGKILL ? -rank.process.pid : rank.process.pid, signal);
    }
  }

  const LaunchOptions& options_;
  const int64_t attempt_;
  double grace_s_ = 0;  // once they were asked to end
  std::vector<Rank> ranks_;
};

std::string end_of(const Rank& rank) { return absl::StrCat("rank ", rank.rank, " ", how_it_ended(*rank.ended)); }

}  // namespace

std::vector<std::pair<std::string, std::string>> rank_environment(const LaunchOptions& options, int64_t local_rank,
                                                                  int64_t port, int64_t attempt) {
  const auto text = [](int64_t value) { return absl::StrCat(value); };
  return {{"RANK", text(options.node * options.processes + local_rank)},
          {"LOCAL_RANK", text(local_rank)},
          {"WORLD_SIZE", text(options.nodes * options.processes)},
          {"LOCAL_WORLD_SIZE", text(options.processes)},
          {"GROUP_RANK", text(options.node)},
          {"MASTER_ADDR", options.master_host},
          {"MASTER_PORT", text(port)},
          {"TORCHELASTIC_RESTART_COUNT", text(attempt)},
          {"TORCHELASTIC_MAX_RESTARTS", text(options.max_restarts)}};
}

absl::Status supervise(const LaunchOptions& options) {
  PARVL_CHECK(!options.command.empty() && options.processes >= 1, "nothing to launch");
  bool stopped = false;
  for (int64_t attempt = 0;; ++attempt) {
    Attempt run(options, attempt);
    PARVL_RETURN_IF_ERROR(run.start());
    const Rank* bad = nullptr;
    PARVL_RETURN_IF_ERROR(run.watch(bad, stopped));
    if (bad == nullptr) return absl::OkStatus();
    const std::string what = end_of(*bad);
    if (WIFEXITED(*bad->ended) && WEXITSTATUS(*bad->ended) == 2) return invalid(what, "; its last line says why");
    if (stopped || attempt == options.max_restarts) {
      return failed(
          what,
          options.max_restarts > 0 ? absl::StrCat(" after ", attempt, attempt == 1 ? " restart" : " restarts") : "",
          "; the others were ended");
    }
    if (options.log) options.log(absl::StrCat(what, "; restart ", attempt + 1, " of ", options.max_restarts));
  }
}

}  // namespace parvl
