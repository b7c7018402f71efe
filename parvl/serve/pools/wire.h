// What crosses between the gateway and its instances, as messages of proto/instance.proto and back. Pure.
#pragma once

#include "parvl/base/status.h"
#include "parvl/exec/engine_load.h"
#include "parvl/exec/engine_request.h"
#include "parvl/exec/engine_stats.h"
#include "proto/instance.pb.h"

namespace parvl {

// All of a request but the callbacks, its track and its compiled grammar, of which the source goes along.
void write_request(const EngineRequest& request, wire::Generate& out);
// InvalidArgument for numbers that do not fit together. The grammar is the caller's to compile.
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
