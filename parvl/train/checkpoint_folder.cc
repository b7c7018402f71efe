#include "parvl/train/checkpoint_folder.h"

#include <absl/strings/match.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>

#include "parvl/base/json.h"
#include "parvl/train/checkpointer.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
constexpr char kAside[] = ".replaced";

// What a process that died while saving left in OUT goes; a checkpoint that it had put aside comes back.
void clean_up(const std::string& out) {
  std::error_code error;
  std::vector<std::string> leftovers;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const std::string name = entry.path().filename().string();
    if (absl::StartsWith(name, ".step-") && absl::StrContains(name, ".tmp")) leftovers.push_back(name);
  }
  for (const std::string& name : leftovers) {
    const std::string path = out + "/" + name;
    const std::string original = out + "/" + name.substr(1, name.find(".tmp") - 1);
    if (absl::EndsWith(name, kAside) && !fs::exists(original, error)) {
      fs::rename(path, original, error);
    } else {
      fs::remove_all(path, error);
    }
  }
}

// When the checkpoint's run was started; a state that cannot be read counts as the latest, so that it is not passed
// over.
int64_t run_of(const std::string& dir) {
  const auto state = read_json_file(dir + "/" + kStateFile);
  if (!state.ok()) return std::numeric_limits<int64_t>::max();
  return json_value<int64_t>(*state, "run", 0).value_or(std::numeric_limits<int64_t>::max());
}

}  // namespace

absl::StatusOr<std::unique_ptr<OutputLock>> OutputLock::take(const std::string& out) {
  std::error_code error;
  fs::create_directories(out, error);
  if (error) return invalid("train.out: cannot make the folder ", out, ": ", error.message());
  const int descriptor = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return invalid("train.out: cannot open the folder ", out, ": ", std::strerror(errno));
  std::unique_ptr<OutputLock> lock(new OutputLock(descriptor));
  if (::access(out.c_str(), W_OK | X_OK) != 0) {
    return invalid("train.out: cannot write to the folder ", out, ": ", std::strerror(errno));
  }
  // Some network file systems have no locks; the run goes on without.
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return invalid("train.out: another process trains into ", out, "; wait for it or use another folder");
  }
  clean_up(out);
  return lock;
}

OutputLock::~OutputLock() { ::close(descriptor_); }

std::string checkpoint_dir(const std::string& out, int64_t step) { return absl::StrCat(out, "/step-", step); }

std::string unpublished_dir(const std::string& out, int64_t step, uint64_t writer) {
  return absl::StrCat(out, "/.step-", step, ".tmp-", writer);
}

std::vector<int64_t> list_checkpoints(const std::string& out) {
  std::vector<std::pair<int64_t, int64_t>> found;  // run, step
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const std::string name = entry.path().filename().string();
    if (!absl::StartsWith(name, "step-") || name.size() == 5 || name.size() > 20) continue;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos || !entry.is_directory(error)) continue;
    const int64_t step = std::stoll(name.substr(5));
    if (checkpoint_dir(out, step) == entry.path().string()) found.emplace_back(run_of(entry.path().string()), step);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<int64_t> steps;
  for (const auto& [run, step] : found) steps.push_back(step);
  return steps;
}

absl::Status publish_checkpoint(const std::string& temporary, const std::string& final_dir) {
  if (::rename(temporary.c_str(), final_dir.c_str()) == 0) return absl::OkStatus();
  if (errno == ENOTEMPTY || errno == EEXIST) {
    if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, final_dir.c_str(), RENAME_EXCHANGE) == 0) {
      return absl::OkStatus();
    }
    const std::string aside = temporary + kAside;
    if (::rename(final_dir.c_str(), aside.c_str()) == 0) {
      if (::rename(temporary.c_str(), final_dir.c_str()) == 0) {
        std::error_code ignored;  // what is left goes with the next clean-up
        fs::remove_all(aside, ignored);
        return absl::OkStatus();
      }
      const int error = errno;
      ::rename(aside.c_str(), final_dir.c_str());
      errno = error;
    }
  }
  return failed("cannot rename ", temporary, " to ", final_dir, ": ", std::strerror(errno));
}

}  // namespace parvl
