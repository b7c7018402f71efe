#include "parvl/nn/tensor_buffer.h"

#include <stdexcept>

#include "parvl/base/check.h"
#include "parvl/nn/param.h"

namespace parvl {

Buffer buffer_of(const at::Tensor& tensor) {
  PARVL_CHECK(tensor.is_contiguous(), "a strided tensor goes into a message");
  const auto dtype = from_scalar_type(tensor.scalar_type());
  PARVL_CHECK(dtype.ok(), "a tensor of a type that is not sent");
  return {tensor.data_ptr(), tensor.numel(), *dtype};
}

void wait(const std::unique_ptr<Work>& work) {
  const absl::Status status = work->wait();
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

}  // namespace parvl
