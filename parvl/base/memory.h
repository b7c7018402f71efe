// This process's memory.
#pragma once

#include <cstdint>

namespace parvl {

int64_t resident_bytes();       // now; 0 where the system does not say
int64_t peak_resident_bytes();  // the most since the process started

}  // namespace parvl
