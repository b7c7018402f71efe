// What an encoder has made of an image, outside the engine that made it. Torch-free.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// One tensor of a set, row by row.
struct EncodedTensor {
  std::string name;  // "visual"
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // of its first byte in the memory of the set
  friend bool operator==(const EncodedTensor&, const EncodedTensor&) = default;
};

// The encoder output of one image: named tensors in one piece of memory. It follows from the model, the type that it
// computes in, and the image's grid; so whoever reserves the memory and whoever reads from it mean the same.
struct EncodedLayout {
  std::vector<EncodedTensor> tensors;
  int64_t bytes = 0;  // of all together
  friend bool operator==(const EncodedLayout&, const EncodedLayout&) = default;
};

// "visual: float32 [12, 896]", for messages.
std::string to_string(const EncodedLayout& layout);

// Encoder output that lies elsewhere, for an engine to bring here.
class EncodedSource {
 public:
  virtual ~EncodedSource() = default;
  // As it was told by who encoded it. Any thread; always the same.
  virtual const EncodedLayout& layout() const = 0;
  // Fills `destination` (layout().bytes, aligned to 64), or says why not; Unavailable where the output is gone or its
  // owner does not answer. On the engine's encoding thread, where others wait behind it: it has to end by itself, also
  // when the other side says nothing. May come again when the request had to give its memory to others.
  virtual absl::Status fetch(absl::Span<std::byte> destination) = 0;
};

}  // namespace parvl
