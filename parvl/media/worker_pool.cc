#include "parvl/media/worker_pool.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "parvl/media/worker_protocol.h"

namespace parvl {
namespace {

constexpr int kWorkerSocket = 3;                       // its descriptor in the worker
constexpr int64_t kMaxReplyFloats = int64_t{1} << 29;  // a worker that was taken over must not make us allocate more
constexpr uint32_t kMaxReplyText = 2000;

absl::Status unusable(const std::string& why) { return invalid("its decoding was given up: ", why); }

// Nothing in a picture makes its worker end by SIGKILL; a person does, or the kernel when the machine lacks memory.
absl::Status why_it_died(int ended) {
  if (ended != -1 && WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL) {
    return absl::UnavailableError("the process that was decoding it was killed from outside; try again");
  }
  return unusable("the decoder died over it (a broken file, or too much memory)");
}

WorkerRequest make_request(std::string_view file, const ImageLimits& limits, const ImageProcessorConfig& config) {
  WorkerRequest out;
  out.file_bytes = file.size();
  out.max_bytes = limits.max_bytes;
  out.max_pixels = limits.max_pixels;
  out.patch_size = config.patch_size;
  out.temporal_patch_size = config.temporal_patch_size;
  out.merge_size = config.merge_size;
  out.resample = config.resample;
  out.processor_min_pixels = config.min_pixels;
  out.processor_max_pixels = config.max_pixels;
  out.do_resize = config.do_resize;
  out.do_rescale = config.do_rescale;
  out.do_normalize = config.do_normalize;
  out.rescale_factor = config.rescale_factor;
  std::copy_n(config.mean.begin(), 3, out.mean);
  std::copy_n(config.std.begin(), 3, out.std);
  return out;
}

// Whether the numbers fit together; a worker that a picture took over could say anything.
bool plausible(const WorkerReply& r) {
  constexpr int32_t kMaxSide = 1 << 16;
  for (const int32_t side : {r.grid_t, r.grid_h, r.grid_w, r.patch_floats}) {
    if (side < 1 || side > kMaxSide) return false;
  }
  if (r.merge_size < 1 || r.grid_h % r.merge_size != 0 || r.grid_w % r.merge_size != 0) return false;
  const int64_t patches = int64_t{r.grid_t} * r.grid_h * r.grid_w;
  return patches <= kMaxReplyFloats / r.patch_floats;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MediaWorkerPool>> MediaWorkerPool::start(MediaWorkerOptions options,
                                                                        const Clock& clock) {
  std::unique_ptr<MediaWorkerPool> pool(new MediaWorkerPool(std::move(options), clock));
  pool->workers_.resize(static_cast<size_t>(std::max(1, pool->options_.workers)));
  PARVL_RETURN_IF_ERROR(pool->spawn(pool->workers_.front()));
  return pool;
}

MediaWorkerPool::~MediaWorkerPool() {
  for (Worker& worker : workers_) kill(worker);
}

std::vector<pid_t> MediaWorkerPool::pids() const {
  std::lock_guard lock(mutex_);
  std::vector<pid_t> out;
  for (const Worker& worker : workers_) {
    if (worker.pid > 0) out.push_back(worker.pid);
  }
  return out;
}

absl::Status MediaWorkerPool::spawn(Worker& worker) const {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return failed("cannot make a socket for a media worker: ", std::strerror(errno));
  }
  // Moved out of the way first: dup2 onto itself would leave close-on-exec set.
  const int theirs = ::fcntl(sockets[1], F_DUPFD_CLOEXEC, 64);
  ::close(sockets[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs, kWorkerSocket);
  const std::string socket = std::to_string(kWorkerSocket), memory = std::to_string(options_.memory_bytes);
  char* const argv[] = {const_cast<char*>(options_.program.c_str()), const_cast<char*>(socket.c_str()),
                        const_cast<char*>(memory.c_str()), nullptr};
  char* const environment[] = {nullptr};  // nothing of ours is its business
  const int error = ::posix_spawn(&worker.pid, options_.program.c_str(), &actions, nullptr, argv, environment);
  posix_spawn_file_actions_destroy(&actions);
  ::close(theirs);
  worker.socket = sockets[0];
  if (error != 0) {
    worker.pid = -1;
    kill(worker);
    return failed("cannot start the media worker ", options_.program, ": ", std::strerror(error));
  }
  char ready = 0;
  const Until until{&clock_, clock_.now_ns() + std::chrono::nanoseconds(options_.timeout).count()};
  if (receive_all(worker.socket, &ready, 1, until).ok()) return absl::OkStatus();
  kill(worker);
  return failed("the media worker ", options_.program, " did not start; its reason is on standard error");
}

int MediaWorkerPool::kill(Worker& worker) {
  int ended = -1;
  if (worker.socket >= 0) ::close(worker.socket);
  if (worker.pid > 0) {
    ::kill(worker.pid, SIGKILL);  // of no effect on one that is ending already: its socket closes after its fate is set
    while (::waitpid(worker.pid, &ended, 0) < 0 && errno == EINTR) {
    }
  }
  worker.socket = -1;
  worker.pid = -1;
  return ended;
}

absl::StatusOr<ProcessedImage> MediaWorkerPool::prepare(std::string_view file, const ImageLimits& limits,
                                                        const ImageProcessor& processor) {
  if (file.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it has ", file.size(), " bytes, over the limit of ", limits.max_bytes));
  }
  const size_t index = borrow();
  Worker worker = workers_[index];  // busy: nobody else touches it
  absl::StatusOr<ProcessedImage> out = unusable("no worker");
  // One that died while it had nothing to do must not cost this picture.
  if (worker.pid > 0 && ::waitpid(worker.pid, nullptr, WNOHANG) != 0) {
    worker.pid = -1;
    kill(worker);
  }
  const absl::Status started = worker.pid > 0 ? absl::OkStatus() : spawn(worker);
  if (started.ok()) {
    Talk talk{worker, {&clock_, clock_.now_ns() + std::chrono::nanoseconds(options_.timeout).count()}};
    absl::Status status = ask(talk, make_request(file, limits, processor.config()), file);
    absl::Status no_room;
    if (status.ok()) {
      auto memory = options_.store->reserve(talk.image);
      no_room = memory.status();
      if (memory.ok()) talk.memory = *std::move(memory);
      status = fill(talk);
    }
    // What it said may be half of an answer: only a whole one leaves it fit for the next picture.
    const bool died = absl::IsUnavailable(status), late = absl::IsDeadlineExceeded(status);
    const int ended = died || late || absl::IsInternal(status) ? kill(worker) : -1;
    if (died) status = why_it_died(ended);
    if (late) status = unusable("it took too long");
    status.Update(no_room);
    if (status.ok()) {
      out = std::move(talk.image);
    } else {
      out = status;
    }
  } else {
    out = started;
  }
  give_back(index, worker);
  return out;
}

size_t MediaWorkerPool::borrow() {
  std::unique_lock lock(mutex_);
  const auto is_free = [](const Worker& worker) { return !worker.busy; };
  freed_.wait(lock, [&] { return std::any_of(workers_.begin(), workers_.end(), is_free); });
  const auto worker = std::find_if(workers_.begin(), workers_.end(), is_free);
  worker->busy = true;
  return static_cast<size_t>(worker - workers_.begin());
}

void MediaWorkerPool::give_back(size_t index, Worker worker) {
  worker.busy = false;
  {
    std::lock_guard lock(mutex_);
    workers_[index] = worker;
  }
  freed_.notify_one();
}

absl::StatusOr<WorkerReply> MediaWorkerPool::read_reply(const Talk& talk) {
  WorkerReply reply;
  PARVL_RETURN_IF_ERROR(receive_all(talk.worker.socket, &reply, sizeof reply, talk.until));
  received_ += static_cast<int64_t>(sizeof reply);
  if (reply.code == 0) return reply;
  if (reply.text_bytes > kMaxReplyText) return failed("a media worker answered nonsense");
  std::string text(reply.text_bytes, '\0');
  PARVL_RETURN_IF_ERROR(receive_all(talk.worker.socket, text.data(), text.size(), talk.until));
  received_ += static_cast<int64_t>(text.size());
  const bool over_limit = reply.code == static_cast<int32_t>(absl::StatusCode::kResourceExhausted);
  return over_limit ? absl::ResourceExhaustedError(text) : invalid(text);
}

// Unavailable, DeadlineExceeded or Internal when the worker cannot be used any more; else its answer.
absl::Status MediaWorkerPool::ask(Talk& talk, const WorkerRequest& request, std::string_view file) {
  PARVL_RETURN_IF_ERROR(send_all(talk.worker.socket, &request, sizeof request, talk.until));
  PARVL_RETURN_IF_ERROR(send_all(talk.worker.socket, file.data(), file.size(), talk.until));
  sent_ += static_cast<int64_t>(sizeof request + file.size());
  PARVL_ASSIGN_OR_RETURN(const WorkerReply reply, read_reply(talk));
  ProcessedImage& image = talk.image;
  image.grid_t = reply.grid_t;
  image.grid_h = reply.grid_h;
  image.grid_w = reply.grid_w;
  image.patch_floats = reply.patch_floats;
  image.merge_size = reply.merge_size;
  std::memcpy(image.key.data(), reply.key, sizeof reply.key);
  return plausible(reply) ? absl::OkStatus() : failed("a media worker answered nonsense");
}

// It writes the patches where they are to lie. Errors as ask().
absl::Status MediaWorkerPool::fill(Talk& talk) {
  WorkerMemory memory;
  if (talk.memory != nullptr) memory.bytes = static_cast<uint64_t>(talk.image.num_values()) * sizeof(float);
  const int descriptor = talk.memory == nullptr ? -1 : talk.memory->descriptor();
  PARVL_RETURN_IF_ERROR(send_memory(talk.worker.socket, memory, descriptor, talk.until));
  sent_ += static_cast<int64_t>(sizeof memory);
  if (talk.memory == nullptr) return absl::OkStatus();
  PARVL_ASSIGN_OR_RETURN(const WorkerReply reply, read_reply(talk));
  return with_context(talk.memory->finish(reply.checksum, talk.image), "its patches");
}

}  // namespace parvl
