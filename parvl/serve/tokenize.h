// /tokenize and /detokenize: text and messages ↔ token ids, as generating would make them.
#pragma once

#include <string_view>

#include "parvl/serve/async.h"

namespace parvl {

class Gateway;
class HttpConnection;

asio::awaitable<void> serve_tokenize(Gateway& gateway, HttpConnection& connection);
asio::awaitable<void> serve_detokenize(Gateway& gateway, HttpConnection& connection);

}  // namespace parvl
