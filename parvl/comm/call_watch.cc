#include "parvl/comm/call_watch.h"

#include <absl/strings/str_format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/comm/call_judge.h"
#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

constexpr size_t kToldCalls = 16;  // of each group, while ranks look for what is wrong
constexpr size_t kShownCalls = 16;
constexpr double kEagerSeconds = 5;  // then questions become rare

// A copy for each thread: the counter of those that share a status is inside a library that ThreadSanitizer does not
// see.
absl::Status own(const absl::Status& status) { return absl::Status(status.code(), status.message()); }

std::string key_of(int64_t rank) { return absl::StrCat("report/", rank); }

std::chrono::duration<double> seconds(double value) { return std::chrono::duration<double>(value); }

}  // namespace

absl::Status FailureExplainer::explain(const absl::Status& failure) {
  std::lock_guard lock(mutex_);
  if (watch_ == nullptr) return failure;
  const absl::Status out = watch_->explain(failure);
  watch_->linger();
  return out;
}

CallWatch::CallWatch(int64_t rank, int64_t world, std::unique_ptr<Store> store, const CheckOptions& options)
    : rank_(rank), world_(world), options_(options), store_(std::move(store)) {
  PARVL_CHECK(options_.clock != nullptr, "watching calls needs a clock");
  if (options_.explainer != nullptr) {
    std::lock_guard lock(options_.explainer->mutex_);
    options_.explainer->watch_ = this;
  }
  if (options_.beat_s <= 0 || world_ == 1) return;
  messenger_ = std::thread([this] { send_messages(); });
  guard_ = std::thread([this] { stand_guard(); });
}

CallWatch::~CallWatch() {
  if (options_.explainer != nullptr) {
    std::lock_guard lock(options_.explainer->mutex_);
    if (options_.explainer->watch_ == this) options_.explainer->watch_ = nullptr;
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (messenger_.joinable()) messenger_.join();
  if (guard_.joinable()) guard_.join();
  if (world_ > 1) say_goodbye();
}

void CallWatch::send_messages() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    look();
    lock.lock();
    const bool explaining = explaining_;
    changed_.wait_for(lock, seconds(explaining ? std::min(options_.beat_s, 0.02) : options_.beat_s), [&] {
      return stopping_ || (store_gone_ns_ < 0 && (tell_verdict_ || explaining_ != explaining));
    });
  }
}

void CallWatch::stand_guard() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    guard();
    lock.lock();
    changed_.wait_for(lock, seconds(options_.beat_s), [this] { return stopping_; });
  }
}

void CallWatch::linger() {
  if (store_gone_ns_ >= 0 || !store_->ends_with_this_process()) return;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, seconds(options_.leave_s), [] { return false; });
}

void CallWatch::say_goodbye() {
  look();  // tells what is still to be told
  if (!ended().ok()) return linger();
  RankReport mine = report(0);
  mine.number = ++told_;
  mine.has_left = true;
  if (store_gone_ns_ >= 0 || !store_->set(key_of(rank_), to_text(mine)).ok()) return;
  if (!store_->ends_with_this_process()) return;
  // The others still read here until each has left too.
  const int64_t until = now() + static_cast<int64_t>(options_.leave_s * 1e9);
  for (bool all_left = false; !all_left && now() < until;) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, seconds(0.01), [] { return false; });
    lock.unlock();
    if (!read_reports().ok()) return;
    all_left = true;
    for (int64_t rank = 0; rank < world_; ++rank) all_left = all_left && (rank == rank_ || reports_[rank].has_left);
  }
}

size_t CallWatch::add(const GroupSpec& group, std::function<void(const std::string& reason)> end_calls) {
  std::lock_guard lock(mutex_);
  groups_.push_back({CallLog(group, rank_, options_.remembered), std::move(end_calls)});
  return groups_.size() - 1;
}

void CallWatch::remove(size_t group) {
  std::lock_guard lock(mutex_);
  groups_[group].end_calls = {};
}

absl::StatusOr<int64_t> CallWatch::begin(size_t group, const Call& call) {
  const int64_t when = now();
  std::lock_guard lock(mutex_);
  if (!ended_.ok()) return own(ended_);
  return groups_[group].log.begin(call, CommSite::current(), when);
}

void CallWatch::wait_begins(size_t group, int64_t number) {
  const int64_t when = now();
  std::lock_guard lock(mutex_);
  waiting_ = {group, number, when, CommSite::waits_long()};
}

void CallWatch::end(size_t group, int64_t number) {
  const int64_t when = now();
  std::lock_guard lock(mutex_);
  groups_[group].log.end(number, when);
  waiting_.reset();
}

CallRecord CallWatch::record(size_t group, int64_t number) const {
  std::lock_guard lock(mutex_);
  const CallRecord* found = groups_[group].log.find(number);
  return found == nullptr ? CallRecord() : *found;
}

absl::Status CallWatch::ended() const {
  std::lock_guard lock(mutex_);
  return own(ended_);
}

void CallWatch::abort(const absl::Status& why) { set_ended(why, /*found=*/false, /*tell_others=*/true); }

absl::Status CallWatch::find(const absl::Status& what) {
  set_ended(what, /*found=*/true, /*tell_others=*/true);
  return ended();
}

absl::Status CallWatch::explain(const absl::Status& failure) {
  std::unique_lock lock(mutex_);
  if (!ended_.ok()) return own(ended_);
  explaining_ = true;
  ask_anew_ = messenger_.joinable();
  judged_ = false;
  changed_.notify_all();
  lock.unlock();
  if (!messenger_.joinable()) look();
  lock.lock();
  if (messenger_.joinable()) {
    changed_.wait_for(lock, seconds(2 * (options_.patience_s + options_.beat_s)),
                      [this] { return !ended_.ok() || judged_ || store_gone_ns_ >= 0; });
  }
  explaining_ = false;
  return ended_.ok() ? failure : own(ended_);
}

// Under the mutex, so that no group goes while it is ended.
void CallWatch::set_ended(const absl::Status& why, bool found, bool tell_others) {
  std::string calls;
  {
    std::lock_guard lock(mutex_);
    if (!ended_.ok()) return;
    ended_ = own(why);
    ended_ns_ = now();
    tell_verdict_ = tell_others;
    if (found && options_.on_finding) calls = situation(report_locked(kShownCalls), reports_, world_, now());
    for (Watched& group : groups_) {
      if (group.end_calls) group.end_calls(std::string(why.message()));
    }
    changed_.notify_all();
  }
  if (found && options_.on_finding) options_.on_finding(own(why), calls);
}

uint64_t CallWatch::digest() const {
  std::lock_guard lock(mutex_);
  uint64_t out = 0;
  for (const Watched& group : groups_) out += group.log.digest();
  return out;
}

double CallWatch::waited_s() const {
  return waiting_.has_value() ? static_cast<double>(now() - waiting_->since_ns) * 1e-9 : 0;
}

RankReport CallWatch::report(size_t calls) const {
  std::lock_guard lock(mutex_);
  return report_locked(calls);
}

RankReport CallWatch::report_locked(size_t calls) const {
  RankReport out;
  out.rank = rank_;
  for (const Watched& group : groups_) out.groups.push_back(report_of(group.log, calls));
  if (!waiting_.has_value()) return out;
  const CallLog& log = groups_[waiting_->group].log;
  const CallRecord* call = log.find(waiting_->number);
  if (call != nullptr) out.waiting = {log.group().name, *call, waited_s()};
  return out;
}

RankReports CallWatch::all_reports(const RankReport& mine) const {
  RankReports out = reports_;
  out[rank_] = mine;
  return out;
}

void CallWatch::look() {
  std::lock_guard one(look_mutex_);
  {
    std::lock_guard lock(mutex_);
    // Once all is told the store may go with the process that holds it.
    if (store_gone_ns_ >= 0 || (!ended_.ok() && !tell_verdict_)) return;
    look_began_ns_ = now();
  }
  const absl::Status looked = look_at_store();
  std::lock_guard lock(mutex_);
  look_began_ns_ = -1;
  if (looked.ok()) return;
  store_gone_ns_ = now();
  store_error_ = std::string(looked.message());
  changed_.notify_all();
}

absl::Status CallWatch::look_at_store() {
  PARVL_RETURN_IF_ERROR(hear_verdict());
  PARVL_ASSIGN_OR_RETURN(const std::optional<std::string> question, store_->look("question"));
  bool stuck = false;
  {
    std::lock_guard lock(mutex_);
    stuck = ended_.ok() && (explaining_ || waited_s() > options_.patience_s);
    if (std::exchange(ask_anew_, false)) asking_since_ns_ = -1;
  }
  if (!stuck) {
    asking_since_ns_ = -1;
  } else if (asking_since_ns_ < 0) {
    asking_since_ns_ = now();
    next_question_ns_ = now();
    for (int64_t rank = 0; rank < world_; ++rank) heard_[rank] = {heard_[rank].number, now(), 0, heard_[rank].has_left};
  }
  const bool due = stuck && now() >= next_question_ns_;
  PARVL_RETURN_IF_ERROR(ask(due, question));
  if (!due) return absl::OkStatus();
  const double since_s = static_cast<double>(now() - asking_since_ns_) * 1e-9;
  const double pause_s =
      since_s < kEagerSeconds ? 0 : std::min({kEagerSeconds, options_.silent_s / 4, options_.deadline_s / 4});
  next_question_ns_ = now() + static_cast<int64_t>(pause_s * 1e9);
  PARVL_RETURN_IF_ERROR(read_reports());
  judge();
  return absl::OkStatus();
}

// What another rank has found, or what this one has to tell.
absl::Status CallWatch::hear_verdict() {
  PARVL_ASSIGN_OR_RETURN(const std::optional<std::string> verdict, store_->look("verdict"));
  if (verdict.has_value()) {
    const absl::Status told = parse_status(*verdict);
    set_ended(told, /*found=*/!absl::IsAborted(told), /*tell_others=*/false);
  }
  std::string mine;
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(tell_verdict_, false) || verdict.has_value()) return absl::OkStatus();
    mine = to_text(ended_);
  }
  return store_->set("verdict", mine);
}

// A new question is answered with a report; whoever asks one tells where it is itself.
absl::Status CallWatch::ask(bool due, const std::optional<std::string>& question) {
  const bool asked = question.has_value() && *question != last_question_;
  if (!due && !asked) return absl::OkStatus();
  last_question_ = due ? absl::StrCat(rank_, ".", ++questions_) : *question;
  RankReport mine = report(kToldCalls);
  mine.number = ++told_;
  PARVL_RETURN_IF_ERROR(store_->set(key_of(rank_), to_text(mine)));
  return due ? store_->set("question", last_question_) : absl::OkStatus();
}

absl::Status CallWatch::read_reports() {
  bool all_answered = true;
  for (int64_t rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    Heard& heard = heard_[rank];
    PARVL_ASSIGN_OR_RETURN(const std::optional<std::string> text, store_->look(key_of(rank)));
    if (text.has_value()) {
      PARVL_ASSIGN_OR_RETURN(RankReport report, parse_report(*text));
      if (report.number != heard.number) heard = {report.number, now(), heard.answers + 1, report.has_left};
      std::lock_guard lock(mutex_);
      reports_[rank] = std::move(report);
    }
    // The first may be older than the question.
    all_answered = all_answered && (heard.answers > 1 || heard.has_left);
  }
  std::lock_guard lock(mutex_);
  answered_ = all_answered;
  return absl::OkStatus();
}

void CallWatch::judge() {
  RankReport mine;
  RankReports all;
  {
    std::lock_guard lock(mutex_);
    mine = report_locked(kToldCalls);
    all = all_reports(mine);
  }
  // Two suffice for a finding, but only all show which of them is unlike the others.
  const double asked_s = static_cast<double>(now() - asking_since_ns_) * 1e-9;
  if (!answered_ && asked_s < options_.patience_s) return;
  absl::Status found = find_mismatch(all);
  if (found.ok()) found = find_deadlock(all);
  if (found.ok()) found = find_standstill(all, world_);
  if (found.ok()) found = find_silent(mine);
  if (!found.ok()) return set_ended(found, /*found=*/true, /*tell_others=*/true);
  // Who has answered twice since has told before what it has found itself.
  if (!hear_verdict().ok()) return;
  std::lock_guard lock(mutex_);
  judged_ = judged_ || (explaining_ && answered_);
  if (judged_) changed_.notify_all();
}

absl::Status CallWatch::find_silent(const RankReport& mine) const {
  for (const int64_t rank : awaited_ranks(mine, reports_)) {
    const double silent_s = static_cast<double>(now() - heard_.at(rank).since_ns) * 1e-9;
    if (silent_s <= options_.silent_s) continue;
    return absl::DeadlineExceededError(
        absl::StrFormat("rank %d has given no sign of life for %.0f s, while rank %d waits for it in %s; its process "
                        "was stopped, or its "
                        "machine is lost",
                        rank, silent_s, rank_, describe(mine.waiting->group, mine.waiting->call)));
  }
  return absl::OkStatus();
}

void CallWatch::guard() {
  absl::Status overdue, stuck;
  {
    std::lock_guard lock(mutex_);
    if (!waiting_.has_value()) return;
    if (ended_.ok()) {
      overdue = find_overdue();
    } else if (!stuck_called_ && static_cast<double>(now() - ended_ns_) * 1e-9 > options_.leave_s) {
      stuck_called_ = true;
      stuck = own(ended_);
    }
  }
  if (!overdue.ok()) set_ended(overdue, /*found=*/true, /*tell_others=*/true);
  if (!stuck.ok() && options_.on_stuck) options_.on_stuck(stuck);
}

// By what is known without the store.
absl::Status CallWatch::find_overdue() const {
  const RankReport mine = report_locked(kToldCalls);
  if (!mine.waiting.has_value()) return absl::OkStatus();
  const std::string call = describe(mine.waiting->group, mine.waiting->call);
  const double waited = waited_s();
  const auto over = [&](int64_t since_ns) {
    return since_ns >= 0 && static_cast<double>(now() - since_ns) * 1e-9 > options_.silent_s;
  };
  if (waited > options_.silent_s && (over(look_began_ns_) || over(store_gone_ns_))) {
    const std::string why = store_gone_ns_ >= 0 ? absl::StrCat("is gone (", store_error_, ")") : "does not answer";
    return absl::DeadlineExceededError(
        absl::StrCat(store_->where(), " ", why, ", while rank ", rank_, " waits in ", call,
                     "; the process that holds it was stopped or has ended, or its machine is lost"));
  }
  if (waiting_->waits_long || waited <= options_.deadline_s) return absl::OkStatus();
  const RankReports all = all_reports(mine);
  std::string who;
  for (const int64_t rank : awaited_ranks(mine, all)) absl::StrAppend(&who, "; missing: ", position(rank, all));
  if (who.empty()) who = "; all ranks have come, but it does not end";
  return absl::DeadlineExceededError(
      absl::StrCat(call, " of rank ", rank_, " was not done within ", options_.deadline_s, " s", who));
}

}  // namespace parvl
