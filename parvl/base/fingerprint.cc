#include "parvl/base/fingerprint.h"

#include <absl/strings/str_join.h>
#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "parvl/base/file.h"

namespace parvl {
namespace {

bool is_part_of_model(std::string_view name) {
  constexpr std::string_view kEndings[] = {".safetensors", ".json", ".jinja", ".txt", ".model"};
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [name](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

absl::StatusOr<std::string> fingerprint_model(const std::string& dir) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(dir.c_str()), ::closedir);
  if (folder == nullptr) {
    const int error = errno;
    const std::string why = absl::StrCat("cannot open ", dir, ": ", std::strerror(error));
    return error == ENOENT || error == ENOTDIR ? absl::NotFoundError(why) : absl::InvalidArgumentError(why);
  }
  std::vector<std::string> lines;
  while (const dirent* const entry = ::readdir(folder.get())) {
    const std::string name = entry->d_name;
    struct stat found {};
    if (!is_part_of_model(name) || ::stat((dir + "/" + name).c_str(), &found) != 0 || !S_ISREG(found.st_mode)) continue;
    lines.push_back(absl::StrCat(name, "/", found.st_size, " ", found.st_mtim.tv_sec, ".", found.st_mtim.tv_nsec, " ",
                                 found.st_dev, ":", found.st_ino, "\n"));
  }
  std::sort(lines.begin(), lines.end());
  return sha256_hex(absl::StrCat(lines.size(), "\n", absl::StrJoin(lines, "")));
}

}  // namespace parvl
