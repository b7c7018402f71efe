// Times a model's steps on a GPU by themselves: no scheduler, no text. First its vision encoder, if it has one, for
// images of 1,024 patches; then recorded decode steps, a line a batch size, with the bytes of weights and keys that a
// step must read over the time.
//
//   gpu_bench MODEL_DIR LENGTH [ROWS...]
#include <algorithm>
#include <cstdio>
#include <iostream>

#include "parvl/base/clock.h"
#include "parvl/exec/decode_graphs.h"
#include "parvl/exec/encoder_graphs.h"
#include "parvl/exec/load.h"
#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

// From pixels on the host to embeddings on the device.
void bench_encoder(const LoadedFiles& files, EncoderGraphs* graphs, const Clock& clock, int64_t images) {
  const Model& model = *files.model;
  const Grid grid = {1, 32, 32};
  std::vector<float> pixels(static_cast<size_t>(grid.patches() * model.spec().vision->patch_values()), 0.3f);
  SequenceInput input;
  for (int64_t i = 0; i < images; ++i) {
    input.images.push_back({0, grid});
    input.pixels.push_back(pixels.data());
  }
  std::vector<double> times;
  bool recorded = false;
  for (int i = 0; i < 12; ++i) {
    const double start = clock.now_seconds();
    recorded = graphs != nullptr && !graphs->run(input).empty();
    if (!recorded) encode_images(model, pack_images(model, {input}, files.device), files.device);
    synchronize(files.device);
    if (i >= 2) times.push_back(clock.now_seconds() - start);
  }
  std::printf("vision encoder: %2ld images of %ld patches: %.3f ms an image%s\n", static_cast<long>(images),
              static_cast<long>(grid.patches()), median(times) * 1e3 / static_cast<double>(images),
              recorded ? ", recorded" : "");
}

absl::Status run(int argc, char** argv) {
  LoadOptions load;
  load.device = "cuda";
  PARVL_ASSIGN_OR_RETURN(LoadedFiles files, read_files(argv[1], load));
  PARVL_RETURN_IF_ERROR(load_weights(files, argv[1], load));
  use_own_stream(files.device);
  const int64_t length = std::stoll(argv[2]);
  const BackboneSpec& spec = files.model->spec().backbone;
  std::vector<int64_t> batches;
  for (int i = 3; i < argc; ++i) batches.push_back(std::stoll(argv[i]));
  if (batches.empty()) batches = {1, 8, 32};
  const int64_t most = *std::max_element(batches.begin(), batches.end());
  const int64_t each = (length + KvPages::kBlockSize - 1) / KvPages::kBlockSize;
  KvPages pages(spec, at::kBFloat16, files.device);
  pages.reserve(most * each);
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    at::Tensor(pages.keys(layer)).normal_();
    at::Tensor(pages.values(layer)).normal_();
  }
  const RealClock clock;
  if (files.model->vision_encoder() != nullptr) {
    const auto encoder_graphs = EncoderGraphs::create(*files.model, files.device, {});
    for (const int64_t images : {1, 4, 16}) bench_encoder(files, encoder_graphs.get(), clock, images);
  }
  double weights = 0;
  for (const Param* param : files.model->params().owned()) {
    // The embedding's rows are looked up, not read, unless they are the output matrix too.
    const bool read = param->module == Module::kBackbone && (spec.tied || param->name != "llm_backbone.embed.weight");
    if (read) weights += static_cast<double>(param->value.nbytes());
  }
  auto graphs = DecodeGraphs::create(*files.model, pages, {most, each, true});
  if (graphs == nullptr) return invalid("no recorded decode steps for this model on this device");
  std::vector<int32_t> table;
  for (int64_t i = 0; i < most * each; ++i) table.push_back(static_cast<int32_t>(i));
  for (const int64_t count : batches) {
    std::vector<DecodeRow> rows;
    for (int64_t i = 0; i < count; ++i) {
      DecodeRow row;
      row.token = static_cast<int32_t>(i + 1);
      row.position = {length - 1, length - 1, length - 1};
      row.blocks = table.data() + i * each;
      row.num_blocks = each;
      row.length = length;
      rows.push_back(row);
    }
    std::vector<double> times;
    for (int i = 0; i < 60; ++i) {
      const double start = clock.now_seconds();
      graphs->run(rows);
      if (i >= 10) times.push_back(clock.now_seconds() - start);
    }
    const double seconds = median(times);
    const double keys = 4.0 * static_cast<double>(count * length * spec.layers * spec.kv_heads * spec.head_dim);
    std::printf("%s: %3ld sequences of %ld tokens: %.3f ms a step, %.0f tokens/s, %.2f TB/s\n", argv[1],
                static_cast<long>(count), static_cast<long>(length), seconds * 1e3,
                static_cast<double>(count) / seconds, (weights + keys) / seconds * 1e-12);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: gpu_bench MODEL_DIR LENGTH [ROWS...]\n");
    return 2;
  }
  const absl::Status status = parvl::catch_exceptions("gpu_bench", [&] { return parvl::run(argc, argv); });
  if (!status.ok()) std::cerr << status.message() << "\n";
  return parvl::exit_code(status);
}
