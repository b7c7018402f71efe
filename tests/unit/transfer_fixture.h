// A source and a sink, items whose bytes follow from a seed, and waits for what other threads do.
#pragma once

#include <gmock/gmock.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/base/clock.h"
#include "parvl/base/rng.h"
#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"

namespace parvl {

inline constexpr char kTestToken[] = "a token of sixteen bytes or more";

inline const Clock& test_clock() {
  static const RealClock clock;
  return clock;
}

inline TransferSourceOptions source_options() {
  TransferSourceOptions out;
  out.name = "encode-0";
  out.epoch = 3;
  out.token = kTestToken;
  out.clock = &test_clock();
  out.arena_bytes = 64 << 20;
  out.tcp_listen = "127.0.0.1:0";
  return out;
}
inline TransferSinkOptions sink_options(std::optional<TransferLane> only = std::nullopt) {
  TransferSinkOptions out;
  out.name = "llm-0";
  out.epoch = 1;
  out.token = kTestToken;
  out.clock = &test_clock();
  out.only = only;
  return out;
}
inline std::unique_ptr<TransferSource> start_source(const TransferSourceOptions& options = source_options()) {
  auto out = TransferSource::start(options);
  PARVL_CHECK(out.ok(), out.status().ToString().c_str());
  return std::move(*out);
}
inline std::unique_ptr<TransferSink> start_sink(const TransferSinkOptions& options) {
  auto out = TransferSink::start(options);
  PARVL_CHECK(out.ok(), out.status().ToString().c_str());
  return std::move(*out);
}

// Encoder outputs: features, deep features of another type, and one tensor without values.
inline std::vector<TransferTensor> features(int64_t rows) {
  return {{"features", DType::kBFloat16, {rows, 129}},
          {"deepstack.0", DType::kFloat32, {rows, 3, 7}},
          {"none", DType::kFloat64, {0, 5}},
          {"scale", DType::kFloat16, {}}};
}
inline std::vector<TransferTensor> one_tensor(int64_t bytes) { return {{"x", DType::kBFloat16, {bytes / 2}}}; }

inline void fill(TransferRegion& region, uint64_t seed) {
  for (size_t i = 0; i < region.tensors().size(); ++i) {
    Rng rng(seed, i);
    const auto bytes = static_cast<size_t>(region.tensors()[i].bytes);
    for (size_t at = 0; at < bytes; at += 8) {
      const uint64_t word = rng.next();
      std::memcpy(region.data(i) + at, &word, std::min<size_t>(8, bytes - at));
    }
  }
}
inline std::string expected_bytes(const TransferTensor& tensor, size_t place, uint64_t seed) {
  Rng rng(seed, place);
  std::string out(static_cast<size_t>(tensor.bytes), '\0');
  for (size_t at = 0; at < out.size(); at += 8) {
    const uint64_t word = rng.next();
    std::memcpy(out.data() + at, &word, std::min<size_t>(8, out.size() - at));
  }
  return out;
}
inline bool has_bytes_of(const TransferView& view, uint64_t seed) {
  for (size_t i = 0; i < view.tensors().size(); ++i) {
    const std::string expected = expected_bytes(view.tensors()[i], i, seed);
    if (std::memcmp(view.data(i), expected.data(), expected.size()) != 0) return false;
  }
  return !view.tensors().empty();
}
inline TransferHandle publish(TransferSource& source, std::vector<TransferTensor> tensors, uint64_t seed,
                              const TransferLease& lease = {}) {
  auto region = source.reserve(std::move(tensors));
  PARVL_CHECK(region.ok(), region.status().ToString().c_str());
  fill(*region, seed);
  return source.publish(std::move(*region), lease);
}

// Whether it becomes true soon. Other threads and processes have no other way to say so.
inline bool soon(const std::function<bool()>& is_true, double seconds = 20) {
  const double end = test_clock().now_seconds() + seconds;
  while (!is_true()) {
    if (test_clock().now_seconds() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace parvl
