// Tensors as buffers of communication.
#pragma once

#include <ATen/ATen.h>

#include "parvl/comm/process_group.h"

namespace parvl {

// The values of a contiguous tensor of a floating type. Borrowed.
Buffer buffer_of(const at::Tensor& tensor);

// Waits; throws std::runtime_error with the group's message. For work inside a step, where nothing can go on without
// it.
void wait(const std::unique_ptr<Work>& work);

}  // namespace parvl
