#include "parvl/exec/record_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

#include "parvl/base/log.h"

namespace parvl {
namespace {

class RecordFile {
 public:
  RecordFile(std::string path, int64_t max_bytes)
      : path_(std::move(path)), max_bytes_(max_bytes), file_(path_, std::ios::binary | std::ios::trunc) {}

  bool good() const { return file_.good(); }

  void write(std::string_view line) {
    if (!file_.is_open()) return;
    const int64_t size = bytes_ + static_cast<int64_t>(line.size());
    if (size >= max_bytes_) {
      file_.write(line.data(), 1).flush();  // a last line that is cut: to `parvl replay`, a record that ended early
      return end(absl::StrCat("it has reached ", max_bytes_, " bytes (--record-max-bytes)"));
    }
    errno = 0;
    if (!file_.write(line.data(), static_cast<std::streamsize>(line.size())).flush()) {
      return end(errno != 0 ? std::strerror(errno) : "the disk fails");
    }
    bytes_ = size;
  }

 private:
  void end(const std::string& why) {
    file_.close();
    log_warning("the record ", path_, " ends here, and later events are not in it: ", why);
  }

  const std::string path_;
  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  std::ofstream file_;
};

}  // namespace

absl::StatusOr<RecordedScheduler::Write> record_to(const std::string& path, int64_t max_bytes) {
  auto file = std::make_shared<RecordFile>(path, max_bytes);
  if (!file->good()) return invalid("cannot write the record ", path, ": ", std::strerror(errno));
  return RecordedScheduler::Write([file](std::string_view line) { file->write(line); });
}

}  // namespace parvl
