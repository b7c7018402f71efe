// What a fuzz target defines. libFuzzer calls the first; the stand-alone driver also asks for seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Valid inputs to start from; a target may leave it out when a folder tests/fuzz/corpus/NAME holds some.
__attribute__((weak)) std::vector<std::string> fuzz_seeds();

// What must hold for every input. Stays on in every build.
#define FUZZ_REQUIRE(condition)                                                           \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// An error message for a user: there is one, it is short, and it is one printable line.
inline void require_good_message(const std::string& message) {
  FUZZ_REQUIRE(!message.empty() && message.size() < 2000);
  for (const char c : message) FUZZ_REQUIRE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}
