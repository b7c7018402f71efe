// One request to generate, from its body to its last byte.
#pragma once

#include "parvl/serve/async.h"

namespace parvl {

class Gateway;
class HttpConnection;

asio::awaitable<void> serve_chat(Gateway& gateway, HttpConnection& connection);

}  // namespace parvl
