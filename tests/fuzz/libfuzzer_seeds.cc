// Hands fuzz_seeds() to libFuzzer, which takes folders of files only.
#include <filesystem>
#include <fstream>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (fuzz_seeds == nullptr) return 0;
  for (int i = 1; i < *argc; ++i) {
    if (std::filesystem::is_regular_file((*argv)[i])) return 0;  // one input is tried again
  }
  static std::string folder = (std::filesystem::temp_directory_path() / "parvl-seeds-XXXXXX").string();
  FUZZ_REQUIRE(mkdtemp(folder.data()) != nullptr);
  int number = 0;
  for (const std::string& seed : fuzz_seeds()) {
    std::ofstream(folder + "/" + std::to_string(number++), std::ios::binary) << seed;
  }
  static std::vector<char*> arguments(*argv, *argv + *argc);
  arguments.push_back(folder.data());
  arguments.push_back(nullptr);
  *argv = arguments.data();
  ++*argc;
  return 0;
}
