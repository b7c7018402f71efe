// What tests/parity/sampler_transformers.py talks to: one JSON request a line in, one answer a line out.
#include <cstdio>
#include <iostream>
#include <numeric>
#include <string>

#include "parvl/base/json.h"
#include "parvl/exec/sampler.h"

namespace parvl {
namespace {

SamplingParams read_params(const Json& json) {
  SamplingParams params;
  params.temperature = json.value("temperature", 1.0);
  params.top_k = json.value("top_k", int64_t{0});
  params.top_p = json.value("top_p", 1.0);
  params.min_p = json.value("min_p", 0.0);
  params.repetition_penalty = json.value("repetition_penalty", 1.0);
  params.presence_penalty = json.value("presence_penalty", 0.0);
  params.frequency_penalty = json.value("frequency_penalty", 0.0);
  params.min_tokens = json.value("min_tokens", int64_t{0});
  params.seed = json.value("seed", uint64_t{0});
  params.logprobs = true;
  params.top_logprobs = 5;
  const Json bias = json.value("logit_bias", Json::object());
  for (const auto& [id, value] : bias.items()) params.logit_bias[std::stoi(id)] = value.get<double>();
  return params;
}

Json answer(const Json& request) {
  const auto logits = request.at("logits").get<std::vector<float>>();
  const auto prompt = request.at("prompt").get<std::vector<TokenId>>();
  const auto end_tokens = request.at("end_tokens").get<std::vector<TokenId>>();
  Sampler sampler(read_params(request.at("params")), end_tokens, prompt);
  for (TokenId id : request.at("output").get<std::vector<TokenId>>()) sampler.accept(id);
  const auto choice = sampler.choose(logits);
  if (!choice.ok()) return {{"error", std::string(choice.status().message())}};
  Json reply = {{"token", choice->token_id}, {"logprob", choice->logprob.logprob}, {"top", choice->logprob.top}};
  if (request.at("params").value("temperature", 1.0) == 0) return reply;
  const auto left = sampler.candidates(logits);
  const double total =
      std::accumulate(left->begin(), left->end(), 0.0, [](double s, const auto& c) { return s + c.weight; });
  for (const auto& c : *left) reply["probabilities"].push_back({c.id, c.weight / total});
  return reply;
}

}  // namespace
}  // namespace parvl

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << parvl::answer(parvl::Json::parse(line)).dump() << std::endl;
  }
}
