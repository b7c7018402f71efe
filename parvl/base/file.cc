#include "parvl/base/file.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "parvl/base/file_descriptor.h"

namespace parvl {
namespace {

absl::Status errno_status(const std::string& action, const std::string& path, int error) {
  const std::string message = absl::StrCat("cannot ", action, " ", path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  if (error == EACCES || error == EPERM || error == EISDIR) return absl::InvalidArgumentError(message);
  return absl::InternalError(message);
}

std::string hex(const unsigned char* bytes, size_t count) {
  static const char* kDigits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    out += kDigits[bytes[i] >> 4];
    out += kDigits[bytes[i] & 15];
  }
  return out;
}

// Opens a plain file and says its size.
absl::StatusOr<size_t> open_plain(const std::string& path, FileDescriptor& out) {
  out = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!out) return errno_status("open", path, errno);
  struct stat info;
  if (::fstat(out.get(), &info) != 0) return errno_status("read", path, errno);
  if (!S_ISREG(info.st_mode)) return invalid(path, " is not a plain file");
  return static_cast<size_t>(info.st_size);
}

}  // namespace

absl::StatusOr<std::string> read_file(const std::string& path, size_t max_bytes) {
  FileDescriptor file;
  PARVL_ASSIGN_OR_RETURN(const size_t size, open_plain(path, file));
  if (size > max_bytes) return invalid(path, " has ", size, " bytes, over the limit of ", max_bytes);
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(file.get(), content.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_status("read", path, errno);
    if (n == 0) return failed(path, " became shorter while it was read");
    done += static_cast<size_t>(n);
  }
  return content;
}

struct FileWriter::State {
  std::string path;
  int fd = -1;
  ~State() {
    if (fd >= 0) ::close(fd);
  }
};

FileWriter::FileWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
FileWriter::~FileWriter() = default;

absl::StatusOr<std::unique_ptr<FileWriter>> FileWriter::create(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (state->fd < 0) return errno_status("create", path, errno);
  return std::unique_ptr<FileWriter>(new FileWriter(std::move(state)));
}

absl::Status FileWriter::append(const void* data, size_t bytes) {
  const char* cursor = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(state_->fd, cursor, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_status("write", state_->path, errno);
    cursor += n;
    bytes -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status FileWriter::finish() {
  if (::fsync(state_->fd) != 0) return errno_status("write", state_->path, errno);
  const int fd = state_->fd;
  state_->fd = -1;
  if (::close(fd) != 0) return errno_status("write", state_->path, errno);
  return absl::OkStatus();
}

absl::Status write_file_atomically(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".tmp";
  absl::Status status = [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(auto writer, FileWriter::create(temporary));
    PARVL_RETURN_IF_ERROR(writer->append(content.data(), content.size()));
    return writer->finish();
  }();
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) status = errno_status("replace", path, errno);
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

absl::Status sync_directory(const std::string& path) {
  const FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return errno_status("open", path, errno);
  if (::fsync(directory.get()) != 0) return errno_status("sync", path, errno);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  FileDescriptor file;
  PARVL_ASSIGN_OR_RETURN(const size_t size, open_plain(path, file));
  if (size == 0) return invalid(path, " is empty");
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return errno_status("map", path, errno);
  return std::shared_ptr<MappedFile>(new MappedFile(static_cast<const char*>(data), size));
}

void MappedFile::drop(size_t offset, size_t bytes) const {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
  if (begin < end) ::madvise(const_cast<char*>(data_) + begin, end - begin, MADV_DONTNEED);
}

MappedFile::~MappedFile() { ::munmap(const_cast<char*>(data_), size_); }

std::array<uint8_t, 32> sha256(std::string_view bytes) {
  std::array<uint8_t, 32> digest{};
  EVP_Digest(bytes.data(), bytes.size(), digest.data(), nullptr, EVP_sha256(), nullptr);
  return digest;
}

std::string sha256_hex(std::string_view bytes) {
  const auto digest = sha256(bytes);
  return hex(digest.data(), digest.size());
}

absl::StatusOr<std::string> sha256_file(const std::string& path) {
  FileDescriptor file;
  PARVL_RETURN_IF_ERROR(open_plain(path, file).status());
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> hash(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  EVP_DigestInit_ex(hash.get(), EVP_sha256(), nullptr);
  std::string piece(size_t{1} << 20, '\0');
  for (;;) {
    const ssize_t n = ::read(file.get(), piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_status("read", path, errno);
    if (n == 0) break;
    EVP_DigestUpdate(hash.get(), piece.data(), static_cast<size_t>(n));
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_DigestFinal_ex(hash.get(), digest, &length);
  return hex(digest, length);
}

}  // namespace parvl
