// parvl-media-worker: started by `parvl serve`, answers on one socket and can do nothing else.
#include <absl/strings/numbers.h>

#include <cstdio>

#include "parvl/base/signal.h"
#include "parvl/media/worker_pool.h"

int main(int argc, char** argv) {
  int socket = -1;
  int64_t memory = 0;
  if (argc != 3 || !absl::SimpleAtoi(argv[1], &socket) || !absl::SimpleAtoi(argv[2], &memory)) {
    std::fprintf(stderr, "parvl-media-worker is started by `parvl serve`: SOCKET MEMORY_BYTES\n");
    return 2;
  }
  parvl::ignore_broken_pipes();
  const absl::Status status = parvl::run_media_worker(socket, memory);
  if (!status.ok()) std::fprintf(stderr, "parvl-media-worker: %s\n", std::string(status.message()).c_str());
  return parvl::exit_code(status);
}
