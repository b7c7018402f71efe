// Keys and values of a sequence on their way from one engine to another. Torch-free.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_handle.h"

namespace parvl {

// Memory that an engine leaves them in: a piece for each tensor of Engine::kv_layout, of its size and aligned to 64.
// Who holds it may write: also a step that outlives its request.
struct KvRoom {
  virtual ~KvRoom() = default;
  std::vector<absl::Span<std::byte>> pieces;
};

// What lies in another engine's KvRoom.
class KvSource {
 public:
  virtual ~KvSource() = default;
  virtual int64_t tokens() const = 0;  // that they belong to, from the first one on
  // As whoever computed them said: of Engine::kv_layout(tokens()). Any thread; always the same.
  virtual const std::vector<TransferTensor>& tensors() const = 0;
  // Calls `take` with the bytes of each tensor, which are there until it returns; or says why they cannot be had, and
  // the tokens are computed here. On a thread of the engine where others wait behind it: it has to end by itself, also
  // when the other side says nothing. At most once.
  using Take = std::function<void(absl::Span<const std::byte* const> data)>;
  virtual absl::Status fetch(const Take& take) = 0;
};

}  // namespace parvl
