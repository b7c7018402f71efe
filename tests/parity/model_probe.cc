// What tests/parity/model_*.py talk to: runs a model directory on given token ids and pixels, without media or
// tokenizer.
//
//   model_probe logits DIR INPUT.json OUT.f64 DTYPE     teacher-forced logits of every position, float64 [T, V] raw
//   model_probe grads  DIR INPUT.json OUTDIR DTYPE RECOMPUTE   gradients by ParVL name, one raw float64 file each, and
//   names.json model_probe save   DIR OUTDIR DTYPE                 loads and writes the checkpoint again model_probe
//   bf16   ... (DTYPE is float32 | bfloat16 | float64)
//
// INPUT.json: [{"ids": [...], "images": [{"begin": n, "grid": [t, h, w], "pixels": FILE of raw float32}], "targets":
// [0|1, ...]}]
#include <filesystem>
#include <fstream>
#include <iostream>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/models/checkpoint.h"
#include "parvl/models/packing.h"
#include "parvl/train/pipeline_run.h"

namespace parvl {
namespace {

struct Inputs {
  std::vector<SequenceInput> sequences;
  std::vector<std::string> pixel_files;  // owns the bytes
};

absl::StatusOr<Inputs> read_inputs(const std::string& path) {
  PARVL_ASSIGN_OR_RETURN(Json json, read_json_file(path));
  Inputs out;
  out.pixel_files.reserve(1000);
  for (const Json& item : json) {
    SequenceInput sequence;
    sequence.ids = item["ids"].get<std::vector<int32_t>>();
    if (item.contains("targets")) sequence.is_target = item["targets"].get<std::vector<uint8_t>>();
    for (const Json& image : item["images"]) {
      const auto grid = image["grid"].get<std::vector<int64_t>>();
      sequence.images.push_back({image["begin"].get<int64_t>(), {grid[0], grid[1], grid[2]}});
      PARVL_ASSIGN_OR_RETURN(std::string bytes, read_file(image["pixels"].get<std::string>()));
      out.pixel_files.push_back(std::move(bytes));
      sequence.pixels.push_back(reinterpret_cast<const float*>(out.pixel_files.back().data()));
    }
    out.sequences.push_back(std::move(sequence));
  }
  return out;
}

void write_raw(const std::string& path, const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kCPU, at::kDouble).contiguous();
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(wide.data_ptr()), static_cast<std::streamsize>(wide.nbytes()));
}

absl::Status run(int argc, char** argv) {
  const std::string mode = argv[1], dir = argv[2];
  PARVL_ASSIGN_OR_RETURN(ModelSpec spec, load_model_spec(dir));
  auto model = Model::create(spec);
  PARVL_ASSIGN_OR_RETURN(const DType dtype, parse_dtype(argv[mode == "save" ? 4 : 5]));
  model->params().allocate(to_scalar_type(dtype), at::kCPU);
  PARVL_RETURN_IF_ERROR(load_weights(*model, dir));
  if (mode == "save") {
    std::filesystem::create_directories(argv[3]);
    return save_weights(*model, argv[3], {.dtype = dtype, .copy_from = dir, .max_shard_bytes = 100000});
  }
  PARVL_ASSIGN_OR_RETURN(const Inputs inputs, read_inputs(argv[3]));
  const PackedBatch batch = pack(*model, inputs.sequences, at::kCPU);
  if (mode == "logits") {
    const at::Tensor hidden = run_backbone(*model, batch, encode_images(*model, batch, at::kCPU));
    write_raw(argv[4], model->backbone().logits(hidden));
    return absl::OkStatus();
  }
  const std::string out = argv[4];
  for (Param* param : model->params().owned()) param->main_grad = at::zeros_like(param->master);
  model->params().link_tied();
  for (const auto& param : model->params().all()) param->trains = true;
  PipelineOptions options;
  options.scale = 1.0 / static_cast<double>(batch.num_targets);
  options.recompute = std::string(argv[6]) == "full";
  options.microbatches = {{.grids = grids_of(inputs.sequences)}};
  options.sequences = [&](int64_t) { return inputs.sequences; };
  const at::ScalarType wide = dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
  const at::Tensor loss = run_pipeline(*model, RunRanks(model->spec()), at::kCPU, options).to(wide);
  Json names = Json::object();
  int64_t index = 0;
  for (Param* param : model->params().owned()) {
    const std::string file = std::to_string(index++);
    write_raw(out + "/" + file, param->main_grad);
    names[file] = {{"name", param->name}, {"checkpoint_name", model->checkpoint_names(*param)[0]}};
  }
  write_raw(out + "/loss", loss);
  return write_file_atomically(out + "/names.json", names.dump());
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  const absl::Status status = parvl::catch_exceptions("model_probe", [&] { return parvl::run(argc, argv); });
  if (!status.ok()) std::cerr << status.message() << "\n";
  return parvl::exit_code(status);
}
