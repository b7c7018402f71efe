// A tokenizer.json as data: what tokenizer.cc works from.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/status.h"
#include "parvl/media/added_tokens.h"
#include "parvl/media/bpe.h"
#include "parvl/media/split.h"

namespace parvl {

struct TokenizerFile {
  bool nfc = false;
  std::vector<SplitStep> splits;  // in order, each on the parts that the one before made
  bool add_prefix_space = false;
  // The last step of a ByteLevel pre-tokenizer that cuts words itself; null: it does not.
  std::shared_ptr<const SplitPattern> byte_level_pattern;
  BpeModel model;
  std::vector<AddedToken> added;
  std::vector<TokenId> prefix, suffix;  // what the post-processor puts around a single text
  // By id: the bytes a token stands for. By text as the file spells it: the id.
  std::vector<std::string> bytes;
  absl::flat_hash_map<std::string, TokenId> id_by_text;
};

// Errors name the part of the file that is wrong or not supported.
absl::StatusOr<std::unique_ptr<TokenizerFile>> read_tokenizer_file(const Json& json);

}  // namespace parvl
