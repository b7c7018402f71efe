// The bytes behind an image URL.
#pragma once

#include <string>
#include <string_view>

#include "parvl/base/status.h"
#include "parvl/serve/media_fetch.h"
#include "parvl/serve/options.h"

namespace parvl {

// Loads a data: URI (base64 with line breaks, the URL-safe alphabet and missing padding accepted; or percent-encoded),
// a file:// URL under policy.local_path, or what `fetcher` fetches from the web. `name` is what errors call the item.
// Errors are answers' statuses: 400 for a URL that is not allowed, 413 over policy.image.max_bytes, 422 for one that
// cannot be read, and those of MediaFetcher::fetch.
absl::StatusOr<std::string> load_media(std::string_view url, const MediaPolicy& policy, const std::string& name,
                                       MediaFetcher& fetcher);

// nullopt-like: InvalidArgument with the reason when `text` is not base64.
absl::StatusOr<std::string> decode_base64(std::string_view text);

// The folder with symbolic links resolved; an error when it is not one. For --allowed-local-media-path.
absl::StatusOr<std::string> resolve_media_folder(const std::string& path);

}  // namespace parvl
