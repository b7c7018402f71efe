// Runs a fuzz target without libFuzzer: mutates seeds at random, no coverage feedback. A run is a function of its seed.
//
// usage: NAME_fuzz [-runs=N] [-max_total_time=S] [-seed=S] [-max_len=B] [FOLDER of seeds | FILE to try once]...
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "parvl/base/clock.h"
#include "parvl/base/rng.h"
#include "tests/fuzz/fuzz.h"

namespace {

using parvl::Rng;

struct Options {
  uint64_t runs = UINT64_MAX;
  double seconds = 5;
  uint64_t seed = 1;
  size_t max_bytes = 1 << 16;
  std::vector<std::string> seeds;
  std::vector<std::string> once;
};

constexpr time_t kHangSeconds = 30;

// What the crash handler reports.
const std::string* g_input = nullptr;
uint64_t g_seed = 0, g_run = 0;

void on_crash(int number) {
  char name[96];
  std::snprintf(name, sizeof(name), "crash-seed%llu-run%llu", static_cast<unsigned long long>(g_seed),
                static_cast<unsigned long long>(g_run));
  std::fprintf(stderr, "%s on run %llu of seed %llu; the input is in %s, and its first bytes are:\n",
               number == SIGPROF ? "no answer in 30 s of processor time" : strsignal(number),
               static_cast<unsigned long long>(g_run), static_cast<unsigned long long>(g_seed), name);
  if (g_input != nullptr) {
    for (size_t i = 0; i < std::min<size_t>(g_input->size(), 1000); ++i) {
      std::fprintf(stderr, "\\x%02x", static_cast<unsigned char>((*g_input)[i]));
    }
    std::fputs("\n", stderr);
    if (FILE* file = std::fopen(name, "wb")) {
      std::fwrite(g_input->data(), 1, g_input->size(), file);
      std::fclose(file);
    }
  }
  ::signal(number, SIG_DFL);
  if (number == SIGPROF) _exit(70);
  ::raise(number);
}

std::string read_whole(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

Options read_options(int argc, char** argv) {
  Options options;
  const auto value = [](const char* text, const char* name) -> const char* {
    const size_t length = std::strlen(name);
    return std::strncmp(text, name, length) == 0 ? text + length : nullptr;
  };
  for (int i = 1; i < argc; ++i) {
    if (const char* v = value(argv[i], "-runs=")) {
      options.runs = std::strtoull(v, nullptr, 10);
      options.seconds = 1e9;
    } else if (const char* v = value(argv[i], "-max_total_time=")) {
      options.seconds = std::strtod(v, nullptr);
    } else if (const char* v = value(argv[i], "-seed=")) {
      options.seed = std::strtoull(v, nullptr, 10);
    } else if (const char* v = value(argv[i], "-max_len=")) {
      options.max_bytes = std::strtoull(v, nullptr, 10);
    } else if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(argv[i])) {
        if (entry.is_regular_file()) options.seeds.push_back(entry.path().string());
      }
    } else if (std::filesystem::is_regular_file(argv[i])) {
      options.once.push_back(argv[i]);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      std::exit(2);
    }
  }
  std::sort(options.seeds.begin(), options.seeds.end());  // a folder's order is not the same everywhere
  for (std::string& seed : options.seeds) seed = read_whole(seed);
  return options;
}

// Pieces that readers of text, numbers and headers stumble over.
const char* const kPieces[] = {"{",
                               "}",
                               "[",
                               "]",
                               "\"",
                               ":",
                               ",",
                               "\\",
                               "\\u",
                               "null",
                               "true",
                               "-",
                               "1e9",
                               "1e999",
                               "0x",
                               "-1",
                               "'",
                               "\n",
                               "\r\n",
                               "\t",
                               "#",
                               "&a",
                               "*a",
                               "<<",
                               "|",
                               ">",
                               "---",
                               "\xff",
                               "\xed\xa0\x80",
                               "\xf4\x90",
                               "\\ud800",
                               "18446744073709551616",
                               "9223372036854775807",
                               "4294967296",
                               "2147483648",
                               "[[[[[[[["};
const uint64_t kNumbers[] = {
    0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};

void mutate_once(std::string& input, const std::vector<std::string>& seeds, Rng& rng) {
  const size_t at = input.empty() ? 0 : rng.below(input.size());
  const size_t length = input.empty() ? 0 : 1 + rng.below(std::min<size_t>(input.size() - at, 64));
  switch (rng.below(input.empty() ? 2 : 9)) {
    case 0:
      input.insert(at, kPieces[rng.below(std::size(kPieces))]);
      break;
    case 1: {  // a part of another seed
      const std::string& other = seeds[rng.below(seeds.size())];
      if (other.empty()) break;
      const size_t from = rng.below(other.size());
      input.insert(at, other.substr(from, 1 + rng.below(256)));
      break;
    }
    case 2:
      input[at] = static_cast<char>(input[at] ^ (1 << rng.below(8)));
      break;
    case 3:
      input[at] = static_cast<char>(rng.below(256));
      break;
    case 4:
      input.erase(at, length);
      break;
    case 5:
      input.insert(at, input.substr(at, length));
      break;
    case 6:
      input.resize(at);
      break;
    case 7: {  // a binary number of 1, 2, 4 or 8 bytes in either order
      const size_t bytes = size_t{1} << rng.below(4);
      const uint64_t number = kNumbers[rng.below(std::size(kNumbers))];
      const bool big_endian = rng.below(2) == 1;
      for (size_t i = 0; i < bytes && at + i < input.size(); ++i) {
        input[at + i] = static_cast<char>(number >> (8 * (big_endian ? bytes - 1 - i : i)));
      }
      break;
    }
    case 8: {  // another number where digits stand
      const size_t digit = input.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const size_t end = std::min(input.find_first_not_of("0123456789", digit), input.size());
      input.replace(digit, end - digit, std::to_string(kNumbers[rng.below(std::size(kNumbers))]));
      break;
    }
  }
}

// Processor time, so that a stopped or crowded machine is no hang. 0: never.
void stop_after(time_t seconds) {
  const itimerval limit{{0, 0}, {seconds, 0}};
  ::setitimer(ITIMER_PROF, &limit, nullptr);
}

void try_input(const std::string& input) {
  g_input = &input;
  stop_after(kHangSeconds);
  // A copy of exactly this size, so that a memory checker sees a read past its end.
  const std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  stop_after(0);
}

void limit_memory() {
#ifndef __SANITIZE_ADDRESS__  // it reserves terabytes
  const rlimit limit = {rlim_t{4} << 30, rlim_t{4} << 30};
  ::setrlimit(RLIMIT_AS, &limit);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  Options options = read_options(argc, argv);
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGPROF}) ::signal(number, on_crash);
  limit_memory();
  for (const std::string& path : options.once) try_input(read_whole(path));
  if (!options.once.empty()) return 0;

  if (fuzz_seeds != nullptr) {
    for (std::string& seed : fuzz_seeds()) options.seeds.push_back(std::move(seed));
  }
  if (options.seeds.empty()) {
    std::fprintf(stderr, "no seeds: define fuzz_seeds() or give a folder\n");
    return 2;
  }
  g_seed = options.seed;
  for (const std::string& seed : options.seeds) try_input(seed);
  const parvl::RealClock clock;
  const double end = clock.now_seconds() + options.seconds;
  for (g_run = 0; g_run < options.runs && clock.now_seconds() < end; ++g_run) {
    Rng rng(options.seed, g_run);
    std::string input = options.seeds[rng.below(options.seeds.size())];
    for (uint64_t i = 1 + rng.below(8); i > 0; --i) mutate_once(input, options.seeds, rng);
    if (input.size() > options.max_bytes) input.resize(options.max_bytes);
    try_input(input);
  }
  std::printf("seed %llu: %zu seeds and %llu runs, nothing found\n", static_cast<unsigned long long>(options.seed),
              options.seeds.size(), static_cast<unsigned long long>(g_run));
  return 0;
}
