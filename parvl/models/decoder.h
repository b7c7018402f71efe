// The decoder that the Llama and Qwen2 families share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/models/model.h"

namespace parvl {

// Adds its parameters to `params`, which must outlive it.
std::unique_ptr<Backbone> make_decoder(ParamTable& params, const BackboneSpec& spec);

// The part of a checkpoint name behind the family's prefix ("layers.0.self_attn.q_proj.weight") for a backbone
// parameter; empty for the output matrix, which stands outside the decoder in every family.
std::string decoder_checkpoint_name(const std::string& parvl_name);

// 1 / theta^(2i/D) for i < D/2, with the specification's scaling: float32 arithmetic as transformers does it, float64
// for float64 models.
at::Tensor inverse_frequencies(const BackboneSpec& spec, at::ScalarType type);

}  // namespace parvl
