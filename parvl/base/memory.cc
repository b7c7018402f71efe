#include "parvl/base/memory.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace parvl {

int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  long long total = 0, resident = 0;
  const int fields = std::fscanf(file, "%lld %lld", &total, &resident);
  std::fclose(file);
  return fields == 2 ? static_cast<int64_t>(resident) * sysconf(_SC_PAGESIZE) : 0;
}

int64_t available_bytes() {
  std::FILE* file = std::fopen("/proc/meminfo", "r");
  if (file == nullptr) return 0;
  long long kilobytes = 0;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr &&
         std::sscanf(line, "MemAvailable: %lld kB", &kilobytes) != 1) {
  }
  std::fclose(file);
  return static_cast<int64_t>(kilobytes) * 1024;
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
