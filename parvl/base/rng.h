// Chance as a function: every random number in ParVL is a pure function of (seed, stream, counter), so a moved or
// resumed computation continues exactly. Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace parvl {

// Four independent 32-bit words for (seed, stream, counter).
std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t counter);

// A uniform double in the open interval (0, 1), 53 bits.
double philox_uniform(uint64_t seed, uint64_t stream, uint64_t counter);

// A sequence of numbers for one (seed, stream). Not thread-safe; copying copies the position.
class Rng {
 public:
  explicit Rng(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  uint64_t next();                 // 64 random bits
  uint64_t below(uint64_t bound);  // uniform in [0, bound), bound > 0, without modulo bias
  double uniform();                // (0, 1)
  double normal();                 // mean 0, variance 1

 private:
  uint64_t seed_, stream_, counter_ = 0;
};

}  // namespace parvl
