// Memory of this process and this machine.
#pragma once

#include <cstdint>
#include <string>

namespace parvl {

int64_t resident_bytes();  // now; 0 where the system does not say
// What this process could still get: what the machine could give to programs, or less where a control group limits it.
int64_t available_bytes();
// The same by the files of /proc and /sys under `root`, for tests. 0 where the system does not say.
int64_t available_bytes_under(const std::string& root);
int64_t peak_resident_bytes();  // the most since the process started

// Memory for a program that computes; call once, first thing in main. Freed blocks of up to 32 MiB stay with the
// process for the next allocation, instead of going back to the system and being cleared page by page when they are
// asked for again; and PyTorch's large CPU tensors lie on huge pages (unless THP_MEM_ALLOC_ENABLE says otherwise):
// reading weights is a fifth faster with fewer address translations. What libtorch keeps for each shape of a product is
// bounded.
void tune_memory();

}  // namespace parvl
