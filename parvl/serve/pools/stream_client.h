// An instance's end of its stream to the gateway. Hides gRPC.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/status.h"
#include "proto/instance.pb.h"

namespace parvl {

class StreamClient {
 public:
  struct Handlers {
    std::function<void(const wire::ToInstance&)> message;  // on gRPC's threads, in order; must not block
    std::function<void(const absl::Status&)> closed;       // once and last: the gateway is not there any more
  };

  // Attaches to the gateway at `address` as this instance of this epoch. A gateway that is not there shows in `closed`.
  static std::unique_ptr<StreamClient> attach(const std::string& address, const std::string& token, int64_t instance,
                                              int64_t epoch, Handlers handlers);
  // Ends the stream, and returns when no handler runs any more.
  ~StreamClient();

  // Any thread. Said with the next flush, in order.
  void add(wire::Said said);
  void add(std::initializer_list<wire::Said> said);  // none of them without the others
  // Any thread. Sends what was added, in one message; what is added while one is being sent goes in the next.
  void flush();
  void flush(const wire::Counts& counts);

 private:
  class Impl;
  explicit StreamClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
