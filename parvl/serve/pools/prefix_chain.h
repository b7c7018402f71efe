// A prompt's blocks as hashes, for the choice of an instance that has them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "parvl/media/prompt.h"

namespace parvl {

// A hash for each whole block of `block_tokens`, of all tokens, images and the salt up to its end; see PrefixIndex.
// Equal in every process and run. No defence against whoever makes collisions: a wrong guess costs time alone.
std::vector<uint64_t> prefix_chain(const Prompt& prompt, std::string_view salt, int64_t block_tokens);
uint64_t image_hash(const ProcessedImage& image);  // equal for equal images of a known source

}  // namespace parvl
