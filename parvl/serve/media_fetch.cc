#include "parvl/serve/media_fetch.h"

#include <absl/strings/ascii.h>
#include <absl/strings/str_split.h>
#include <arpa/inet.h>
#include <curl/curl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/public_address.h"

namespace parvl {
namespace {

using std::chrono::microseconds;

constexpr microseconds kLeastTime{10'000};  // less is too short to begin anything
constexpr size_t kMaxUrlBytes = 8192;
constexpr long kSlowBytesPerSecond = 1000, kSlowSeconds = 5;
constexpr char kNotAllowed[] = "media_not_allowed";

struct CurlDeleter {
  void operator()(CURL* easy) const { curl_easy_cleanup(easy); }
  void operator()(CURLU* url) const { curl_url_cleanup(url); }
  void operator()(char* text) const { curl_free(text); }
};
using Url = std::unique_ptr<CURLU, CurlDeleter>;

// A host in one spelling: lower case, no final dot, no brackets, an IPv6 address in its shortest form.
std::string plain_host(std::string_view text) {
  std::string host = absl::AsciiStrToLower(std::string(text));
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.ends_with('.')) host.pop_back();
  in6_addr address;
  char shortest[INET6_ADDRSTRLEN];
  if (::inet_pton(AF_INET6, host.c_str(), &address) == 1) {
    host = ::inet_ntop(AF_INET6, &address, shortest, sizeof shortest);
  }
  return host;
}

bool contains(const std::vector<std::string>& hosts, const std::string& host) {
  return std::find(hosts.begin(), hosts.end(), host) != hosts.end();
}

std::string part_of(const Url& url, CURLUPart part) {
  char* text = nullptr;
  if (curl_url_get(url.get(), part, &text, 0) != CURLUE_OK) return "";
  return std::unique_ptr<char, CurlDeleter>(text).get();
}

// Points `url` at `text`, which may be relative to where it points now, and checks all that can be checked before an
// address is known. Any port may be named: what is sent to it is one plain GET. `name` is the item's.
absl::Status go_to(const Url& url, const std::string& text, const FetchPolicy& policy, const std::string& name) {
  if (text.size() > kMaxUrlBytes) {
    return api_error(400, absl::StrCat(name, " has a URL of more than ", kMaxUrlBytes, " bytes"), kNotAllowed);
  }
  const bool cut = text.find('\0') != std::string::npos;  // libcurl would not see what follows
  const CURLUcode code =
      cut ? CURLUE_MALFORMED_INPUT : curl_url_set(url.get(), CURLUPART_URL, text.c_str(), CURLU_URLENCODE);
  if (code != CURLUE_OK) {
    return api_error(400, absl::StrCat(name, " has a URL that is not valid: ", curl_url_strerror(code)), kNotAllowed);
  }
  const std::string scheme = part_of(url, CURLUPART_SCHEME);
  if (scheme != "http" && scheme != "https") {
    return api_error(400,
                     absl::StrCat(name, " has a URL of the kind ", excerpt(scheme), "; http and https are fetched"),
                     kNotAllowed);
  }
  char* user = nullptr;
  const bool has_user = curl_url_get(url.get(), CURLUPART_USER, &user, 0) == CURLUE_OK;
  curl_free(user);
  if (has_user) {
    return api_error(400, name + " has a URL with a user name or password; leave it out", kNotAllowed);
  }
  const std::string host = plain_host(part_of(url, CURLUPART_HOST));
  if (policy.domains.empty() || contains(policy.domains, host)) return absl::OkStatus();
  return api_error(
      400, absl::StrCat(name, " names the host ", excerpt(host), ", which is not one of --allowed-media-domains"),
      kNotAllowed);
}

// One request for one URL, and what came of it.
struct Transfer {
  CURL* easy;
  bool private_allowed;
  size_t max_bytes;
  std::stop_token stop;
  bool address_refused = false, address_tried = false;
  bool too_large = false;
  std::string body;
};

// libcurl resolves a host once and calls this for each of its addresses before it connects there, so that nothing can
// resolve to another address between the check and the connection.
curl_socket_t open_checked_socket(void* user, curlsocktype, curl_sockaddr* address) {
  Transfer& transfer = *static_cast<Transfer*>(user);
  if (!transfer.private_allowed && !is_public_address(address->addr)) {
    transfer.address_refused = true;
    return CURL_SOCKET_BAD;
  }
  transfer.address_tried = true;
  return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

// Keeps the body of a 200; that of any other answer is not even read to its end.
size_t take_body(const char* data, size_t, size_t size, void* user) {
  Transfer& transfer = *static_cast<Transfer*>(user);
  long status = 0;
  curl_off_t announced = -1;
  curl_easy_getinfo(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
  curl_easy_getinfo(transfer.easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &announced);
  if (status != 200) return CURL_WRITEFUNC_ERROR;
  transfer.too_large =
      std::cmp_greater(announced, transfer.max_bytes) || size > transfer.max_bytes - transfer.body.size();
  if (transfer.too_large) return CURL_WRITEFUNC_ERROR;
  transfer.body.append(data, size);
  return size;
}

int must_abort(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<Transfer*>(user)->stop.stop_requested() ? 1 : 0;
}

// Cookies, credentials, redirects and other protocols are libcurl's to leave alone unless asked; TLS certificates are
// verified by default.
void set_options(Transfer& transfer, const Url& url, const FetchPolicy& policy, microseconds time) {
  CURL* easy = transfer.easy;
  const auto milliseconds = [](microseconds t) { return static_cast<long>(t.count() / 1000); };
  curl_easy_setopt(easy, CURLOPT_CURLU, url.get());
  curl_easy_setopt(easy, CURLOPT_USERAGENT, policy.user_agent.c_str());
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(easy, CURLOPT_PROXY, "");  // whatever the environment says: a proxy would choose the address
  curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);  // the end of a time limit does not wait for a slow resolver
  curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, milliseconds(time));
  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, milliseconds(std::min<microseconds>(time, policy.connect_time)));
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, kSlowBytesPerSecond);
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, kSlowSeconds);
  curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_checked_socket);
  curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, &transfer);
  curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(easy, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, must_abort);
  curl_easy_setopt(easy, CURLOPT_XFERINFODATA, &transfer);
}

// Why nothing came, without the address or any other detail of the network here.
std::string reason_of(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
      return "the host is not known";
    case CURLE_COULDNT_CONNECT:
      return "the host takes no connection";
    case CURLE_OPERATION_TIMEDOUT:
      return "it took too long";
    case CURLE_PEER_FAILED_VERIFICATION:
      return "its TLS certificate is not trusted";
    default:
      return curl_easy_strerror(code);
  }
}

absl::Status cannot_fetch(const std::string& name, const std::string& host, const std::string& reason) {
  return api_error(422,
                   absl::StrCat(name, " cannot be fetched from ", excerpt(host), ": ", reason,
                                "; check its URL, or send it as a data: URI"),
                   "media_not_fetched");
}

bool is_redirect(long status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

// The error of a transfer that brought neither a body nor a place to go on at.
absl::Status error_of(const Transfer& transfer, CURLcode code, long http_status, const std::string& host,
                      const std::string& name) {
  if (transfer.address_refused && !transfer.address_tried) {
    return api_error(400,
                     absl::StrCat(name, " names the host ", excerpt(host),
                                  ", whose address is not public; --allowed-private-media-hosts can allow it"),
                     kNotAllowed);
  }
  if (transfer.too_large) {
    return api_error(413, absl::StrCat(name, " has more than ", transfer.max_bytes, " bytes, the limit of an image"),
                     "media_too_large");
  }
  if (code == CURLE_ABORTED_BY_CALLBACK) return api_error(503, "the server is shutting down", "draining");
  if (http_status > 0 && http_status != 200) {
    return cannot_fetch(name, host, absl::StrCat("the answer was status ", http_status));
  }
  if (code != CURLE_OK) return cannot_fetch(name, host, reason_of(code));
  return cannot_fetch(name, host, "the answer was empty");
}

}  // namespace

bool is_web_url(std::string_view url) {
  const std::string begin = absl::AsciiStrToLower(std::string(url.substr(0, sizeof "https:" - 1)));
  return begin == "https:" || begin.starts_with("http:");
}

MediaFetcher::MediaFetcher(const MediaPolicy& policy, std::stop_token stop)
    : policy_(policy), stop_(std::move(stop)), time_left_(policy.fetch.request_time) {}

absl::StatusOr<std::string> MediaFetcher::fetch(std::string_view text, const std::string& name) {
  const FetchPolicy& policy = policy_.fetch;
  const Url url(curl_url());
  std::string subject = name;
  PARVL_RETURN_IF_ERROR(go_to(url, std::string(text), policy, subject));
  microseconds item_left = std::min<microseconds>(policy.item_time, time_left_);
  for (int redirects = 0;; ++redirects) {
    const std::string host = plain_host(part_of(url, CURLUPART_HOST));
    if (item_left < kLeastTime) return cannot_fetch(subject, host, reason_of(CURLE_OPERATION_TIMEDOUT));
    // A handle for each hop: no connection or resolved name outlives the check that it was made under.
    const std::unique_ptr<CURL, CurlDeleter> easy(curl_easy_init());
    PARVL_CHECK(easy != nullptr, "libcurl has no handle left");
    Transfer transfer{easy.get(), contains(policy.private_hosts, host), policy_.image.max_bytes, stop_};
    set_options(transfer, url, policy, item_left);
    const CURLcode code = stop_.stop_requested() ? CURLE_ABORTED_BY_CALLBACK : curl_easy_perform(easy.get());
    curl_off_t used = 0;
    long status = 0;
    curl_header* location = nullptr;
    curl_easy_getinfo(easy.get(), CURLINFO_TOTAL_TIME_T, &used);
    curl_easy_getinfo(easy.get(), CURLINFO_RESPONSE_CODE, &status);
    item_left -= microseconds(used);
    time_left_ -= microseconds(used);
    if (code == CURLE_OK && status == 200 && !transfer.body.empty()) return std::move(transfer.body);
    const bool moved =
        is_redirect(status) && curl_easy_header(easy.get(), "Location", 0, CURLH_HEADER, -1, &location) == CURLHE_OK;
    if (!moved) return error_of(transfer, code, status, host, subject);
    if (redirects == policy.max_redirects) {
      return cannot_fetch(name, host, absl::StrCat("it is redirected more than ", policy.max_redirects, " times"));
    }
    subject = name + ", redirected,";
    PARVL_RETURN_IF_ERROR(go_to(url, location->value, policy, subject));
  }
}

absl::StatusOr<std::vector<std::string>> parse_media_hosts(const std::string& flag,
                                                           const std::vector<std::string>& values) {
  std::vector<std::string> hosts;
  for (const std::string& value : values) {
    const std::vector<std::string> parts = absl::StrSplit(value, ',');
    for (const std::string& part : parts) {
      const std::string host = plain_host(std::string(absl::StripAsciiWhitespace(part)));
      in6_addr address;
      const bool is_name = !host.empty() && std::all_of(host.begin(), host.end(), [](char c) {
        const auto byte = static_cast<unsigned char>(c);  // names with other letters are UTF-8
        return absl::ascii_isalnum(byte) || c == '-' || c == '.' || c == '_' || byte >= 0x80;
      });
      if (!is_name && ::inet_pton(AF_INET6, host.c_str(), &address) != 1) {
        return invalid(flag, " takes host names or addresses such as images.example.com, found ", excerpt(part),
                       "; leave out scheme, port, path and wildcards");
      }
      hosts.push_back(host);
    }
  }
  return hosts;
}

}  // namespace parvl
