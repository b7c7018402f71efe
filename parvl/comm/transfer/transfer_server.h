// A source's thread: takes connections, answers them and sends over TCP. Only transfer_source.cc uses it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "parvl/comm/transfer/transfer_ledger.h"
#include "parvl/comm/transfer/transfer_socket.h"
#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/comm/transfer/transfer_wire.h"

namespace parvl {

// What the callers' threads and the source's share.
struct TransferSourceState {
  explicit TransferSourceState(const TransferSourceOptions& options);
  // With the mutex, after the ledger has changed: tells those that wait for room, and wakes the thread when it would
  // sleep too long.
  void changed();
  void wake() const;

  const TransferSourceOptions options;
  FileDescriptor wake_event;
  std::string local_address, tcp_address, host;

  mutable std::mutex mutex;
  std::condition_variable room;
  TransferLedger ledger;
  std::vector<ReaderId> to_close;  // cut off; their connections are still open
  int64_t wakes_at_ns = 0;         // the thread looks by itself then
  bool starved = false;            // a `reserve` failed since on_room was called
  bool tell_room = false;
  bool stopping = false;
};

class TransferServer {
 public:
  // Listens, and sets the addresses in `state`.
  static absl::StatusOr<std::unique_ptr<TransferServer>> start(std::shared_ptr<TransferSourceState> state);
  ~TransferServer();

 private:
  struct Sending {
    TransferId item;
    TransferLedger::Hold hold;
    size_t part = 0;
    int64_t done = 0;  // of the part
  };
  struct Connection {
    FileDescriptor socket;
    TransferLane lane = TransferLane::kSharedMemory;
    bool greeted = false;
    bool leaving = false;  // closed once `out` is sent
    MessageReader in;
    std::string out;
    std::optional<Sending> sending;  // TCP: until the reader releases it
    int64_t credit = 0;
    int64_t moved_ns = 0;  // when something last came or went
    uint32_t events = 0;   // that epoll waits for
  };
  // How a connection ends, as far as its memory goes.
  enum class End { kGone, kMayStillRead };

  explicit TransferServer(std::shared_ptr<TransferSourceState> state);
  void run();
  int wait_ms();
  void accept_from(const FileDescriptor& listener, TransferLane lane);
  bool make_place();
  void watch_listeners(bool on);
  void serve(ReaderId id, Connection& connection);
  absl::Status read_from(ReaderId id, Connection& connection);
  absl::Status handle(ReaderId id, Connection& connection, const TransferMessage& message);
  absl::Status on_hello(ReaderId id, Connection& connection, const TransferHello& hello);
  absl::Status on_pull(ReaderId id, Connection& connection, const TransferPull& pull);
  absl::Status on_release(ReaderId id, Connection& connection, const TransferRelease& release);
  absl::Status on_credit(Connection& connection, const TransferCredit& credit);
  absl::Status refusal(ReaderId id, const Connection& connection, const TransferHello& hello);
  absl::Status answer(Connection& connection, const TransferAnswer& answer, const int* descriptor = nullptr);
  absl::Status write_to(Connection& connection);
  absl::Status send_payload(Connection& connection);
  void set_events(ReaderId id, Connection& connection);
  bool is_silent(const Connection& connection, int64_t now_ns) const;
  bool can_be_silent(const Connection& connection) const;
  void end(ReaderId id, End how);
  void end_overdue();
  void count(int64_t TransferSourceCounters::*counter);
  int64_t now() const { return state_->options.clock->now_ns(); }

  const std::shared_ptr<TransferSourceState> state_;
  FileDescriptor epoll_, local_, tcp_;
  std::map<ReaderId, Connection> connections_;
  int64_t next_reader_ = 16;     // below: what else epoll waits for
  int64_t listen_again_ns_ = 0;  // 0: it listens
  std::thread thread_;
};

}  // namespace parvl
