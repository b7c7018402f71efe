// A sink's connections to sources, and the memory of theirs that it has mapped. Only transfer_sink.cc uses it.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_slab.h"
#include "parvl/comm/transfer/transfer_socket.h"
#include "parvl/comm/transfer/transfer_wire.h"

namespace parvl {

// One connection. One pull at a time uses it; any thread lets go of what was pulled through it. It stays open as long
// as something that was pulled is held, since the source takes its end for the end of every hold.
class TransferLink {
 public:
  // `clock` outlives it. The source is taken for gone when it says nothing for `silence_s`.
  TransferLink(FileDescriptor socket, TransferLane lane, const Clock& clock, double silence_s)
      : lane(lane), socket_(std::move(socket)), clock_(clock), silence_ns_(static_cast<int64_t>(silence_s * 1e9)) {}

  absl::Status send(const TransferMessage& message, const Deadline& deadline);
  // With the descriptor that came with it, if one did.
  absl::StatusOr<TransferAnswer> receive_answer(const Deadline& deadline, FileDescriptor* descriptor);
  absl::Status receive(void* into, size_t bytes, const Deadline& deadline, FileDescriptor* descriptor = nullptr);
  // Never waits: what the source does not take now goes before the next message.
  void release(TransferId item, bool good);

  const TransferLane lane;
  std::atomic<int64_t> holds{0};
  std::atomic<bool> dead{false};  // nothing more is pulled through it
  const FileDescriptor& socket() const { return socket_; }

 private:
  absl::Status wait(short events, const Deadline& deadline) const;
  // As much of `unsent_` as goes now; whether that was all. With the mutex.
  absl::StatusOr<bool> flush();

  const FileDescriptor socket_;
  const Clock& clock_;
  const int64_t silence_ns_;
  std::mutex write_mutex_;
  std::string unsent_;
};

// The sources that a sink knows. Any thread.
class TransferPeers {
 public:
  // One life of a source, on one lane.
  struct Key {
    TransferLane lane;
    std::string address, source;
    int64_t epoch;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Lease {
    std::shared_ptr<TransferLink> link;
    bool is_new = false;
  };

  explicit TransferPeers(const TransferSinkOptions& options);
  ~TransferPeers();
  absl::Status start_watching();

  const TransferSinkOptions options;
  // A connection that nobody uses; or a new one, always when `fresh`.
  absl::StatusOr<Lease> take(const Key& key, bool fresh, const Deadline& deadline);
  void give_back(const Key& key, std::shared_ptr<TransferLink> link);
  // What was mapped of this slab, or null.
  std::shared_ptr<SharedSlab> find_mapping(const Key& key, int64_t slab);
  void keep_mapping(const Key& key, int64_t slab, std::shared_ptr<SharedSlab> mapping);

  void count(const std::function<void(TransferSinkCounters&)>& change);
  TransferSinkCounters counters() const;

 private:
  struct Mapping {
    std::shared_ptr<SharedSlab> memory;
    int64_t used_ns = 0;
  };
  struct Peer {
    std::vector<std::weak_ptr<TransferLink>> links;
    std::vector<std::shared_ptr<TransferLink>> idle;
    std::map<int64_t, Mapping> mappings;  // by slab
  };

  absl::StatusOr<std::shared_ptr<TransferLink>> connect(const Key& key, const Deadline& deadline) const;
  void add(const Key& key, const std::shared_ptr<TransferLink>& link);
  void watch();
  void wake() const;
  // With the mutex.
  void forget_dead();
  void forget_unused(int64_t now_ns);
  void forget_beyond_limit();
  bool has_mappings() const;

  mutable std::mutex mutex_;
  std::map<Key, Peer> peers_;
  std::map<int64_t, std::weak_ptr<TransferLink>> watched_;
  int64_t next_watched_ = 1;
  bool stopping_ = false;
  TransferSinkCounters counters_;
  FileDescriptor epoll_, wake_;
  std::thread thread_;
};

}  // namespace parvl
