// Images encoded by an encode engine, and their encoder output as an engine is given it.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "parvl/base/file.h"
#include "parvl/exec/encode_engine.h"
#include "parvl/exec/encoded_source.h"

namespace parvl {

// Memory that an encode engine writes into, as a transfer engine would set it aside.
struct AlignedBytes {
  explicit AlignedBytes(int64_t size)
      : bytes(static_cast<size_t>(size)),
        memory(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), &std::free) {
    std::memset(memory.get(), 0xab, bytes);
  }
  absl::Span<std::byte> span() const { return {memory.get(), bytes}; }
  std::string text() const { return {reinterpret_cast<const char*>(memory.get()), bytes}; }
  size_t bytes;
  std::shared_ptr<std::byte> memory;
};

// Encoder output that a test has; counts how often it is asked for it.
struct HeldSource : EncodedSource {
  HeldSource(std::vector<TransferTensor> tensors, AlignedBytes memory)
      : what(std::move(tensors)), held(std::move(memory)) {}
  const std::vector<TransferTensor>& tensors() const override { return what; }
  absl::Status fetch(absl::Span<const absl::Span<std::byte>> out) override {
    ++fetches;
    if (before) before();
    if (!status.ok()) return status;
    EXPECT_EQ(out.size(), 1u);
    EXPECT_EQ(out[0].size(), held.bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(out[0].data()) % 64, 0u);
    std::memcpy(out[0].data(), held.memory.get(), held.bytes);
    return absl::OkStatus();
  }

  std::vector<TransferTensor> what;
  AlignedBytes held;
  absl::Status status;           // of every fetch
  std::function<void()> before;  // called in every fetch
  std::atomic<int> fetches = 0;
};

inline std::shared_ptr<HeldSource> encode(EncodeEngine& encoder, std::shared_ptr<const ProcessedImage> image) {
  const std::vector<TransferTensor> layout = *encoder.layout_of(*image);
  AlignedBytes memory(layout.at(0).bytes);
  std::promise<absl::StatusOr<EncodedImage>> promise;
  const auto id =
      encoder.submit({std::move(image), {memory.span()}, [&](const auto& encoded) { promise.set_value(encoded); }});
  if (!id.ok()) throw std::runtime_error(id.status().ToString());
  const absl::StatusOr<EncodedImage> done = promise.get_future().get();
  if (!done.ok()) throw std::runtime_error(done.status().ToString());
  EXPECT_LE(done->start_s, done->end_s);
  return std::make_shared<HeldSource>(layout, std::move(memory));
}

// The same image as another process knows it: its grid and key, no pixels.
inline std::shared_ptr<const ProcessedImage> outline(const ProcessedImage& image) {
  auto out = std::make_shared<ProcessedImage>(image);
  const std::string_view patches(reinterpret_cast<const char*>(image.patches.data()),
                                 image.patches.size() * sizeof(float));
  out->key = sha256(std::to_string(image.grid_w) + " " + std::string(patches));
  out->patches.clear();
  return out;
}

}  // namespace parvl
