// The OpenAI-compatible server. The socket listens before the model is loaded, so that probes are answered from the
// start.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/options.h"

namespace parvl {

class Server {
 public:
  using Loader = std::function<absl::StatusOr<std::unique_ptr<Engine>>()>;

  // Checks `options` and binds the port; errors say which flag to change. `clock` must outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> listen(ServeOptions options, const Clock& clock);
  ~Server();

  int port() const;
  std::string url() const;        // http://HOST:PORT
  std::string admin_url() const;  // likewise, of the admin port; "": there is none
  // Requests past admission and not yet over. Any thread.
  size_t admitted() const;

  // Serves until a shutdown, on the calling thread; once. `load` runs on a thread of its own; `on_ready` is called when
  // the model can answer. Returns the loader's error, or OK after a shutdown in which every request was finished or
  // cut.
  absl::Status run(const Loader& load, const std::function<void()>& on_ready);

  // Any thread: no new requests, the running ones may finish within shutdown_timeout, then run() returns.
  void shutdown();

  // After run(): the loader had not come back. The process should leave by _Exit, since the loader still uses its
  // statics.
  bool loader_abandoned() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
