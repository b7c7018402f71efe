// What crosses between the gateway and its instances, as messages of proto/instance.proto and back. Pure.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/exec/engine_load.h"
#include "proto/instance.pb.h"

namespace parvl {

// What says where an image's data lies, in place of the data: handles of transfers, encoded.
struct ImagePlace {
  std::string pixels;  // of the patches; or
  std::string output;  // of the encoder's output
};

// All but the patches.
void write_image(const ProcessedImage& image, const ImagePlace& place, wire::Image& out);
// Without patches. InvalidArgument for numbers that do not fit together.
absl::StatusOr<ProcessedImage> read_image(const wire::Image& message);

// All of a request but the callbacks, its track and its compiled grammar, of which the source goes along. `places`: a
// place for each image.
void write_request(const EngineRequest& request, const std::vector<ImagePlace>& places, wire::Generate& out);
// InvalidArgument for numbers that do not fit together. The images have no patches, and the grammar is the caller's to
// compile.
absl::StatusOr<EngineRequest> read_request(const wire::Generate& message);

void write_token(const TokenEvent& event, wire::Token& out);
TokenEvent read_token(const wire::Token& message);

// The times and counts of a result; its tokens were sent one by one.
void write_result(const absl::StatusOr<GenerateResult>& result, wire::Ended& out);

void write_failure(const absl::Status& status, wire::Failure& out);
absl::Status read_failure(const wire::Failure& message);  // OK for code 0

void write_stats(const EngineStats& stats, wire::Counts& out);
EngineStats read_stats(const wire::Counts& message);

// What of the options the instance is told; the rest is its own.
void write_options(const EngineOptions& options, wire::Assign& out);
EngineOptions read_options(const wire::Assign& message);

}  // namespace parvl
