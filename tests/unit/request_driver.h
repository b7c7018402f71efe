// For tests of a request's life: what follows from an event, by kinds.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "parvl/elastic/request_lifecycle.h"

namespace parvl {

using Do = RequestAction::Kind;
using Kind = RequestEvent::Kind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

inline constexpr InstanceId kA{1}, kB{2}, kC{3};

inline std::vector<Do> kinds(const std::vector<RequestAction>& actions) {
  std::vector<Do> out;
  for (const RequestAction& action : actions) out.push_back(action.kind);
  return out;
}

inline absl::Status lost() { return absl::UnavailableError("gone"); }

struct RequestDriver {
  explicit RequestDriver(const RequestShape& shape) : request(shape) { first = kinds(request.start()); }
  std::vector<Do> happens(const RequestEvent& event) { return kinds(request.handle(event)); }
  // One image on A, then the generation on B.
  void encode_and_generate() {
    EXPECT_THAT(first, ElementsAre(Do::kPlaceEncoding));
    EXPECT_THAT(happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 1}), ElementsAre(Do::kEncode));
    EXPECT_THAT(happens({.kind = Kind::kEncoded, .attempt = 1}), ElementsAre(Do::kPlaceGeneration));
    EXPECT_EQ(request.holder(0), kA);
    EXPECT_THAT(happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 1}), ElementsAre(Do::kGenerate));
  }
  std::vector<Do> token(int64_t index, int attempt, size_t choice = 0) {
    return happens({.kind = Kind::kToken, .choice = choice, .attempt = attempt, .index = index});
  }
  RequestLifecycle request;
  std::vector<Do> first;
};

}  // namespace parvl
