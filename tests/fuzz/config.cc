// YAML configuration and overrides: read or refused with a good message.
#include "parvl/base/config.h"

#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {
      "model: DIR  # a comment\ndata: {train: \"easy-vqa:train\", eval: '', micro_batch: 4, global_batch: 16}\n"
      "optim: {lr: 1.0e-3, betas: [0.9, 0.95], groups: [{match: \"projector.*\", lr: 1.0e-4}]}\n",
      "a:\n  - 1\n  - b: 2\n    c: |\n      text\n      more\n  - [x, 'y', \"z\\n\"]\nd: ~\n",
      "cluster:\n  gpu_pools:\n    encoder-pool: {device: gpu-24gb, min_instances: 1}\n",
      "? key\n: value\n",
      "data.micro_batch=3",
      "a.b.0.c={d: [1, 2]}",
  };
}

namespace {

void read_everything(parvl::ConfigReader reader, int depth) {
  bool flag = false;
  int64_t integer = 0;
  uint64_t natural = 0;
  double number = 0;
  std::string text;
  std::vector<std::string> texts;
  std::vector<double> numbers;
  reader.boolean("b", flag);
  reader.integer("micro_batch", integer, -5, 100);
  reader.natural("c", natural);
  reader.number("lr", number, {.low = 0, .high = 1, .high_open = true});
  reader.choice("train", text, {"one", "two"});
  reader.text_list("a", texts);
  reader.number_list("betas", numbers, {.low = 0});
  const auto groups = reader.section_list("groups");
  if (depth < 3) {
    for (const auto& [name, section] : reader.named_sections("gpu_pools")) read_everything(section, depth + 1);
    read_everything(reader.section("data"), depth + 1);
    read_everything(reader.section("optim"), depth + 1);
  }
  const absl::Status status = reader.finish();
  if (!status.ok()) require_good_message(std::string(status.message()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const parvl::ConfigLimits limits{.max_bytes = 1 << 16, .max_depth = 16, .max_nodes = 5000};
  auto root = parvl::parse_config(text, "input.yaml", limits);
  if (!root.ok()) require_good_message(std::string(root.status().message()));
  parvl::ConfigNode base = root.ok() ? *root : parvl::ConfigNode{};
  read_everything(parvl::ConfigReader(base), 0);
  const absl::Status set = parvl::apply_override(base, text, limits);
  if (!set.ok()) require_good_message(std::string(set.message()));
  read_everything(parvl::ConfigReader(base), 0);
  return 0;
}
