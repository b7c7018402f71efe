#include "parvl/media/bpe.h"

#include <queue>

namespace parvl {
namespace {

struct Symbol {
  TokenId id = 0;
  int32_t previous = -1;
  int32_t next = -1;
  uint32_t begin = 0;
  uint32_t length = 0;  // 0: merged into the one before it
};

// A pair that may be merged; lowest rank first, then leftmost.
struct Candidate {
  uint32_t rank;
  int32_t at;
  TokenId result;
  bool operator<(const Candidate& other) const {  // the queue gives the largest
    return rank != other.rank ? rank > other.rank : at > other.at;
  }
};

class Merger {
 public:
  explicit Merger(const BpeModel& model) : model_(model) {}

  const std::vector<Symbol>& run(std::string_view word) {
    for (size_t i = 0; i < word.size(); ++i) {
      const TokenId id = model_.of_byte[static_cast<unsigned char>(word[i])];
      if (id < 0) continue;
      const auto here = static_cast<int32_t>(symbols_.size());
      if (here > 0) symbols_.back().next = here;
      symbols_.push_back({id, here - 1, -1, static_cast<uint32_t>(i), 1});
    }
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) propose(static_cast<int32_t>(i));
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      apply(top);
    }
    return symbols_;
  }

 private:
  const BpeModel::Merge* merge_at(int32_t at) const {
    if (at < 0) return nullptr;
    const Symbol& left = symbols_[static_cast<size_t>(at)];
    if (left.length == 0 || left.next < 0) return nullptr;
    const auto it = model_.merges.find(BpeModel::pair_key(left.id, symbols_[static_cast<size_t>(left.next)].id));
    return it == model_.merges.end() ? nullptr : &it->second;
  }

  void propose(int32_t at) {
    if (const BpeModel::Merge* merge = merge_at(at)) queue_.push({merge->rank, at, merge->result});
  }

  void apply(const Candidate& candidate) {
    // The pair may have changed since it was proposed.
    const BpeModel::Merge* merge = merge_at(candidate.at);
    if (merge == nullptr || merge->result != candidate.result) return;
    Symbol& left = symbols_[static_cast<size_t>(candidate.at)];
    Symbol& right = symbols_[static_cast<size_t>(left.next)];
    left.id = candidate.result;
    left.length = right.begin + right.length - left.begin;
    left.next = right.next;
    right.length = 0;
    if (left.next >= 0) symbols_[static_cast<size_t>(left.next)].previous = candidate.at;
    propose(left.previous);
    propose(candidate.at);
  }

  const BpeModel& model_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace

void BpeModel::encode_word(std::string_view word, size_t offset, std::vector<EncodedToken>& out) const {
  if (word.empty()) return;
  if (ignore_merges) {
    if (const auto it = by_bytes.find(absl::string_view(word.data(), word.size())); it != by_bytes.end()) {
      out.push_back({it->second, offset, offset + word.size()});
      return;
    }
  }
  Merger merger(*this);
  for (const Symbol& symbol : merger.run(word)) {
    if (symbol.length == 0) continue;
    const size_t begin = offset + symbol.begin;
    out.push_back({symbol.id, begin, begin + symbol.length});
  }
}

}  // namespace parvl
