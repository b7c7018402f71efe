// The gateway's end of the streams of its instances. Hides gRPC.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "parvl/base/status.h"
#include "parvl/serve/pools/stream_id.h"
#include "proto/instance.pb.h"

namespace parvl {

inline constexpr int kMaxMessageBytes = 512 << 20;  // one that is larger would end its stream

class StreamServer {
 public:
  struct Handlers {
    // On gRPC's threads, in order for each stream; must not block. After `closed` nothing comes of that stream.
    std::function<void(StreamId, wire::FromInstance)> message;
    std::function<void(StreamId)> closed;
  };

  // Listens on a free port of the loopback; who attaches must show `token`. Unavailable when it cannot.
  static absl::StatusOr<std::unique_ptr<StreamServer>> listen(const std::string& token, Handlers handlers);
  // Closes every stream, and returns when no handler runs any more.
  ~StreamServer();

  const std::string& address() const;  // HOST:PORT

  // Any thread. What is told while a message is being sent goes in the next one, all of it. Of a closed stream: no
  // effect.
  void send(StreamId stream, wire::Command command);
  // Any thread. Whatever the other side does, nothing more comes of it but `closed`.
  void close(StreamId stream);

 private:
  class Impl;
  explicit StreamServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
