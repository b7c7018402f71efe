// Encoder output that lies elsewhere, for an engine to bring here. Torch-free.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_handle.h"

namespace parvl {

// What an encode engine has made of one image. TransferSink::pull_into does the work of `fetch`.
class EncodedSource {
 public:
  virtual ~EncodedSource() = default;
  // Names, types, shapes and bytes, as whoever encoded it said. Any thread; always the same.
  virtual const std::vector<TransferTensor>& tensors() const = 0;
  // Fills `out`, one piece for each tensor, of its size and aligned to 64; or says why not, and the request ends with
  // Unavailable. On the engine's encoding thread, where others wait behind it: it has to end by itself, also when the
  // other side says nothing. May come again when the request had to give its memory to others.
  virtual absl::Status fetch(absl::Span<const absl::Span<std::byte>> out) = 0;
};

}  // namespace parvl
