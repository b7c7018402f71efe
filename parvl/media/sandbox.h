// A process that reads what strangers send gives up what it does not need.
#pragma once

#include <cstdint>

#include "parvl/base/status.h"

namespace parvl {

// A build with AddressSanitizer, as GCC and as Clang say it.
#if defined(__SANITIZE_ADDRESS__)
#define PARVL_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PARVL_ADDRESS_SANITIZER
#endif
#endif

// Whether give_up_rights bounds memory: not in a build with AddressSanitizer, whose own maps take terabytes of address
// space.
#if defined(PARVL_ADDRESS_SANITIZER)
inline constexpr bool kSandboxBoundsMemory = false;
#else
inline constexpr bool kSandboxBoundsMemory = true;
#endif

// From now on this process can compute in up to `memory_bytes` of address space and read and write descriptor `keep`
// and standard error; every other descriptor is closed, and opening files, making sockets and starting processes fail
// with EPERM. Cannot be undone. An error when the kernel lacks seccomp; the process may then have given up a part.
absl::Status give_up_rights(int64_t memory_bytes, int keep);

}  // namespace parvl
