// What an operator can set about serving; every limit that a client can run into stands here.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parvl/base/timeline.h"
#include "parvl/elastic/modality_queue.h"
#include "parvl/media/image_source.h"

namespace parvl {

class FleetView;

struct HttpLimits {
  size_t header_bytes = 16u << 10;
  size_t body_bytes = 64u << 20;
  size_t bodies_in_flight_bytes = 512u << 20;    // of all together, from arrival to answer; small ones aside
  size_t connections = 1024;                     // open at once; one more is answered 503 and closed
  std::chrono::milliseconds idle{75'000};        // between requests on one connection
  std::chrono::milliseconds header{10'000};      // from a request's first byte to the end of its headers
  std::chrono::milliseconds body_pause{20'000};  // without one more byte of a body
  std::chrono::milliseconds body_total{300'000};
  std::chrono::milliseconds write{30'000};  // for a client to take what was sent
  std::chrono::milliseconds linger{3'000};  // after the last answer, for a client that still sends
};

// http and https URLs of media. Hosts are spelled as parse_media_hosts() does.
struct FetchPolicy {
  std::vector<std::string> domains;                // the only hosts that may be named; empty: any
  std::vector<std::string> private_hosts;          // hosts that may have an address that is not public
  std::chrono::milliseconds connect_time{5'000};   // to resolve a host and connect to it
  std::chrono::milliseconds item_time{10'000};     // for an item, with its redirects
  std::chrono::milliseconds request_time{30'000};  // for all items of a request
  int max_redirects = 5;
  std::string user_agent = "parvl";
};

struct MediaPolicy {
  std::string local_path;  // file:// URLs may name files under this folder; "": none
  ImageLimits image;
  FetchPolicy fetch;
  int64_t max_images = 16;  // a request
  // Where pictures are decoded; never null.
  std::shared_ptr<ImageSource> images = std::make_shared<LocalImages>();
};

constexpr int64_t kQueueTokens = 16;

// Of the requests of one kind that wait, when an allocation says so.
struct QueueOptions {
  std::optional<int64_t> limit;                           // choices; else max_queue
  double share = 1;                                       // of turns, relative to the other kinds
  std::optional<std::chrono::duration<double>> deadline;  // after its arrival; earlier ones go first within the kind
};

// The admin port: status, the dashboard, operations.
struct AdminOptions {
  std::string host = "127.0.0.1";
  int port = 0;                               // 0: any free one
  std::map<std::string, std::string> tokens;  // by role: viewer, operator, approver; empty: none is asked for
  // How refusals name the two: where they stand in a file.
  std::string host_where = "admin.host", port_where = "admin.port";
  double window_s = 10;  // that latencies and busy shares are of
};

struct ServeOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                        // 0: any free one
  std::vector<std::string> served_names;  // the first one answers when a request names none
  std::string model_dir;
  std::string version;
  std::vector<std::string> api_keys;  // empty: no key is asked for
  int64_t max_queue = 64;             // choices that wait, of each kind of request; the running ones not counted
  std::array<QueueOptions, kQueueNames.size()> queues = {};
  int64_t queue_limit(size_t kind) const { return queues[kind].limit.value_or(max_queue); }
  int64_t max_queue_tokens = 0;  // prompt tokens of all that are past the queue; 0: kQueueTokens times the KV memory
  std::chrono::milliseconds queue_timeout{300'000};      // for a request to get its turn; 0: without end
  std::chrono::milliseconds request_timeout{3'600'000};  // from its arrival to the end of its answer; 0: without end
  std::chrono::milliseconds shutdown_timeout{30'000};
  MediaPolicy media;
  HttpLimits http;
  uint64_t seed = 0;  // of request ids, and of sampling where a request gives no seed; should differ at each start
  bool log_requests = false;  // a line a request, without its content
  // Where requests are shown, and what /start_profile and /stop_profile start and stop; null: there are no such routes.
  std::shared_ptr<Timeline> timeline;
  std::shared_ptr<FleetView> fleet;   // what runs behind the server; null: this process alone
  std::optional<AdminOptions> admin;  // none: no such port; only with a fleet
  int stop_descriptor = -1;           // readable: shut down (StopSignal::descriptor()); not owned
};

}  // namespace parvl
