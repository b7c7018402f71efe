#include "parvl/serve/media_source.h"

#include <absl/strings/ascii.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>

#include "parvl/base/file_descriptor.h"
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

constexpr char kUnreadable[] = "media_unreadable";

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+' || c == '-') return 62;
  if (c == '/' || c == '_') return 63;
  return -1;
}

absl::Status too_large(const std::string& name, size_t limit) {
  return api_error(413, absl::StrCat(name, " has more than ", limit, " bytes, the limit of an image"),
                   "media_too_large");
}

absl::StatusOr<std::string> load_data_uri(std::string_view rest, const MediaPolicy& policy, const std::string& name) {
  const size_t comma = rest.find(',');
  if (comma == std::string_view::npos || comma > 1024) {
    return api_error(422, name + " is a data: URI without a comma before its data", kUnreadable);
  }
  const std::string header = absl::AsciiStrToLower(std::string(rest.substr(0, comma)));
  const std::string_view data = rest.substr(comma + 1);
  if (data.size() / 3 > policy.image.max_bytes) return too_large(name, policy.image.max_bytes);  // worst case: all %XX
  const bool escaped = data.find('%') != std::string_view::npos;
  std::string bytes = escaped ? percent_decode(data) : std::string();
  if (header.ends_with(";base64")) {
    absl::StatusOr<std::string> decoded = decode_base64(escaped ? std::string_view(bytes) : data);
    if (!decoded.ok()) return api_error(422, absl::StrCat(name, " ", decoded.status().message()), kUnreadable);
    bytes = std::move(*decoded);
  } else if (!escaped) {
    bytes = std::string(data);
  }
  if (bytes.empty()) return api_error(422, name + " is a data: URI without data", kUnreadable);
  if (bytes.size() > policy.image.max_bytes) return too_large(name, policy.image.max_bytes);
  return bytes;
}

bool is_under(const std::string& path, const std::string& folder) {
  return path.starts_with(folder == "/" ? folder : folder + "/");
}

// Where the open descriptor really is, whatever links its path went through and whoever moved them meanwhile.
std::string descriptor_path(int fd) {
  char buffer[PATH_MAX];
  const ssize_t length = ::readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), buffer, sizeof buffer);
  return length > 0 ? std::string(buffer, static_cast<size_t>(length)) : "";
}

absl::StatusOr<std::string> read_bounded(int fd, size_t size, const std::string& name) {
  std::string bytes(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd, bytes.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return api_error(422, name + " cannot be read", kUnreadable);
    done += static_cast<size_t>(n);
  }
  return bytes;
}

absl::StatusOr<std::string> load_local_file(std::string_view rest, const MediaPolicy& policy, const std::string& name) {
  if (policy.local_path.empty()) {
    return api_error(400, name + " is a file:// URL, and this server was started without --allowed-local-media-path",
                     "media_not_allowed");
  }
  if (rest.starts_with("localhost/")) rest.remove_prefix(sizeof "localhost" - 1);
  const std::string path = percent_decode(rest);
  if (!path.starts_with("/") || path.find('\0') != std::string::npos) {
    return api_error(400, name + " must be file:// and an absolute path", "media_not_allowed");
  }
  const absl::Status outside =
      api_error(400, name + " is not under the folder of --allowed-local-media-path", "media_not_allowed");
  std::error_code error;
  const std::string resolved = std::filesystem::weakly_canonical(path, error).string();
  if (error || !is_under(resolved, policy.local_path)) return outside;
  const FileDescriptor file(::open(resolved.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW));
  if (!file) return api_error(422, absl::StrCat(name, " cannot be opened: ", std::strerror(errno)), kUnreadable);
  if (!is_under(descriptor_path(file.get()), policy.local_path)) return outside;
  struct stat info;
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return api_error(422, name + " is not a plain file", kUnreadable);
  }
  if (static_cast<size_t>(info.st_size) > policy.image.max_bytes) return too_large(name, policy.image.max_bytes);
  return read_bounded(file.get(), static_cast<size_t>(info.st_size), name);
}

}  // namespace

absl::StatusOr<std::string> decode_base64(std::string_view text) {
  std::string out;
  out.reserve(text.size() / 4 * 3 + 3);
  uint32_t bits = 0;
  size_t digits = 0, padding = 0;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == ' ' || c == '\t') continue;
    if (c == '=') {
      ++padding;
      continue;
    }
    const int value = base64_value(c);
    if (value < 0) return invalid("holds a character that is not base64");
    if (padding > 0) return invalid("goes on after its base64 padding");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (++digits % 4 == 0) {
      out += static_cast<char>(bits >> 16 & 0xff);
      out += static_cast<char>(bits >> 8 & 0xff);
      out += static_cast<char>(bits & 0xff);
    }
  }
  if (padding > 2) return invalid("ends in ", padding, " padding characters (=) of base64; there may be two at most");
  if (digits % 4 == 1) return invalid("is cut short: its base64 has ", digits, " digits");
  if (digits % 4 == 2) out += static_cast<char>(bits >> 4 & 0xff);
  if (digits % 4 == 3) {
    out += static_cast<char>(bits >> 10 & 0xff);
    out += static_cast<char>(bits >> 2 & 0xff);
  }
  return out;
}

absl::StatusOr<std::string> load_media(std::string_view url, const MediaPolicy& policy, const std::string& name,
                                       MediaFetcher& fetcher) {
  const size_t colon = url.find(':');
  const std::string scheme =
      colon == std::string_view::npos || colon > 16 ? "" : absl::AsciiStrToLower(std::string(url.substr(0, colon)));
  if (scheme == "data") return load_data_uri(url.substr(colon + 1), policy, name);
  if (scheme == "file") {
    const std::string_view rest = url.substr(colon + 1);
    if (!rest.starts_with("//"))
      return api_error(400, name + " must be file:// and an absolute path", "media_not_allowed");
    return load_local_file(rest.substr(2), policy, name);
  }
  if (is_web_url(url)) return fetcher.fetch(url, name);
  return api_error(400, absl::StrCat(name, " has a URL of unknown kind, ", excerpt(url, 30),
                                     "; data:, http://, https:// and file:// are known"));
}

absl::StatusOr<std::string> resolve_media_folder(const std::string& path) {
  std::error_code error;
  const std::filesystem::path resolved = std::filesystem::canonical(path, error);
  if (error || !std::filesystem::is_directory(resolved, error)) {
    return invalid("--allowed-local-media-path ", path, " is not a folder");
  }
  return resolved.string();
}

}  // namespace parvl
