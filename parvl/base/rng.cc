#include "parvl/base/rng.h"

#include <cmath>

namespace parvl {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                               static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kM0) * x[0], p1 = static_cast<uint64_t>(kM1) * x[2];
    x = {static_cast<uint32_t>(p1 >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ x[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += kW0;
    k1 += kW1;
  }
  return x;
}

double philox_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
  const auto x = philox(seed, stream, counter);
  const uint64_t bits = (static_cast<uint64_t>(x[0]) << 32 | x[1]) >> 11;
  return (static_cast<double>(bits) + 0.5) * 0x1.0p-53;
}

uint64_t Rng::next() {
  const auto x = philox(seed_, stream_, counter_++);
  return static_cast<uint64_t>(x[0]) << 32 | x[1];
}

uint64_t Rng::below(uint64_t bound) {
  const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
  uint64_t value;
  do {
    value = next();
  } while (value >= limit);
  return value % bound;
}

double Rng::uniform() { return philox_uniform(seed_, stream_, counter_++); }

double Rng::normal() {
  // Box–Muller, one of the pair.
  const double u = uniform(), v = uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

}  // namespace parvl
