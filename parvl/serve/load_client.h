// A load test against an OpenAI-compatible server. In an open loop every request is sent at its time, whatever became
// of those before it: a server that falls behind gets no rest, as with real users. In a closed loop so many requests
// are always under way.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/serve/http_client.h"
#include "parvl/serve/load_content.h"
#include "parvl/serve/load_report.h"
#include "parvl/serve/load_server.h"

namespace parvl {

struct LoadTestOptions {
  HttpClient::Options http;
  std::string model;                  // "": the first that the server lists
  std::vector<LoadRequest> requests;  // sent in turn, again from the first after the last
  std::vector<double> due_s;          // one a request to send: seconds after the start, never falling
  size_t concurrency = 0;             // > 0: a closed loop, and of due_s only the length counts
  size_t max_open = 10'000;           // an open loop's requests under way; one more fails unsent
  uint64_t seed = 0;
  double repeat_images = 0;
  int stop_descriptor = -1;  // readable: end now (StopSignal::descriptor()); not owned
};

struct LoadResult {
  std::string model;
  double tokens_per_word = 0;       // as measured on the server; 0: no text had to be made
  std::vector<LoadRecord> records;  // of what was due before the end, in that order
  Reservoir itl_ms;
  ServerFigures server;  // from the server's metrics before and after; none of a test that was interrupted
};

// Runs the test on the calling thread (and one more that makes requests). Tells on standard error how far it is. An
// error is one of the questions before the test, the model's name say; what fails within it is in the records.
absl::StatusOr<LoadResult> run_load(LoadTestOptions options, const Clock& clock);

}  // namespace parvl
