// A process that holds a part of a model: its parameters are there and no others, and the whole directory is checked.
#include <gmock/gmock.h>

#include "parvl/exec/load.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::vector<std::string> kEncoder = {"vision_encoder", "projector"}, kBackbone = {"llm_backbone"};

class PartsTest : public EngineTest {
 protected:
  static LoadOptions options(const std::vector<std::string>& modules, const std::string& dtype = "auto") {
    LoadOptions out;
    out.device = "cpu";
    out.dtype = dtype;
    out.modules = modules;
    return out;
  }

  static LoadedFiles load_files(const std::string& dir, const LoadOptions& options) {
    auto files = read_files(dir, options);
    if (!files.ok()) throw std::runtime_error(files.status().ToString());
    const absl::Status status = load_weights(*files, dir, options);
    if (!status.ok()) throw std::runtime_error(status.ToString());
    return *std::move(files);
  }

  static std::string refusal(const std::string& dir, const std::vector<std::string>& modules) {
    const auto files = read_files(dir, options(modules));
    EXPECT_EQ(exit_code(files.status()), 2) << files.status();
    return std::string(files.status().message());
  }

  static void edit(const std::string& dir, const std::function<void(NamedTensors&)>& change) {
    NamedTensors tensors = read_safetensors(dir);
    change(tensors);
    write_safetensors(dir + "/model.safetensors", tensors);
  }
};

class PartsFamilyTest : public PartsTest, public testing::WithParamInterface<const char*> {};

TEST_P(PartsFamilyTest, HoldsTheBytesOfTheFormulaAndNoOtherTensor) {
  const std::string dir = make_dir(GetParam());
  for (const char* dtype : {"float32", "bfloat16", "float64"}) {
    const LoadedFiles whole = load_files(dir, options({}, dtype));
    const WeightBytes formula = weight_bytes(whole.model->spec(), whole.dtype);
    for (const auto& modules : {kEncoder, kBackbone}) {
      const LoadedFiles part = load_files(dir, options(modules, dtype));
      const auto held = part.model->params().owned();
      // All of them lie in one allocation.
      EXPECT_EQ(static_cast<int64_t>(held.front()->value.storage().nbytes()), formula.of(part.held));
      EXPECT_LT(formula.of(part.held), formula.total());
      size_t there = 0;
      for (const auto& param : part.model->params().all()) {
        const bool wanted = std::find(modules.begin(), modules.end(), to_string(param->module)) != modules.end();
        ASSERT_EQ(param->value.defined(), wanted) << param->name;
        if (!wanted) continue;
        ++there;
        EXPECT_EQ(param->value.storage().data(), held.front()->value.storage().data());
        EXPECT_TRUE(at::equal(param->value, whole.model->params().find(param->name)->value)) << param->name;
      }
      EXPECT_GT(there, 10u);
      EXPECT_LT(there, whole.model->params().all().size());
    }
    EXPECT_EQ(formula.of({true, false}) + formula.of({false, true}), formula.total());
  }
}

TEST_P(PartsFamilyTest, ProgressCountsWhatIsRead) {
  const std::string dir = make_dir(GetParam());
  auto files = *read_files(dir, options(kEncoder));
  files.model->params().keep([](const Param& param) { return param.module != Module::kBackbone; });
  files.model->params().allocate(at::kFloat, at::kCPU);
  int64_t last = 0, all = 0;
  ASSERT_TRUE(load_weights(*files.model, dir, [&](int64_t done, int64_t total) {
                last = done;
                all = total;
              }).ok());
  int64_t values = 0;
  for (const Param* param : files.model->params().owned()) values += param->numel();
  EXPECT_EQ(all, values * 4);
  EXPECT_EQ(last, all);
}

TEST_P(PartsFamilyTest, DamageInAnyPartIsTold) {
  const std::string dir = make_dir(GetParam());
  const auto find = [](NamedTensors& tensors, const std::string& part) -> std::pair<std::string, at::Tensor>& {
    return *std::find_if(tensors.begin(), tensors.end(),
                         [&](const auto& t) { return t.first.find(part) != t.first.npos; });
  };
  edit(dir, [&](NamedTensors& tensors) { find(tensors, "patch_embed").second = at::zeros({3, 3}); });
  for (const auto& modules : {kEncoder, kBackbone}) {
    EXPECT_THAT(refusal(dir, modules), AllOf(HasSubstr("patch_embed"), HasSubstr("3×3")));
  }
  edit(dir,
       [&](NamedTensors& tensors) { tensors.erase(tensors.begin() + (&find(tensors, "patch_embed") - &tensors[0])); });
  EXPECT_THAT(refusal(dir, kBackbone), HasSubstr("lacks the tensor"));
  write_tiny_model(dir, tiny_config(GetParam()));
  edit(dir, [&](NamedTensors& tensors) { find(tensors, "layers.1.mlp.up_proj").second = at::zeros({2}); });
  EXPECT_THAT(refusal(dir, kEncoder), HasSubstr("layers.1.mlp.up_proj"));
}

TEST_P(PartsFamilyTest, RefusesModulesThatMakeNoWhole) {
  const std::string dir = make_dir(GetParam());
  EXPECT_THAT(refusal(dir, {"llm_backbone", "audio_encoder"}), HasSubstr("there is no module 'audio_encoder'"));
  EXPECT_THAT(refusal(dir, {"vision_encoder"}), HasSubstr("vision_encoder and projector must be held together"));
  EXPECT_THAT(refusal(dir, {"projector", "llm_backbone"}), HasSubstr("must be held together"));
  EngineOptions engine;
  engine.load = options(kEncoder);
  EXPECT_THAT(std::string(load_engine(dir, engine, clock()).status().message()),
              HasSubstr("must hold the llm_backbone"));
  engine.load = options({"vision_encoder", "projector", "llm_backbone"});
  EXPECT_TRUE(load_engine(dir, engine, clock()).ok());
  EXPECT_THAT(std::string(load_encode_engine(dir, engine, clock()).status().message()),
              HasSubstr("must not hold the llm_backbone"));
}

INSTANTIATE_TEST_SUITE_P(Families, PartsFamilyTest, testing::Values("qwen2_vl", "qwen2_5_vl"));

TEST_F(PartsTest, AModelWithoutImagesHasNoEncoder) {
  const std::string dir = make_dir("qwen2");
  EXPECT_THAT(refusal(dir, kEncoder), HasSubstr("a qwen2 model has no vision_encoder to hold"));
  EngineOptions engine;
  engine.load = options(kBackbone);
  EXPECT_TRUE(load_engine(dir, engine, clock()).ok());
  engine.load = options({});
  EXPECT_THAT(std::string(load_encode_engine(dir, engine, clock()).status().message()),
              HasSubstr("has no vision_encoder"));
}

}  // namespace
}  // namespace parvl
