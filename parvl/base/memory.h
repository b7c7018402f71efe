// This process's memory.
#pragma once

#include <cstdint>

namespace parvl {

int64_t resident_bytes();       // now; 0 where the system does not say
int64_t peak_resident_bytes();  // the most since the process started

// From here on freed blocks of up to 32 MiB stay with the process for the next allocation, instead of going back to the
// system and being cleared page by page when they are asked for again. Call once, at the start of a program that
// computes.
void keep_freed_memory();

}  // namespace parvl
