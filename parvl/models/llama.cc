// Llama 3 and Qwen2: text only.
#include "parvl/models/decoder.h"

namespace parvl {
namespace {

class Llama : public Model {
 public:
  explicit Llama(const ModelSpec& spec) : Model(spec) { backbone_ = make_decoder(params_, spec.backbone); }

  std::vector<std::string> checkpoint_names(const Param& param) const override {
    const std::string inside = decoder_checkpoint_name(param.name);
    if (inside.empty()) return {"lm_head.weight"};
    return {"model." + inside};
  }
};

}  // namespace

std::unique_ptr<Model> make_llama(const ModelSpec& spec) { return std::make_unique<Llama>(spec); }

}  // namespace parvl
