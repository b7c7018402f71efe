// What a request brings, and so which queue it waits in.
#pragma once

#include <array>
#include <cstddef>

namespace parvl {

enum class QueueKind { kText, kImage, kVideo, kAudio, kMixed };
inline constexpr std::array<const char*, 5> kQueueNames = {"text", "image", "video", "audio", "mixed"};
constexpr size_t index_of(QueueKind kind) { return static_cast<size_t>(kind); }

}  // namespace parvl
