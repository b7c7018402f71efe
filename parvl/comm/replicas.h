// Whether ranks that should hold the same values do, to the bit.
#pragma once

#include <absl/types/span.h>

#include <string>

#include "parvl/comm/process_group.h"

namespace parvl {

struct NamedBuffer {
  std::string name;
  ConstBuffer values;  // in host memory
};

// Of the values' bits and their type.
uint64_t checksum(const ConstBuffer& values);

// OK when all members of the group hold the same bits under the same names; else Internal, on all of them, naming the
// first buffer that differs, the ranks (in the group) that are not like most, and how many more differ. Collective: all
// members call it, and the group's memory is the host's. 8 bytes a buffer travel, and only where something differs.
absl::Status expect_equal_replicas(absl::Span<const NamedBuffer> buffers, ProcessGroup& group);

}  // namespace parvl
