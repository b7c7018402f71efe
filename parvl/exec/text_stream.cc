#include "parvl/exec/text_stream.h"

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {

bool TextStream::StopString::advance(char c) {
  while (matched > 0 && (matched == text.size() || text[matched] != c)) matched = fallback[matched];
  if (text[matched] == c) ++matched;
  return matched == text.size();
}

TextStream::TextStream(const SamplingParams& params, absl::Span<const TokenId> end_tokens)
    : end_tokens_(params.stop_token_ids), min_tokens_(params.min_tokens), max_tokens_(params.max_tokens) {
  if (!params.ignore_eos) end_tokens_.insert(end_tokens_.end(), end_tokens.begin(), end_tokens.end());
  for (const std::string& text : params.stop) {
    PARVL_CHECK(!text.empty(), "an empty stop string");
    StopString stop{text, std::vector<size_t>(text.size() + 1, 0), 0};
    for (size_t n = 1; n < text.size(); ++n) {
      size_t k = stop.fallback[n];
      while (k > 0 && text[k] != text[n]) k = stop.fallback[k];
      stop.fallback[n + 1] = text[k] == text[n] ? k + 1 : 0;
    }
    stops_.push_back(std::move(stop));
  }
}

bool TextStream::ends_text(TokenId id) const {
  return count_ > min_tokens_ && std::find(end_tokens_.begin(), end_tokens_.end(), id) != end_tokens_.end();
}

bool TextStream::find_stop(std::string_view text) {
  for (const char c : text) {
    held_ += c;
    size_t cut = 0;
    for (StopString& stop : stops_) {
      if (stop.advance(c) && count_ >= min_tokens_) cut = std::max(cut, stop.text.size());
    }
    if (cut > 0) {
      // Shorter than what waits: an undecided beginning of this length was held back in full.
      held_.resize(held_.size() - cut);
      return true;
    }
  }
  return false;
}

std::string TextStream::release() {
  size_t keep = 0;
  for (const StopString& stop : stops_) {
    // A complete one that came before min_tokens is plain text, but its end may begin another.
    keep = std::max(keep, stop.matched == stop.text.size() ? stop.fallback[stop.matched] : stop.matched);
  }
  std::string text = held_.substr(0, held_.size() - keep);
  held_.erase(0, text.size());
  return text;
}

std::string TextStream::flush() {
  find_stop(utf8_.flush());
  return std::exchange(held_, {});
}

TextStream::Delta TextStream::push(TokenId id, std::string_view bytes, bool hidden, bool last) {
  PARVL_CHECK(!finished_, "a token after the end of the text");
  ++count_;
  Delta delta;
  if (ends_text(id)) {
    delta.finish = FinishReason::kStop;
  } else if (!hidden && find_stop(utf8_.push(bytes))) {
    finished_ = true;
    return {std::exchange(held_, {}), FinishReason::kStop};
  } else if (last) {
    delta.finish = FinishReason::kStop;
  } else if (max_tokens_ >= 0 && count_ >= max_tokens_) {
    delta.finish = FinishReason::kLength;
  } else {
    delta.text = release();
    return delta;
  }
  finished_ = true;
  delta.text = flush();
  return delta;
}

}  // namespace parvl
