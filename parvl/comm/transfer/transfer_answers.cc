// What a source answers, connection by connection. An error of these functions ends the connection: Unavailable when
// the other side has gone, anything else when it broke the rules.
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "parvl/comm/transfer/transfer_server.h"

namespace parvl {
namespace {

constexpr size_t kReadBytes = 4096;
constexpr size_t kMaxUnsentBytes = 16 << 10;  // answers that a reader does not take
constexpr int64_t kTurnBytes = 1 << 20;       // sent to one reader before the next has its turn

absl::Status gone() { return absl::UnavailableError("the reader has closed its connection"); }

}  // namespace

absl::Status TransferServer::read_from(ReaderId id, Connection& connection) {
  char bytes[kReadBytes];
  const int64_t got = receive_some(connection.socket.get(), bytes, sizeof bytes);
  if (got < 0) return errno == EAGAIN ? absl::OkStatus() : gone();
  if (got == 0) return gone();
  if (connection.leaving) return absl::OkStatus();
  if (connection.greeted) connection.moved_ns = now();
  connection.in.append({bytes, static_cast<size_t>(got)});
  for (;;) {
    PARVL_ASSIGN_OR_RETURN(const std::optional<TransferMessage> message, connection.in.next());
    if (!message) return absl::OkStatus();
    PARVL_RETURN_IF_ERROR(handle(id, connection, *message));
    if (connection.leaving) return absl::OkStatus();
  }
}

absl::Status TransferServer::handle(ReaderId id, Connection& connection, const TransferMessage& message) {
  const auto* const hello = std::get_if<TransferHello>(&message);
  if (connection.greeted == (hello != nullptr)) return invalid("a Hello comes first, and once");
  if (hello != nullptr) return on_hello(id, connection, *hello);
  if (const auto* const pull = std::get_if<TransferPull>(&message)) return on_pull(id, connection, *pull);
  if (const auto* const release = std::get_if<TransferRelease>(&message)) return on_release(id, connection, *release);
  if (const auto* const credit = std::get_if<TransferCredit>(&message)) return on_credit(connection, *credit);
  return invalid("a source is not answered");
}

absl::Status TransferServer::refusal(ReaderId id, const Connection& connection, const TransferHello& hello) {
  const TransferSourceOptions& options = state_->options;
  std::lock_guard lock(state_->mutex);
  TransferSourceCounters& counts = state_->ledger.counts();
  if (!same_token(hello.token, options.token)) {
    ++counts.strangers;
    return absl::PermissionDeniedError("that is not the token of this run");
  }
  if (hello.version != kTransferVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the source speaks version ", kTransferVersion, ", the reader ", hello.version));
  }
  if (hello.source != options.name) {
    ++counts.strangers;
    return absl::FailedPreconditionError(absl::StrCat("here is ", options.name, ", not ", hello.source));
  }
  if (hello.source_epoch != options.epoch) {
    ++counts.stale;
    return absl::FailedPreconditionError(absl::StrCat("the handle is of epoch ", hello.source_epoch, "; ", options.name,
                                                      " is in epoch ", options.epoch));
  }
  const absl::Status admitted = state_->ledger.admit(id, {hello.reader, hello.reader_epoch, connection.lane});
  if (!admitted.ok()) ++counts.stale;
  return admitted;
}

absl::Status TransferServer::on_hello(ReaderId id, Connection& connection, const TransferHello& hello) {
  if (hello.lane != connection.lane) return invalid("a Hello for the other lane");
  const absl::Status refused = refusal(id, connection, hello);
  TransferAnswer reply;
  reply.code = refused.code();
  reply.message = std::string(refused.message());
  connection.greeted = refused.ok();
  connection.leaving = !refused.ok();
  return answer(connection, reply);
}

absl::Status TransferServer::on_pull(ReaderId id, Connection& connection, const TransferPull& pull) {
  const bool by_tcp = connection.lane == TransferLane::kTcp;
  if (connection.sending) return invalid("a Pull before the end of the one before it");
  if (by_tcp && (pull.credit < 0 || pull.credit > state_->options.max_credit_bytes)) {
    return invalid("a credit of ", pull.credit, " bytes");
  }
  absl::StatusOr<TransferLedger::Hold> hold = absl::InternalError("");
  {
    std::lock_guard lock(state_->mutex);
    hold = state_->ledger.acquire(id, pull.item, now());
  }
  TransferAnswer reply;
  if (!hold.ok()) {
    reply.code = hold.status().code();
    reply.message = std::string(hold.status().message());
    return answer(connection, reply);
  }
  reply.slab = hold->slab;
  reply.slab_bytes = hold->memory->bytes();
  reply.payload_bytes = hold->content->payload_bytes;
  if (by_tcp) {
    connection.sending = Sending{pull.item, std::move(*hold)};
    connection.credit = pull.credit;
    return answer(connection, reply);
  }
  const int descriptor = hold->memory->read_only_descriptor();
  return answer(connection, reply, pull.wants_descriptor ? &descriptor : nullptr);
}

absl::Status TransferServer::on_release(ReaderId id, Connection& connection, const TransferRelease& release) {
  if (connection.lane == TransferLane::kTcp) {
    if (!connection.sending || connection.sending->item != release.item ||
        connection.sending->part < connection.sending->hold.content->parts.size()) {
      return invalid("the release of what was not sent");
    }
    connection.sending.reset();
  }
  std::lock_guard lock(state_->mutex);
  if (!state_->ledger.release(id, release.item, release.good, now())) return invalid("the release of what it has not");
  state_->changed();
  return absl::OkStatus();
}

absl::Status TransferServer::on_credit(Connection& connection, const TransferCredit& credit) {
  if (!connection.sending || credit.bytes <= 0 || credit.bytes > state_->options.max_credit_bytes - connection.credit) {
    return invalid("a credit of ", credit.bytes, " bytes");
  }
  connection.credit += credit.bytes;
  return absl::OkStatus();
}

// With a descriptor it is sent now or not at all: on one host a reader that waits for an answer has room for it.
absl::Status TransferServer::answer(Connection& connection, const TransferAnswer& answer, const int* descriptor) {
  const std::string bytes = encode_message(answer);
  if (descriptor == nullptr) {
    connection.out += bytes;
    if (connection.out.size() > kMaxUnsentBytes) return invalid("the reader takes no answers");
    return absl::OkStatus();
  }
  PARVL_RETURN_IF_ERROR(write_to(connection));
  if (!connection.out.empty()) return invalid("the reader takes no answers");
  const int64_t sent = send_some(connection.socket.get(), bytes, descriptor);
  if (sent == static_cast<int64_t>(bytes.size())) return absl::OkStatus();
  return sent < 0 && errno != EAGAIN ? gone() : invalid("the reader takes no answers");
}

absl::Status TransferServer::write_to(Connection& connection) {
  while (!connection.out.empty()) {
    const int64_t sent = send_some(connection.socket.get(), connection.out);
    if (sent < 0) return errno == EAGAIN ? absl::OkStatus() : gone();
    connection.out.erase(0, static_cast<size_t>(sent));
    connection.moved_ns = now();
  }
  return connection.sending ? send_payload(connection) : absl::OkStatus();
}

// Straight from the item's memory, as far as the credit goes: nothing is queued here.
absl::Status TransferServer::send_payload(Connection& connection) {
  Sending& sending = *connection.sending;
  const auto& parts = sending.hold.content->parts;
  int64_t turn = 0;
  while (sending.part < parts.size()) {
    const TransferContent::Part& part = parts[sending.part];
    if (sending.done == part.bytes) {
      ++sending.part;
      sending.done = 0;
      continue;
    }
    if (turn >= kTurnBytes || connection.credit == 0) break;
    const int64_t size = std::min({part.bytes - sending.done, connection.credit, kTurnBytes - turn});
    const char* const from = reinterpret_cast<const char*>(sending.hold.memory->data()) + part.offset + sending.done;
    const int64_t sent = send_some(connection.socket.get(), {from, static_cast<size_t>(size)});
    if (sent < 0 && errno != EAGAIN) return gone();
    if (sent < 0) break;
    turn += sent;
    sending.done += sent;
    connection.credit -= sent;
  }
  if (turn == 0) return absl::OkStatus();
  connection.moved_ns = now();
  std::lock_guard lock(state_->mutex);
  state_->ledger.counts().tcp.bytes += turn;
  if (connection.credit == 0 && sending.part < parts.size()) ++state_->ledger.counts().credit_waits;
  return absl::OkStatus();
}

}  // namespace parvl
