#include "parvl/launch/children.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "parvl/base/check.h"
#include "parvl/launch/child_process.h"

namespace parvl {
namespace {

constexpr int kLastWait_ms = 3000;  // for a process to be gone after SIGKILL, when nobody will hear of it any more

}  // namespace

class Children::Impl {
 public:
  explicit Impl(OnExit on_exit) : on_exit_(std::move(on_exit)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    PARVL_CHECK(wake_ >= 0, "no descriptor is left for the processes' thread");
    thread_ = std::thread([this] { loop(); });
  }
  ~Impl() {
    order({{}, {}, true});
    thread_.join();
    ::close(wake_);
  }

  struct Order {
    Key key = 0;
    std::optional<ChildCommand> command;  // none: kill it
    bool stop = false;
  };
  void order(Order order) {
    {
      std::lock_guard lock(mutex_);
      orders_.push_back(std::move(order));
    }
    const uint64_t one = 1;
    PARVL_CHECK(::write(wake_, &one, sizeof one) == sizeof one, "cannot wake the processes' thread");
  }

 private:
  void loop() {
    for (;;) {
      std::vector<pollfd> waits = {{wake_, POLLIN, 0}};
      std::vector<Key> keys;
      for (const auto& [key, child] : children_) {
        waits.push_back({child.descriptor, POLLIN, 0});
        keys.push_back(key);
      }
      while (::poll(waits.data(), waits.size(), -1) < 0) PARVL_CHECK(errno == EINTR, "cannot wait for processes");
      for (size_t i = 0; i < keys.size(); ++i) {
        if (waits[i + 1].revents != 0) on_exit_(keys[i], how_it_ended(reap(keys[i])));
      }
      uint64_t count;
      (void)!::read(wake_, &count, sizeof count);
      if (!obey()) return;
    }
  }

  bool obey() {
    std::deque<Order> orders;
    {
      std::lock_guard lock(mutex_);
      orders.swap(orders_);
    }
    for (const Order& order : orders) {
      if (order.stop) {
        end_all();
        return false;
      }
      if (order.command.has_value()) {
        start(order.key, *order.command);
      } else if (const auto found = children_.find(order.key); found != children_.end()) {
        kill_group(found->second);
      }
    }
    return true;
  }

  void start(Key key, const ChildCommand& command) {
    const auto child = start_child(command);
    if (!child.ok()) return on_exit_(key, std::string(child.status().message()));
    PARVL_CHECK(children_.emplace(key, *child).second, "a process's key that is in use");
  }

  // A process that the kernel cannot end now (it waits for a device, or a debugger holds it) is left to it.
  void end_all() {
    for (const auto& [key, child] : children_) kill_group(child);
    while (!children_.empty()) {
      const auto first = children_.begin();
      pollfd wait = {first->second.descriptor, POLLIN, 0};
      if (::poll(&wait, 1, kLastWait_ms) > 0) {
        reap(first->first);
      } else {
        children_.erase(first);
      }
    }
  }

  static void kill_group(const ChildProcess& child) {
    ::kill(-child.pid, SIGKILL);
    ::kill(child.pid, SIGKILL);  // its group may not be there yet
  }

  int reap(Key key) {
    const ChildProcess child = children_.extract(key).mapped();
    const int status = reap_child(child);
    ::close(child.descriptor);
    return status;
  }

  const OnExit on_exit_;
  const int wake_;
  std::map<Key, ChildProcess> children_;  // the thread's
  std::mutex mutex_;
  std::deque<Order> orders_;
  std::thread thread_;
};

Children::Children(OnExit on_exit) : impl_(std::make_unique<Impl>(std::move(on_exit))) {}
Children::~Children() = default;
void Children::start(Key key, ChildCommand command) { impl_->order({key, std::move(command)}); }
void Children::kill(Key key) { impl_->order({key, std::nullopt}); }

std::string how_it_ended(int status) {
  if (!WIFSIGNALED(status)) return absl::StrCat("ended with exit code ", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  const char* const name = ::sigabbrev_np(signal);  // null: a real-time signal
  return name == nullptr ? absl::StrCat("was ended by signal ", signal) : absl::StrCat("was ended by SIG", name);
}

}  // namespace parvl
