// One request to generate, from its body to its last byte.
#pragma once

#include "parvl/serve/async.h"
#include "parvl/serve/openai_request.h"

namespace parvl {

class Gateway;
class HttpConnection;

asio::awaitable<void> serve_request(Gateway& gateway, HttpConnection& connection, Api api);

}  // namespace parvl
