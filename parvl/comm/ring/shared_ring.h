// Messages of one process to some others of its machine, in order and to all of them, through shared memory: a ring of
// bytes with one place to write and one to read for each reader. Who waits sleeps in a futex.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

inline constexpr int64_t kMaxRingReaders = 63;
// One that is longer is refused; one that is longer than the ring goes through it in parts.
inline constexpr int64_t kMaxRingMessage = int64_t{1} << 32;

struct RingMemory;  // what lies in the shared memory

class RingWriter {
 public:
  // ResourceExhausted: no memory or descriptors. `bytes` are the most that wait for the slowest reader.
  static absl::StatusOr<std::unique_ptr<RingWriter>> create(int64_t readers, int64_t bytes = int64_t{1} << 20);
  ~RingWriter();  // closes
  RingWriter(const RingWriter&) = delete;
  RingWriter& operator=(const RingWriter&) = delete;

  // Where readers find it while this is alive: the memory has no name of its own, and goes with the last process.
  std::string path() const;
  // One thread. Waits while the ring is full. Unavailable once it was closed, or when a reader that it waits for has
  // closed or died: then readers may have a part of the message, and the ring is of no use any more.
  absl::Status write(std::string_view message);
  // Of the readers, as process ids; 0: it has not come yet. Any thread.
  std::vector<int64_t> processes() const;
  // Any thread. Ends a write that waits. Readers still get what was written whole, then Unavailable.
  void close();

 private:
  RingWriter(RingMemory* memory, int descriptor, int64_t bytes);
  absl::Status put(std::string_view bytes);
  absl::Status lost_reader();

  RingMemory* const memory_;
  const int descriptor_;
  const int64_t bytes_;
  int processes_[kMaxRingReaders];  // of readers, as descriptors; −1: not looked at yet
};

class RingReader {
 public:
  // Once for each reader, which are counted from 0. Unavailable when there is no ring at this path; InvalidArgument
  // when it has no such reader.
  static absl::StatusOr<std::unique_ptr<RingReader>> open(const std::string& path, int64_t reader);
  ~RingReader();  // the writer no longer waits for it: its next full ring is an error
  RingReader(const RingReader&) = delete;
  RingReader& operator=(const RingReader&) = delete;

  // One thread. The next message; waits for it. Unavailable once all was read and the writer has closed, or has died.
  absl::StatusOr<std::string> read();
  // Any thread. Closes the ring for both ends, as the writer's close does.
  void close();

 private:
  RingReader(RingMemory* memory, int64_t bytes, int64_t reader, int writer);
  absl::Status take(char* out, uint64_t count);

  RingMemory* const memory_;
  const int64_t bytes_, reader_;
  const int writer_;  // its process, as a descriptor
};

}  // namespace parvl
