#include "parvl/media/added_tokens.h"

#include <algorithm>

#include "parvl/media/unicode.h"

namespace parvl {
namespace {

uint64_t edge(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<unsigned char>(byte); }

// The character that ends just before `at`, or nothing valid.
Utf8Step step_before(std::string_view text, size_t at) {
  for (size_t length = 1; length <= 4 && length <= at; ++length) {
    const Utf8Step step = utf8_step(text, at - length);
    if (step.kind == Utf8Step::Kind::kValid && step.length == length) return step;
  }
  return {};
}

bool is_word_at(const Utf8Step& step) { return step.kind == Utf8Step::Kind::kValid && is_word_character(step.code); }
bool is_space_at(const Utf8Step& step) { return step.kind == Utf8Step::Kind::kValid && is_white_space(step.code); }

bool touches_a_word(std::string_view text, TextRange range) {
  return (range.begin > 0 && is_word_at(step_before(text, range.begin))) ||
         (range.end < text.size() && is_word_at(utf8_step(text, range.end)));
}

}  // namespace

void AddedTokenMatcher::add(const AddedToken& token) {
  if (token.content.empty()) return;
  uint32_t node = 0;
  for (const char byte : token.content) {
    const auto [it, is_new] = next_.try_emplace(edge(node, byte), static_cast<uint32_t>(ends_.size()));
    if (is_new) ends_.push_back(-1);
    node = it->second;
  }
  ends_[node] = static_cast<int>(tokens_.size());
  tokens_.push_back(token);
}

int AddedTokenMatcher::longest_at(std::string_view text, size_t at,
                                  const std::function<bool(TextRange)>& may_match) const {
  int best = -1;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto it = next_.find(edge(node, text[i]));
    if (it == next_.end()) break;
    node = it->second;
    if (ends_[node] >= 0 && may_match({at, i + 1})) best = ends_[node];
  }
  return best;
}

std::vector<AddedTokenMatcher::Piece> AddedTokenMatcher::cut(std::string_view text,
                                                             const std::function<bool(TextRange)>& may_match) const {
  std::vector<Piece> pieces;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const int found = longest_at(text, at, may_match);
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(found)];
    TextRange range{at, at + token.content.size()};
    at = range.end;
    if (token.single_word && touches_a_word(text, range)) continue;
    while (token.lstrip && range.begin > done && is_space_at(step_before(text, range.begin))) {
      range.begin -= step_before(text, range.begin).length;
    }
    while (token.rstrip && range.end < text.size() && is_space_at(utf8_step(text, range.end))) {
      range.end += utf8_step(text, range.end).length;
    }
    range.begin = std::max(range.begin, done);
    if (range.begin > done) pieces.push_back({-1, {done, range.begin}});
    pieces.push_back({token.id, range});
    done = range.end;
    at = std::max(at, done);
  }
  if (done < text.size()) pieces.push_back({-1, {done, text.size()}});
  return pieces;
}

}  // namespace parvl
