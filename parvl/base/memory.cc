#include "parvl/base/memory.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>

namespace parvl {

namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<int64_t> number_after(const std::string& text, const std::string& name) {
  const size_t at = text.find(name);
  long long value = 0;
  if (at == std::string::npos || std::sscanf(text.c_str() + at + name.size(), "%lld", &value) != 1) return std::nullopt;
  return value;
}

// What a control group leaves: its limit without what is used and cannot be dropped. nullopt: no limit.
std::optional<int64_t> room_in_group(const std::string& folder, bool version2) {
  const auto limit = number_after(text_of(folder + (version2 ? "/memory.max" : "/memory.limit_in_bytes")), "");
  const auto used = number_after(text_of(folder + (version2 ? "/memory.current" : "/memory.usage_in_bytes")), "");
  if (!limit.has_value() || !used.has_value()) return std::nullopt;
  const auto cache = number_after(text_of(folder + "/memory.stat"), version2 ? "inactive_file" : "total_inactive_file");
  return std::max<int64_t>(0, *limit - (*used - std::min(*used, cache.value_or(0))));
}

}  // namespace

int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  long long total = 0, resident = 0;
  const int fields = std::fscanf(file, "%lld %lld", &total, &resident);
  std::fclose(file);
  return fields == 2 ? static_cast<int64_t>(resident) * sysconf(_SC_PAGESIZE) : 0;
}

int64_t available_bytes() { return available_bytes_under(""); }

int64_t available_bytes_under(const std::string& root) {
  int64_t available = 0;
  const std::string meminfo = text_of(root + "/proc/meminfo");
  if (const auto kilobytes = number_after(meminfo, "MemAvailable:")) available = *kilobytes * 1024;
  // Lines "ID:CONTROLLERS:PATH". Version 2 has no controllers; a group is bounded by those above it too.
  const std::string groups = text_of(root + "/proc/self/cgroup");
  for (size_t begin = 0; begin < groups.size();) {
    const size_t end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string base = root + (version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (const auto room = room_in_group(base + path, version2)) available = std::min(available, *room);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return available;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  return getrusage(RUSAGE_SELF, &usage) == 0 ? static_cast<int64_t>(usage.ru_maxrss) * 1024 : 0;
}

void tune_memory() {
  setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  // oneDNN and its wrapper in libtorch keep about half a megabyte for each shape of a bfloat16 product, 1024 shapes
  // each, and steps of new lengths bring new shapes. One step's shapes are enough: the layers share them.
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64", /*overwrite=*/0);
  setenv("LRU_CACHE_CAPACITY", "64", /*overwrite=*/0);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value that glibc takes
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

}  // namespace parvl
