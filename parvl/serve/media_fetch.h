// Media by http and https URL. What a client names is fetched from where this server stands, so every address is
// checked before a connection is made to it.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/serve/options.h"

namespace parvl {

// Whether it begins as an http or https URL does.
bool is_web_url(std::string_view url);

// Fetches the items of one request, one after another, within its FetchPolicy::request_time. One thread; each request
// has its own. Blocks while it fetches; a stop through `stop` is heard within about a second.
class MediaFetcher {
 public:
  // `policy` must outlive it.
  explicit MediaFetcher(const MediaPolicy& policy, std::stop_token stop = {});

  // The body of what `url` names, after redirects. `name` is what errors call the item. Errors are answers' statuses:
  // 400 for a URL that is not allowed, here or where it is redirected to; 413 over policy.image.max_bytes; 422 for one
  // that cannot be fetched; 503 when stopped.
  absl::StatusOr<std::string> fetch(std::string_view url, const std::string& name);

 private:
  const MediaPolicy& policy_;
  const std::stop_token stop_;
  std::chrono::microseconds time_left_;  // for this and the items to come
};

// The hosts of a flag like --allowed-media-domains, each value of which may list several between commas, spelled as
// FetchPolicy wants them. InvalidArgument naming `flag` for what is no host name or address.
absl::StatusOr<std::vector<std::string>> parse_media_hosts(const std::string& flag,
                                                           const std::vector<std::string>& values);

}  // namespace parvl
