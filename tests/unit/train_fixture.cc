#include "train_fixture.h"

namespace parvl {

void TrainFixture::write_config() {
  auto config = read_json_file(std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start/config.json");
  ASSERT_TRUE(config.ok());
  config->update({{"hidden_size", 16},
                  {"intermediate_size", 24},
                  {"num_hidden_layers", 2},
                  {"num_attention_heads", 2},
                  {"num_key_value_heads", 1},
                  {"initializer_range", 0.2}});
  (*config)["rope_scaling"]["mrope_section"] = {1, 1, 2};
  (*config)["vision_config"].update(
      {{"depth", 2}, {"embed_dim", 16}, {"hidden_size", 16}, {"num_heads", 2}, {"mlp_ratio", 2}});
  std::ofstream(folder_ / "config.json") << config->dump(2);
}

Json TrainFixture::line(int i) {
  Json content = Json::array();
  if (i % 4 != 3) {
    Image image{24 + 8 * (i % 3), 32, {}};
    for (int p = 0; p < image.width * image.height * 3; ++p)
      image.rgb.push_back(static_cast<uint8_t>(p * (i + 3) + p / 96));
    const std::string name = absl::StrCat(i, ".png");
    std::ofstream(folder_ / name, std::ios::binary) << encode_png(image);
    content.push_back({{"type", "image"}, {"image", name}});
  }
  content.push_back({{"type", "text"}, {"text", absl::StrCat("what is the shape of ", i, "?")}});
  Json messages = {{{"role", "user"}, {"content", content}}};
  if (i % 5 != 4) messages.push_back({{"role", "assistant"}, {"content", i % 2 ? "circle" : "a red rectangle"}});
  if (i % 6 == 2) {
    messages.push_back({{"role", "user"}, {"content", "sure?"}});
    messages.push_back({{"role", "assistant"}, {"content", "yes"}});
  }
  return {{"messages", messages}};
}

std::vector<at::Tensor> TrainFixture::state(const Trainer& trainer) {
  std::vector<at::Tensor> out;
  for (const Param* param : trainer.model().params().owned()) {
    out.push_back(param->master.clone());
    out.push_back(param->value.clone());
  }
  for (const OptimGroupState& group : trainer.optimizer().groups()) {
    for (const at::Tensor& tensor : {group.moment1, group.moment2, group.updates}) {
      if (tensor.defined()) out.push_back(tensor.clone());
    }
  }
  return out;
}
bool TrainFixture::same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return true;
}

}  // namespace parvl
