// The pages of a sequence as tensors that another engine can take over.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_handle.h"
#include "parvl/exec/engine_request.h"
#include "parvl/exec/kv_cache.h"
#include "parvl/sched/output.h"

namespace parvl {

// "keys" and "values" of so many tokens, each [layers, blocks, kv_heads, block_size, head_dim]: whole pages, of which
// the last one's end means nothing.
std::vector<TransferTensor> kv_layout(const BackboneSpec& spec, DType dtype, int64_t block_size, int64_t tokens);

// Whether what the request brings, and the room for what it leaves, are of this model. InvalidArgument: not.
absl::Status check_kv(const BackboneSpec& spec, DType dtype, int64_t block_size, const EngineRequest& request);

// Copies the pages of a sequence's tokens, up to the end of `work`, to the CPU's memory. On the thread that runs steps.
// Throws libtorch's exceptions.
void copy_out(const KvPages& pages, const SequenceWork& work, const KvRoom& room);
// From the data of its kv_layout, the blocks that `fetch` lacks. On any thread; returns when they are there. Throws
// likewise.
void copy_in(absl::Span<const std::byte* const> data, const KvFetch& fetch, const KvPages& pages);

}  // namespace parvl
