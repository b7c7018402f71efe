// A tokenizer of made-up pieces, for tests and benches of grammars.
#pragma once

#include <memory>

#include "parvl/base/json.h"
#include "parvl/media/tokenizer.h"

namespace parvl {

// `vocab`: {piece: id}, ids from 0 without gaps, spelled as byte-level BPE does. The special token "<end>" comes after
// them; nothing is merged.
inline std::shared_ptr<const Tokenizer> byte_level_tokenizer(const Json& vocab) {
  const Json end = {{"id", vocab.size()}, {"content", "<end>"},  {"single_word", false}, {"lstrip", false},
                    {"rstrip", false},    {"normalized", false}, {"special", true}};
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return *Tokenizer::from_json({{"version", "1.0"},
                                {"added_tokens", Json::array({end})},
                                {"normalizer", nullptr},
                                {"pre_tokenizer", byte_level},
                                {"post_processor", nullptr},
                                {"decoder", byte_level},
                                {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}},
                               "a made-up tokenizer");
}

}  // namespace parvl
