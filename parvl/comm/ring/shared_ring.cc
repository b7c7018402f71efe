#include "parvl/comm/ring/shared_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

#include "parvl/base/check.h"

namespace parvl {

// A place is the number of bytes that went through it since the ring was made; its place in the data is that modulo the
// data's size. What a place says was written is there for who reads the place (release, acquire).
struct RingMemory {
  static constexpr uint64_t kMagic = 0x31676e6972767061;
  struct Reader {
    alignas(64) std::atomic<uint64_t> place{0};
    std::atomic<int32_t> process{0};  // 0: it has not come yet
    std::atomic<uint32_t> closed{0};
  };
  uint64_t magic = kMagic;
  uint64_t size = 0;  // of the data
  int64_t readers = 0;
  int32_t writer = 0;  // its process
  alignas(64) std::atomic<uint64_t> place{0};
  std::atomic<uint32_t> written{0};  // a futex: it changes with the place, and when the writer closes
  std::atomic<uint32_t> closed{0};
  alignas(64) std::atomic<uint32_t> taken{0};  // likewise, of all readers
  Reader reader[kMaxRingReaders];

  char* data() { return reinterpret_cast<char*>(this + 1); }
};

namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// How often who waits looks whether the other one is still there: its death wakes nobody.
constexpr timespec kLook{0, 200'000'000};

uint32_t* futex_word(std::atomic<uint32_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

void change(std::atomic<uint32_t>& value) {
  value.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, futex_word(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Until it is no longer `seen`, for a while at most.
void wait_for_change(std::atomic<uint32_t>& value, uint32_t seen) {
  ::syscall(SYS_futex, futex_word(value), FUTEX_WAIT, seen, &kLook, nullptr, 0);
}

int open_process(int32_t process) { return static_cast<int>(::syscall(SYS_pidfd_open, process, 0)); }

bool has_ended(int process) {
  pollfd look{process, POLLIN, 0};
  return process < 0 || ::poll(&look, 1, 0) != 0;
}

void close_ring(RingMemory& memory) {
  memory.closed.store(1, std::memory_order_release);
  change(memory.written);
  change(memory.taken);  // a write that waits
}

size_t mapped_bytes(int64_t bytes) { return sizeof(RingMemory) + static_cast<size_t>(bytes); }

void* map(int descriptor, int64_t bytes) {
  return ::mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RingWriter>> RingWriter::create(int64_t readers, int64_t bytes) {
  PARVL_CHECK(readers >= 1 && readers <= kMaxRingReaders && bytes >= 1, "a ring of impossible sizes");
  const int descriptor = ::memfd_create("parvl-ring", MFD_CLOEXEC);
  const auto no_memory = [&] {
    const absl::Status status =
        absl::ResourceExhaustedError(absl::StrCat("cannot make a ring of ", bytes, " bytes: ", std::strerror(errno)));
    if (descriptor >= 0) ::close(descriptor);
    return status;
  };
  if (descriptor < 0 || ::ftruncate(descriptor, static_cast<off_t>(mapped_bytes(bytes))) != 0) return no_memory();
  void* const at = map(descriptor, bytes);
  if (at == MAP_FAILED) return no_memory();
  auto* const memory = new (at) RingMemory;
  memory->size = static_cast<uint64_t>(bytes);
  memory->readers = readers;
  memory->writer = ::getpid();
  return std::unique_ptr<RingWriter>(new RingWriter(memory, descriptor, bytes));
}

RingWriter::RingWriter(RingMemory* memory, int descriptor, int64_t bytes)
    : memory_(memory), descriptor_(descriptor), bytes_(bytes) {
  std::fill(std::begin(processes_), std::end(processes_), -1);
}

RingWriter::~RingWriter() {
  close();
  ::munmap(memory_, mapped_bytes(bytes_));
  ::close(descriptor_);
  for (const int process : processes_) {
    if (process >= 0) ::close(process);
  }
}

std::string RingWriter::path() const { return absl::StrCat("/proc/", ::getpid(), "/fd/", descriptor_); }

std::vector<int64_t> RingWriter::processes() const {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < memory_->readers; ++i) {
    out.push_back(memory_->reader[i].process.load(std::memory_order_acquire));
  }
  return out;
}

void RingWriter::close() { close_ring(*memory_); }
void RingReader::close() { close_ring(*memory_); }

absl::Status RingWriter::write(std::string_view message) {
  if (static_cast<int64_t>(message.size()) > kMaxRingMessage) {
    return invalid("a message of ", message.size(), " bytes is too long for a ring");
  }
  const uint64_t length = message.size();
  PARVL_RETURN_IF_ERROR(put({reinterpret_cast<const char*>(&length), sizeof length}));
  return put(message);
}

// OK while all readers are there, or are still to come.
absl::Status RingWriter::lost_reader() {
  for (int64_t i = 0; i < memory_->readers; ++i) {
    const RingMemory::Reader& reader = memory_->reader[i];
    int& process = processes_[i];
    const int32_t id = reader.process.load(std::memory_order_acquire);
    if (id == 0) continue;
    if (process < 0) process = open_process(id);
    if (reader.closed.load(std::memory_order_acquire) != 0 || has_ended(process)) {
      return absl::UnavailableError(absl::StrCat("reader ", i, " of a ring is gone"));
    }
  }
  return absl::OkStatus();
}

absl::Status RingWriter::put(std::string_view bytes) {
  while (!bytes.empty()) {
    if (memory_->closed.load(std::memory_order_acquire) != 0) return absl::UnavailableError("the ring was closed");
    const uint32_t seen = memory_->taken.load(std::memory_order_acquire);
    const uint64_t place = memory_->place.load(std::memory_order_relaxed);
    uint64_t slowest = place;
    for (int64_t i = 0; i < memory_->readers; ++i) {
      slowest = std::min(slowest, memory_->reader[i].place.load(std::memory_order_acquire));
    }
    const uint64_t at = place % memory_->size, room = memory_->size - (place - slowest);
    const uint64_t count = std::min({static_cast<uint64_t>(bytes.size()), room, memory_->size - at});
    if (count == 0) {
      PARVL_RETURN_IF_ERROR(lost_reader());
      wait_for_change(memory_->taken, seen);
      continue;
    }
    std::memcpy(memory_->data() + at, bytes.data(), count);
    bytes.remove_prefix(count);
    memory_->place.store(place + count, std::memory_order_release);
    change(memory_->written);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RingReader>> RingReader::open(const std::string& path, int64_t reader) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat found {};
  const bool there =
      descriptor >= 0 && ::fstat(descriptor, &found) == 0 && found.st_size > static_cast<off_t>(sizeof(RingMemory));
  const int64_t bytes = there ? found.st_size - static_cast<int64_t>(sizeof(RingMemory)) : 0;
  void* const at = there ? map(descriptor, bytes) : MAP_FAILED;
  if (descriptor >= 0) ::close(descriptor);  // the mapping holds it
  if (at == MAP_FAILED) return absl::UnavailableError(absl::StrCat("there is no ring at ", path));
  auto* const memory = static_cast<RingMemory*>(at);
  const bool fits = memory->magic == RingMemory::kMagic && memory->size == static_cast<uint64_t>(bytes);
  if (!fits || reader < 0 || reader >= memory->readers) {
    ::munmap(at, mapped_bytes(bytes));
    return invalid("the ring at ", path, " has no reader ", reader);
  }
  const int writer = open_process(memory->writer);
  memory->reader[reader].process.store(::getpid(), std::memory_order_release);
  return std::unique_ptr<RingReader>(new RingReader(memory, bytes, reader, writer));
}

RingReader::RingReader(RingMemory* memory, int64_t bytes, int64_t reader, int writer)
    : memory_(memory), bytes_(bytes), reader_(reader), writer_(writer) {}

RingReader::~RingReader() {
  memory_->reader[reader_].closed.store(1, std::memory_order_release);
  change(memory_->taken);
  ::munmap(memory_, mapped_bytes(bytes_));
  if (writer_ >= 0) ::close(writer_);
}

absl::StatusOr<std::string> RingReader::read() {
  uint64_t length = 0;
  PARVL_RETURN_IF_ERROR(take(reinterpret_cast<char*>(&length), sizeof length));
  PARVL_CHECK(length <= static_cast<uint64_t>(kMaxRingMessage), "a ring's message has no length");
  std::string out(length, '\0');
  PARVL_RETURN_IF_ERROR(take(out.data(), length));
  return out;
}

absl::Status RingReader::take(char* out, uint64_t count) {
  std::atomic<uint64_t>& own = memory_->reader[reader_].place;
  while (count > 0) {
    const uint32_t seen = memory_->written.load(std::memory_order_acquire);
    const bool closed = memory_->closed.load(std::memory_order_acquire) != 0;
    const uint64_t place = own.load(std::memory_order_relaxed);
    const uint64_t there = memory_->place.load(std::memory_order_acquire) - place, at = place % memory_->size;
    const uint64_t part = std::min({count, there, memory_->size - at});
    if (part == 0) {
      if (closed) return absl::UnavailableError("the ring was closed");
      // The process may have ended after its last message: that one is still to be read.
      if (has_ended(writer_) && memory_->place.load(std::memory_order_acquire) == place) {
        return absl::UnavailableError("the writer of a ring is gone");
      }
      wait_for_change(memory_->written, seen);
      continue;
    }
    std::memcpy(out, memory_->data() + at, part);
    out += part;
    count -= part;
    own.store(place + part, std::memory_order_release);
    change(memory_->taken);
  }
  return absl::OkStatus();
}

}  // namespace parvl
