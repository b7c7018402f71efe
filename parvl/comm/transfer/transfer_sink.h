// The receiving end of transfers: pulls what a handle names, through shared memory on one host and else over TCP.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_counters.h"
#include "parvl/comm/transfer/transfer_handle.h"

namespace parvl {

struct TransferSinkOptions {
  std::string name;                         // the instance that pulls, for the source's `fence`
  int64_t epoch = 0;                        // of its life
  std::string token;                        // the run's, as the source's
  const Clock* clock = nullptr;             // thread-safe; outlives this and its views
  std::optional<TransferLane> only;         // no other lane is used, however slow or broken this one is
  int64_t credit_bytes = int64_t{8} << 20;  // that a source may send over TCP before they are taken out
  double silence_s = 10;                    // a source that says nothing for so long is taken for gone
  int64_t max_bytes = int64_t{4} << 30;     // of an item that `pull` takes over TCP, into memory of its own
  // Mappings of sources' memory are kept for the next items in it: so many bytes (views count, but are never cut), and
  // so long after the last use. They cost address space, and memory only where the source has forgotten it.
  int64_t max_mapped_bytes = int64_t{4} << 30;
  double forget_s = 30;
};

// One item's tensors, to read. Shared memory: the source's own, which it keeps as it is until this is destroyed (so do
// that soon); TCP: a copy. One thread at a time; may outlive its sink.
class TransferView {
 public:
  TransferView();  // empty
  TransferView(TransferView&& other) noexcept;
  TransferView& operator=(TransferView&& other) noexcept;
  ~TransferView();  // lets go; never waits

  TransferLane lane() const { return lane_; }
  const std::vector<TransferTensor>& tensors() const { return tensors_; }
  // Of the tensor with this place in `tensors`, at a multiple of 64.
  const std::byte* data(size_t tensor) const { return base_ + tensors_[tensor].offset; }
  // Its place; nothing: no tensor of this name.
  std::optional<size_t> find(std::string_view name) const;

 private:
  friend class TransferSink;
  struct Hold;
  TransferLane lane_ = TransferLane::kTcp;
  std::vector<TransferTensor> tensors_;
  const std::byte* base_ = nullptr;
  std::unique_ptr<Hold> hold_;
};

class TransferPeers;
struct Deadline;

// Any thread may pull; each pull under way has a connection of its own, and some are kept for the next. Errors are
//   NotFound: the item was dropped, or its lease is over;
//   FailedPrecondition: the handle is of another epoch than the source, or this sink was fenced;
//   Unavailable: the source is gone, silent, or not reachable on the lanes that are allowed;
//   DataLoss: the checksum does not match;   DeadlineExceeded;   ResourceExhausted: too much is held already;
//   PermissionDenied: the token.
// Each may be tried again; the item stays under its lease.
class TransferSink {
 public:
  // Starts one thread, which notices sources that have gone and lets go of their memory.
  static absl::StatusOr<std::unique_ptr<TransferSink>> start(const TransferSinkOptions& options);
  ~TransferSink();  // after all pulls have ended

  absl::StatusOr<TransferView> pull(const TransferHandle& handle, double timeout_s);
  // Into memory of the caller's, one piece for each tensor of the handle, of its size (InvalidArgument else). Gives the
  // lane. After an error they hold anything.
  absl::StatusOr<TransferLane> pull_into(const TransferHandle& handle, absl::Span<const absl::Span<std::byte>> out,
                                         double timeout_s);

  TransferSinkCounters counters() const;

 private:
  using Outputs = absl::Span<const absl::Span<std::byte>>;
  explicit TransferSink(std::shared_ptr<TransferPeers> peers);
  absl::Status over_lanes(const TransferHandle& handle, const std::function<absl::Status(TransferLane)>& pull);
  absl::Status map_view(const TransferHandle& handle, const Deadline& deadline, TransferView& out);
  absl::Status copy_view(const TransferHandle& handle, const Deadline& deadline, TransferView& out);
  absl::Status copy_into(const TransferHandle& handle, Outputs out, const Deadline& deadline);
  absl::Status receive_into(const TransferHandle& handle, Outputs out, const Deadline& deadline);

  const std::shared_ptr<TransferPeers> peers_;
  const std::string host_;
};

}  // namespace parvl
