// Watches one rank's group calls: keeps their log, and when one takes long finds out with the other ranks, through the
// store, whether it can still end.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "parvl/base/clock.h"
#include "parvl/comm/call_report.h"
#include "parvl/comm/run_store.h"

namespace parvl {

class CallWatch;

// For failures outside of a call: Gloo throws on a thread of its own when more comes than a rank awaits, which ends the
// process. What is asked to explain is the last watch that was made with it. Outlives these.
class FailureExplainer {
 public:
  // As CallWatch::explain; `failure` itself when nothing is watched. Any thread.
  absl::Status explain(const absl::Status& failure);

 private:
  friend class CallWatch;
  std::mutex mutex_;  // held while one is explained, so that the watch stays
  CallWatch* watch_ = nullptr;
};

struct CheckOptions {
  const Clock* clock = nullptr;  // thread-safe; outlives what uses it
  double deadline_s = 600;       // of a call, for the others to come; see also CommSite::Wait::kLong
  double silent_s = 30;          // without a sign of life, a rank for which others wait is taken for lost
  double patience_s = 1.5;       // a call that takes longer makes the ranks tell each other where they are
  double beat_s = 0.25;          // between two looks at the store; 0: no threads, whoever tests calls look and guard
  double leave_s = 1;            // for a call to end after its groups were ended; then on_stuck
  size_t remembered = 1024;      // calls a group
  bool full = false;             // every collective is compared, through the store, before its result is given
  // The first time that this rank's groups end by what was found: the cause, and the last calls as text. Any thread.
  std::function<void(const absl::Status&, const std::string& calls)> on_finding;
  FailureExplainer* explainer = nullptr;  // may be null
  // A call cannot be ended (Gloo): the process must leave. On a thread of the watch; need not return.
  std::function<void(const absl::Status&)> on_stuck;
};

// One thread makes the calls (begin, wait_begins, end, explain); any may call abort and ended.
class CallWatch {
 public:
  // `store`: of its own, and under the same names as the other ranks'.
  CallWatch(int64_t rank, int64_t world, std::unique_ptr<Store> store, const CheckOptions& options);
  // Tells the others that this rank has left. When they read of an error in this process, waits until they have.
  ~CallWatch();

  // `end_calls`: aborts the group; called at most once, from any thread, until `remove`.
  size_t add(const GroupSpec& group, std::function<void(const std::string& reason)> end_calls);
  void remove(size_t group);

  // The number of the call; or why groups have ended.
  absl::StatusOr<int64_t> begin(size_t group, const Call& call);
  void wait_begins(size_t group, int64_t number);
  void end(size_t group, int64_t number);
  CallRecord record(size_t group, int64_t number) const;
  // OK, or why groups have ended.
  absl::Status ended() const;
  // Ends all groups of this rank, and asks the others to do the same.
  void abort(const absl::Status& why);
  // A call has failed: asks the others for what they called. The better reason if there is one, else `failure`.
  absl::Status explain(const absl::Status& failure);
  // What this rank found wrong, for all: ends the groups, and gives it back.
  absl::Status find(const absl::Status& what);

  uint64_t digest() const;  // the sum of the groups' CallLog::digest
  RankReport report(size_t calls) const;

  void look();   // one look at the store
  void guard();  // what can be seen without it

 private:
  friend class FailureExplainer;
  struct Watched {
    CallLog log;
    std::function<void(const std::string&)> end_calls;  // empty: removed
  };
  struct Waiting {
    size_t group = 0;
    int64_t number = 0;
    int64_t since_ns = 0;
    bool waits_long = false;
  };

  // What is known of another rank's reports.
  struct Heard {
    int64_t number = -1;
    int64_t since_ns = 0;  // when it was first read; or when we began to ask
    int answers = 0;       // new ones since then
    bool has_left = false;
  };

  absl::Status look_at_store();
  absl::Status hear_verdict();
  absl::Status ask(bool due, const std::optional<std::string>& question);
  absl::Status read_reports();
  void judge();
  absl::Status find_silent(const RankReport& mine) const;
  absl::Status find_overdue() const;
  void set_ended(const absl::Status& why, bool found, bool tell_others);
  void linger();
  void say_goodbye();
  double waited_s() const;
  RankReport report_locked(size_t calls) const;
  RankReports all_reports(const RankReport& mine) const;
  int64_t now() const { return options_.clock->now_ns(); }
  void send_messages();
  void stand_guard();

  const int64_t rank_, world_;
  const CheckOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Watched> groups_;
  std::optional<Waiting> waiting_;
  absl::Status ended_;  // once it is an error it stays as it is
  int64_t ended_ns_ = 0;
  bool tell_verdict_ = false, stuck_called_ = false, stopping_ = false;
  bool explaining_ = false, ask_anew_ = false,
       judged_ = false;  // a call has failed; all others' answers say nothing about it
  int64_t look_began_ns_ = -1, store_gone_ns_ = -1;
  std::string store_error_;
  RankReports reports_;  // of the others, as last read

  std::mutex look_mutex_;  // what follows belongs to a look
  std::unique_ptr<Store> store_;
  std::string last_question_;
  int64_t questions_ = 0, told_ = 0;
  int64_t asking_since_ns_ = -1, next_question_ns_ = 0;
  std::map<int64_t, Heard> heard_;
  bool answered_ = false;  // by all others, since we began to ask

  std::thread messenger_, guard_;
};

}  // namespace parvl
