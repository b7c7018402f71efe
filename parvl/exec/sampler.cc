#include "parvl/exec/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parvl/base/check.h"
#include "parvl/base/rng.h"

namespace parvl {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Peak {
  float logit = kNegativeInfinity;
  TokenId id = 0;
};

// The largest logit (lowest id among equals), or why there is none.
absl::StatusOr<Peak> find_peak(absl::Span<const float> logits) {
  Peak peak;
  bool broken = false;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float x = logits[i];
    broken |= !(x <= std::numeric_limits<float>::max());  // NaN or +infinity
    if (x > peak.logit) peak = {x, static_cast<TokenId>(i)};
  }
  if (broken) {
    return failed("the model gave a logit that is not a number (NaN or infinity); check its weights and the dtype");
  }
  if (peak.logit == kNegativeInfinity) return failed("no token may be chosen: every logit is minus infinity");
  return peak;
}

// The same of logits that the request's fields have edited. The model's own were fine, so what is wrong is the request.
absl::StatusOr<Peak> find_edited_peak(absl::Span<const float> logits) {
  const absl::StatusOr<Peak> peak = find_peak(logits);
  if (peak.ok()) return peak;
  return invalid(
      "no token may be chosen: min_tokens, logit_bias, a penalty or response_format of the request leaves no ",
      "usable logit");
}

bool likelier(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Keeps the k likeliest and what equals the last of them, as transformers and vLLM do.
void cut_to_top_k(std::vector<Sampler::Candidate>& candidates, size_t k) {
  if (candidates.size() <= k) return;
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), likelier);
  const float last = candidates[k - 1].logit;
  const auto below = [last](const Sampler::Candidate& c) { return c.logit < last; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), below), candidates.end());
}

}  // namespace

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kNone:
      break;
  }
  return "";
}

double gumbel_noise(uint64_t seed, int64_t position, TokenId token) {
  return -std::log(-std::log(philox_uniform(seed, static_cast<uint64_t>(position), static_cast<uint64_t>(token))));
}

Sampler::Sampler(SamplingParams params, absl::Span<const TokenId> end_tokens, absl::Span<const TokenId> prompt)
    : params_(std::move(params)),
      banned_(end_tokens.begin(), end_tokens.end()),
      position_(static_cast<int64_t>(prompt.size())) {
  banned_.insert(banned_.end(), params_.stop_token_ids.begin(), params_.stop_token_ids.end());
  if (params_.repetition_penalty != 1.0) seen_.insert(prompt.begin(), prompt.end());
}

void Sampler::accept(TokenId token) {
  ++position_;
  ++output_count_;
  if (params_.repetition_penalty != 1.0) seen_.insert(token);
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) ++output_counts_[token];
}

bool Sampler::edits_logits() const {
  return below_min_tokens() || !params_.logit_bias.empty() || !seen_.empty() || !output_counts_.empty();
}

bool Sampler::is_plain() const {
  return !edits_logits() && params_.min_p <= 0 && params_.top_k <= 0 && params_.top_p >= 1.0 &&
         params_.top_logprobs == 0;
}

// Whether all that the mask leaves is banned while fewer than min_tokens tokens are out.
bool Sampler::only_banned(absl::Span<const uint32_t> mask) const {
  std::vector<uint32_t> left(mask.begin(), mask.end());
  for (const TokenId id : banned_) {
    const size_t word = static_cast<size_t>(id) / 32;
    if (id >= 0 && word < left.size()) left[word] &= ~(uint32_t{1} << (id % 32));
  }
  return std::all_of(left.begin(), left.end(), [](uint32_t word) { return word == 0; });
}

absl::Span<const float> Sampler::edited(absl::Span<const float> logits, absl::Span<const uint32_t> mask) {
  if (!edits_logits() && mask.empty()) return logits;
  edited_.assign(logits.begin(), logits.end());
  const auto in_range = [&](TokenId id) { return id >= 0 && static_cast<size_t>(id) < edited_.size(); };
  if (below_min_tokens() && (mask.empty() || !only_banned(mask))) {
    for (TokenId id : banned_) {
      if (in_range(id)) edited_[id] = kNegativeInfinity;
    }
  }
  for (const auto& [id, bias] : params_.logit_bias) {
    if (in_range(id)) edited_[id] += static_cast<float>(bias);
  }
  const float repetition = static_cast<float>(params_.repetition_penalty);
  for (TokenId id : seen_) {
    if (in_range(id)) edited_[id] = edited_[id] < 0 ? edited_[id] * repetition : edited_[id] / repetition;
  }
  for (const auto& [id, count] : output_counts_) {
    if (!in_range(id)) continue;
    edited_[id] -= static_cast<float>(params_.frequency_penalty) * static_cast<float>(count);
    edited_[id] -= static_cast<float>(params_.presence_penalty);
  }
  if (mask.empty()) return edited_;
  for (size_t id = 0; id < edited_.size(); ++id) {
    if (id / 32 >= mask.size() || (mask[id / 32] >> (id % 32) & 1) == 0) edited_[id] = kNegativeInfinity;
  }
  return edited_;
}

// Fills candidates_ with the tokens that min_p and top_k leave. The buffer is cut back whenever it doubles, so that a
// small top_k over a large vocabulary holds few tokens and compares most of them once.
void Sampler::gather(absl::Span<const float> logits, float max) {
  candidates_.clear();
  if (params_.top_k <= 0) candidates_.reserve(logits.size());  // once, not by doubling
  const size_t k = params_.top_k > 0 ? static_cast<size_t>(params_.top_k) : logits.size();
  const double lowest = params_.min_p > 0 ? std::log(params_.min_p) * params_.temperature : 0;
  float floor = kNegativeInfinity;
  size_t cut_at = std::max<size_t>(2 * k, 256);
  for (size_t i = 0; i < logits.size(); ++i) {
    const float x = logits[i];
    if (x < floor || x == kNegativeInfinity) continue;
    if (params_.min_p > 0 && static_cast<double>(x) - max < lowest) continue;
    candidates_.push_back({x, static_cast<TokenId>(i), 0});
    if (candidates_.size() >= cut_at && k < logits.size()) {
      cut_to_top_k(candidates_, k);
      floor = std::min_element(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
                return a.logit < b.logit;
              })->logit;
      cut_at = std::max<size_t>(2 * candidates_.size(), cut_at);
    }
  }
  cut_to_top_k(candidates_, k);
  for (Candidate& c : candidates_) c.weight = std::exp((static_cast<double>(c.logit) - max) / params_.temperature);
}

// A token stays when those likelier than it hold less than top_p. Quickselect by mass: halves the open range each time.
void Sampler::keep_top_p() {
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  const double wanted = params_.top_p * total;
  size_t low = 0, high = candidates_.size();
  double before = 0;  // mass of [0, low), all likelier than the rest
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    std::nth_element(candidates_.begin() + low, candidates_.begin() + middle, candidates_.begin() + high, likelier);
    double mass = before;
    for (size_t i = low; i < middle; ++i) mass += candidates_[i].weight;
    if (mass < wanted) {
      low = middle;
      before = mass;
    } else {
      high = middle;
    }
  }
  candidates_.resize(low + 1);
}

absl::StatusOr<absl::Span<const Sampler::Candidate>> Sampler::candidates(absl::Span<const float> raw,
                                                                         absl::Span<const uint32_t> mask) {
  PARVL_CHECK(params_.temperature > 0, "a draw needs a temperature");
  PARVL_RETURN_IF_ERROR(find_peak(raw).status());
  const absl::Span<const float> logits = edited(raw, mask);
  PARVL_ASSIGN_OR_RETURN(const Peak peak, find_edited_peak(logits));
  gather(logits, peak.logit);
  if (params_.top_p < 1.0) keep_top_p();
  return absl::Span<const Candidate>(candidates_);
}

absl::StatusOr<Sampler::Choice> Sampler::choose(absl::Span<const float> logits, absl::Span<const uint32_t> mask) {
  Choice choice;
  if (params_.temperature == 0) {
    PARVL_ASSIGN_OR_RETURN(Peak peak, find_peak(logits));
    if (edits_logits() || !mask.empty()) {
      PARVL_ASSIGN_OR_RETURN(peak, find_edited_peak(edited(logits, mask)));
    }
    choice.token_id = peak.id;
  } else {
    PARVL_ASSIGN_OR_RETURN(const absl::Span<const Candidate> left, candidates(logits, mask));
    // argmax(log w + Gumbel) as a race: the smallest -log(u) / w. Since -log(u) >= 1 - u, most need no logarithm.
    double first = std::numeric_limits<double>::infinity();
    TokenId winner = -1;
    for (const Candidate& c : left) {
      const double u = philox_uniform(params_.seed, static_cast<uint64_t>(position_), static_cast<uint64_t>(c.id));
      if (1.0 - u > first * c.weight) continue;
      const double arrival = -std::log(u) / c.weight;
      if (winner < 0 || arrival < first || (arrival == first && c.id < winner)) {
        first = arrival;
        winner = c.id;
      }
    }
    choice.token_id = winner;
  }
  if (params_.logprobs) choice.logprob = token_logprob(logits, choice.token_id, params_.top_logprobs);
  return choice;
}

TokenLogprob token_logprob(absl::Span<const float> logits, TokenId token, int64_t top) {
  PARVL_CHECK(token >= 0 && static_cast<size_t>(token) < logits.size(), "token outside the vocabulary");
  float max = kNegativeInfinity;
  for (float x : logits) max = std::max(max, x);
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  const double normaliser = max + std::log(sum);
  TokenLogprob result;
  result.token_id = token;
  result.logprob = static_cast<float>(logits[token] - normaliser);

  // A heap of the best so far, its least likely in front; ids come in order, so an equal later one is never likelier.
  const size_t wanted = std::min(static_cast<size_t>(std::max<int64_t>(top, 0)), logits.size());
  if (wanted == 0) return result;
  const auto likelier_pair = [](const std::pair<TokenId, float>& a, const std::pair<TokenId, float>& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  };
  for (size_t i = 0; i < logits.size(); ++i) {
    if (result.top.size() == wanted) {
      if (!(logits[i] > result.top.front().second)) continue;
      std::pop_heap(result.top.begin(), result.top.end(), likelier_pair);
      result.top.pop_back();
    }
    result.top.emplace_back(static_cast<TokenId>(i), logits[i]);
    std::push_heap(result.top.begin(), result.top.end(), likelier_pair);
  }
  std::sort_heap(result.top.begin(), result.top.end(), likelier_pair);
  for (auto& [id, value] : result.top) value = static_cast<float>(value - normaliser);
  return result;
}

}  // namespace parvl
