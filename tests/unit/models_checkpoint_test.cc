// Weights in and out of Hugging Face directories.
#include <gmock/gmock.h>

#include "parvl/models/checkpoint.h"
#include "tests/unit/models_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kFamilies[] = {"llama", "qwen2", "qwen2_vl", "qwen2_5_vl"};

class CheckpointTest : public ModelDirTest {
 protected:
  // Loads `dir` into a new model of `config`, which must fail with exit 2; the message.
  static std::string refusal(const Json& config, const std::string& dir) {
    auto model = make_model(config);
    const absl::Status status = load_weights(*model, dir);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(exit_code(status), 2) << status;
    // What loading refuses is known from the headers alone.
    auto empty = Model::create(*parse_model_spec(config, "config"));
    EXPECT_EQ(match_weights(*empty, dir).status(), status);
    return std::string(status.message());
  }

  // Writes the tiny model's tensors again, changed by `edit`.
  std::string rewritten(const Json& config, const std::function<void(NamedTensors&)>& edit) {
    const std::string from = make_folder("from"), to = make_folder("to");
    write_tiny_model(from, config);
    NamedTensors tensors = read_safetensors(from);
    edit(tensors);
    write_safetensors(to + "/model.safetensors", tensors);
    return to;
  }

  static void expect_equal(const Model& got, const Model& want, at::ScalarType through) {
    for (const auto& param : want.params().all()) {
      const Param* other = got.params().find(param->name);
      ASSERT_NE(other, nullptr) << param->name;
      EXPECT_TRUE(at::equal(other->value.to(at::kDouble), param->value.to(through).to(at::kDouble))) << param->name;
    }
  }
};

TEST_F(CheckpointTest, WrittenAndReadBack) {
  for (const char* family : kFamilies) {
    for (const bool tied : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
        for (const int64_t shard_bytes : {int64_t{1} << 30, int64_t{20000}}) {
          SCOPED_TRACE(::testing::Message()
                       << family << " tied " << tied << " " << to_string(dtype) << " shards of " << shard_bytes);
          Json config = tiny_config(family);
          config["tie_word_embeddings"] = tied;
          const std::string dir =
              make_folder(std::string(family) + std::to_string(tied) + to_string(dtype) + std::to_string(shard_bytes));
          const auto written = write_tiny_model(dir, config, {.dtype = dtype, .max_shard_bytes = shard_bytes});
          EXPECT_EQ(std::filesystem::exists(dir + "/model.safetensors.index.json"), shard_bytes == 20000);
          auto spec = load_model_spec(dir);
          ASSERT_TRUE(spec.ok()) << spec.status();
          EXPECT_EQ(spec->dtype, dtype);
          auto read = make_model(spec->config);
          ASSERT_TRUE(load_weights(*read, dir).ok());
          expect_equal(*read, *written, to_scalar_type(dtype));
          const auto head = read->params().find("llm_backbone.head.weight");
          ASSERT_NE(head, nullptr);
          EXPECT_EQ(head->value.is_same(read->params().find("llm_backbone.embed.weight")->value), tied);
        }
      }
    }
  }
}

TEST_F(CheckpointTest, MatchGivesEachParametersPlace) {
  Json config = tiny_config("qwen2_vl");
  config["tie_word_embeddings"] = true;
  const std::string dir = make_folder("model");
  write_tiny_model(dir, config, {.dtype = DType::kBFloat16, .max_shard_bytes = 20000});
  auto model = Model::create(*parse_model_spec(config, "config"));  // never allocated
  const auto stored = match_weights(*model, dir);
  ASSERT_TRUE(stored.ok()) << stored.status();
  const auto& params = model->params().all();
  ASSERT_EQ(stored->size(), params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i]->tied_to != nullptr) {
      EXPECT_EQ((*stored)[i].file, nullptr);
      continue;
    }
    EXPECT_EQ((*stored)[i].entry.name, model->checkpoint_names(*params[i])[0]);
    EXPECT_EQ((*stored)[i].entry.bytes, static_cast<uint64_t>(params[i]->numel() * 2));
    EXPECT_FALSE(params[i]->value.defined());
  }
}

TEST_F(CheckpointTest, FillsTheMasterFromTheFilesPrecision) {
  const std::string dir = make_folder("model");
  const auto written = write_tiny_model(dir, tiny_config("qwen2"));
  auto read = make_model(tiny_config("qwen2"), at::kBFloat16);
  for (Param* param : read->params().owned()) param->master = at::empty(param->shape, at::kFloat);
  ASSERT_TRUE(load_weights(*read, dir).ok());
  for (Param* param : read->params().owned()) {
    const at::Tensor& want = written->params().find(param->name)->value;
    EXPECT_TRUE(at::equal(param->master, want)) << param->name;
    EXPECT_TRUE(at::equal(param->value, want.to(at::kBFloat16))) << param->name;
  }
}

TEST_F(CheckpointTest, MissingTensor) {
  for (const char* family : kFamilies) {
    const Json config = tiny_config(family);
    const std::string dir = rewritten(config, [](NamedTensors& tensors) {
      std::erase_if(
          tensors, [](const auto& t) { return t.first.find("layers.1.self_attn.k_proj.weight") != std::string::npos; });
    });
    EXPECT_THAT(refusal(config, dir),
                AllOf(HasSubstr("lacks the tensor"), HasSubstr("layers.1.self_attn.k_proj.weight"),
                      HasSubstr("llm_backbone.layers.1.attn.k.weight")));
  }
}

TEST_F(CheckpointTest, WrongShapes) {
  const Json config = tiny_config("qwen2");
  std::string name;
  const auto reshaped = [&](const std::string& part, const at::Tensor& value) {
    return rewritten(config, [&](NamedTensors& tensors) {
      for (auto& [key, tensor] : tensors) {
        if (key.find(part) != std::string::npos) {
          tensor = value;
          name = key;
        }
      }
    });
  };
  EXPECT_THAT(refusal(config, reshaped("layers.0.mlp.down_proj.weight", at::zeros({48, 32}))),
              AllOf(HasSubstr(name), HasSubstr("48×32"), HasSubstr("32×48")));
  EXPECT_THAT(refusal(config, reshaped("model.norm.weight", at::zeros({1, 32}))),
              AllOf(HasSubstr("1×32"), HasSubstr("says 32")));
  EXPECT_THAT(refusal(config, reshaped("model.norm.weight", at::zeros({}))),
              AllOf(HasSubstr(name), HasSubstr("single number")));
}

TEST_F(CheckpointTest, AConfigurationOfAnotherSizeIsNoticedBeforeMemoryIsTaken) {
  const std::string dir = make_folder("model");
  write_tiny_model(dir, tiny_config("llama"));
  Json config = tiny_config("llama");
  config["head_dim"] = 8;
  config["hidden_size"] = 1 << 20;
  config["intermediate_size"] = 1 << 20;  // terabytes
  auto model = Model::create(*parse_model_spec(config, "config"));
  EXPECT_THAT(std::string(match_weights(*model, dir).status().message()),
              AllOf(HasSubstr("384×32"), HasSubstr("384×1048576")));
}

TEST_F(CheckpointTest, ATensorWithoutAPlace) {
  const Json config = tiny_config("llama");
  const auto with = [&](const std::string& name) {
    return rewritten(config, [&](NamedTensors& tensors) { tensors.emplace_back(name, at::zeros({4})); });
  };
  EXPECT_THAT(refusal(config, with("model.layers.7.extra")),
              AllOf(HasSubstr("model.layers.7.extra"), HasSubstr("llama"), HasSubstr("no place")));
  EXPECT_THAT(refusal(config, with("model.layers.0.self_attn.q_proj.bias")),
              HasSubstr("no place"));  // a Qwen2 named llama
  // Old checkpoints carry rotary frequencies, which are computed.
  auto model = make_model(config);
  EXPECT_TRUE(load_weights(*model, with("model.layers.0.self_attn.rotary_emb.inv_freq")).ok());
}

TEST_F(CheckpointTest, IntegerTensorsAreNoWeights) {
  const Json config = tiny_config("llama");
  const std::string dir =
      rewritten(config, [](NamedTensors& tensors) { tensors[0].second = tensors[0].second.to(at::kLong); });
  EXPECT_THAT(refusal(config, dir), AllOf(HasSubstr("I64"), HasSubstr("F32, BF16, F16 and F64")));
}

TEST_F(CheckpointTest, ATiedModelsOutputMatrixInTheFileIsNotUsed) {
  for (const char* family : kFamilies) {
    Json config = tiny_config(family);
    config["tie_word_embeddings"] = true;
    const std::string dir = rewritten(config, [](NamedTensors& tensors) {
      tensors.emplace_back("lm_head.weight", at::full({384, 32}, 7.0f));
    });
    auto model = make_model(config);
    ASSERT_TRUE(load_weights(*model, dir).ok()) << load_weights(*model, dir);
    const Param* head = model->params().find("llm_backbone.head.weight");
    EXPECT_TRUE(head->value.is_same(model->params().find("llm_backbone.embed.weight")->value));
    EXPECT_LT(head->value.max().item<float>(), 6.0f);
  }
}

TEST_F(CheckpointTest, BothSpellingsOfMultimodalNames) {
  for (const char* family : {"qwen2_vl", "qwen2_5_vl"}) {
    const Json config = tiny_config(family);
    const std::string from = make_folder(std::string("from_") + family);
    const auto written = write_tiny_model(from, config);
    bool renamed = false;
    const std::string to = rewritten(config, [&](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) {  // transformers 5 inside: model.visual. and model.language_model.
        if (name.rfind("visual.", 0) == 0) {
          name = "model." + name;
          renamed = true;
        } else if (name.rfind("model.", 0) == 0) {
          name = "model.language_model." + name.substr(6);
        }
      }
    });
    ASSERT_TRUE(renamed);
    auto read = make_model(config);
    ASSERT_TRUE(load_weights(*read, to).ok()) << load_weights(*read, to);
    expect_equal(*read, *written, at::kFloat);
  }
}

TEST_F(CheckpointTest, PickledWeightsAreRefused) {
  const std::string dir = make_folder("model");
  std::ofstream(dir + "/pytorch_model.bin") << "PK";
  EXPECT_THAT(refusal(tiny_config("llama"), dir), HasSubstr("pytorch_model.bin"));
}

TEST_F(CheckpointTest, CopiesWhatBelongsToTheModel) {
  const std::string from = make_folder("from"), to = make_folder("to");
  std::ofstream(from + "/tokenizer.json") << "{}";
  std::ofstream(from + "/chat_template.jinja") << "template";
  std::ofstream(from + "/optimizer.pt") << "no";
  write_tiny_model(to, tiny_config("llama"), {.copy_from = from});
  EXPECT_TRUE(std::filesystem::exists(to + "/tokenizer.json"));
  EXPECT_TRUE(std::filesystem::exists(to + "/chat_template.jinja"));
  EXPECT_FALSE(std::filesystem::exists(to + "/optimizer.pt"));
}

TEST_F(CheckpointTest, WritingWhereNoneCan) {
  auto model = make_model(tiny_config("llama"));
  model->params().initialise(1, 0.1);
  const absl::Status status = save_weights(*model, root_ + "/missing", {});
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing"));
}

}  // namespace
}  // namespace parvl
