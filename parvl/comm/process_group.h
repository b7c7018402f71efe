// Ranks that communicate. One interface over threads of one process (local/), Gloo and NCCL.
#pragma once

#include <absl/types/span.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// Values that lie one after another, in the backend's memory (host, or its GPU). Borrowed until the Work is done.
struct Buffer {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
};
struct ConstBuffer {
  const void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  ConstBuffer() = default;
  ConstBuffer(const void* data, int64_t count, DType dtype) : data(data), count(count), dtype(dtype) {}
  ConstBuffer(const Buffer& buffer) : data(buffer.data), count(buffer.count), dtype(buffer.dtype) {}
};

enum class ReduceOp { kSum, kMax };

// A call under way. One thread; `wait` once.
class Work {
 public:
  virtual ~Work() = default;
  // Until the result is there (on a GPU: in the order of the current stream). DeadlineExceeded after the group's
  // deadline, naming who is missing; Aborted when the group was aborted; InvalidArgument when ranks called different
  // things. After an error the group is of no use, and buffers hold anything.
  virtual absl::Status wait() = 0;
};

// All ranks make the same collective calls in the same order; messages between two ranks arrive in the order in which
// they were sent. One thread a rank. Sums are made in the wide type (float32 for 16 bits) where the backend can say.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int64_t rank() const = 0;  // in the group
  virtual int64_t size() const = 0;
  virtual const std::string& name() const = 0;

  virtual std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) = 0;
  // out: size · in, by rank.
  virtual std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) = 0;
  // in: size · out; rank r gets the sum of everybody's part r.
  virtual std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) = 0;
  virtual std::unique_ptr<Work> broadcast(Buffer values, int64_t root) = 0;
  // in: parts for rank 0, 1, … of so many values; out likewise from each.
  virtual std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                           absl::Span<const int64_t> out_counts) = 0;
  virtual std::unique_ptr<Work> send(ConstBuffer values, int64_t to) = 0;
  virtual std::unique_ptr<Work> receive(Buffer values, int64_t from) = 0;
  virtual std::unique_ptr<Work> barrier() = 0;

  // Ends every call under way and to come with Aborted, on this rank and where the backend can say so on the others.
  // Any thread.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace parvl
