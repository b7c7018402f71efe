// Traces: which requests come when. A line is one request,
//   {"t": seconds, "images": [[w, h], ...], "text_tokens": n, "output_tokens": n}
// by its sizes alone, or with "messages" in place of images and text where its content is known.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

struct TraceImage {
  int64_t width = 0, height = 0;
};

struct TraceRequest {
  double t_s = 0;  // after the start of the trace
  std::vector<TraceImage> images;
  int64_t text_tokens = 0;
  int64_t output_tokens = 0;  // exactly so many, whatever the model would like
  std::string messages;       // "" or the JSON list, as it is sent
};

struct TraceLimits {
  size_t file_bytes = size_t{1} << 30;
  size_t line_bytes = 64u << 20;  // images inside "messages" make long lines
  size_t requests = 1'000'000;
  size_t images = 64;  // of one request
  int64_t image_side = 8192;
  int64_t tokens = 1'000'000;  // of text or output
  double seconds = 1e7;
};

// The lines of a trace, in the order of their times; blank lines do not count. Errors name the line as "NAME line 3".
absl::StatusOr<std::vector<TraceRequest>> parse_trace(std::string_view text, const std::string& name,
                                                      const TraceLimits& limits = {});
absl::StatusOr<std::vector<TraceRequest>> read_trace(const std::string& path, const TraceLimits& limits = {});

// One request out of "images=2x448x448,text=64,output=64": two images of 448 x 448. What is left out is 0, but output
// must be there.
absl::StatusOr<TraceRequest> parse_synthetic(const std::string& text, const TraceLimits& limits = {});

// `count` times of arrival, `rate` a second on average, whose gaps are exponentially distributed. rate > 0.
std::vector<double> poisson_times(size_t count, double rate, uint64_t seed);

}  // namespace parvl
