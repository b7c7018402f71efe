// Times one model directory: prompt to first token, decoding, and the speed of the matrix-vector kernel alone on a
// matrix that no cache holds, in the same process. Prints one JSON object.
//
//   generate_bench MODEL_DIR DTYPE THREADS PROMPT_TOKENS NEW_TOKENS REPEATS [IMAGE]
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "parvl/base/clock.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/memory.h"
#include "parvl/base/rng.h"
#include "parvl/exec/generator.h"
#include "parvl/media/image.h"
#include "parvl/nn/cpu_ops.h"
#include "parvl/plan/model_spec.h"

namespace parvl {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes a second of reading a weight of half a gigabyte through the kernel that decoding uses.
double gemv_bytes_per_second(at::ScalarType type) {
  const RealClock clock;
  const int64_t k = 4096, n = (int64_t{512} << 20) / k / static_cast<int64_t>(c10::elementSize(type));
  const at::Tensor weight = at::randn({n, k}, at::kFloat).to(type), x = at::randn({1, k}, at::kFloat).to(type);
  std::vector<double> seconds;
  for (int i = 0; i < 7; ++i) {
    const double start = clock.now_seconds();
    cpu::linear(x, weight, {});
    seconds.push_back(clock.now_seconds() - start);
  }
  return static_cast<double>(weight.nbytes()) / median(seconds);
}

// Weight bytes that decoding one token reads: the decoder's matrices and the output matrix.
double decode_bytes(const BackboneSpec& b, double value_bytes) {
  const double h = static_cast<double>(b.hidden), q = static_cast<double>(b.heads * b.head_dim),
               kv = static_cast<double>(b.kv_heads * b.head_dim);
  return value_bytes *
         (static_cast<double>(b.layers) * (h * (2 * q + 2 * kv) + 3 * h * static_cast<double>(b.intermediate)) +
          h * static_cast<double>(b.vocab));
}

absl::Status run(char** argv, int argc) {
  const std::string dir = argv[1], dtype = argv[2];
  at::set_num_threads(std::stoi(argv[3]));
  const int64_t prompt_tokens = std::stoll(argv[4]), new_tokens = std::stoll(argv[5]), repeats = std::stoll(argv[6]);
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(dir));
  GeneratorOptions options;
  options.load.dtype = dtype;
  options.load.device = "cpu";
  const RealClock clock;
  options.clock = &clock;
  const double load_start = clock.now_seconds();
  PARVL_ASSIGN_OR_RETURN(auto generator, Generator::load(dir, options));
  const double load_seconds = clock.now_seconds() - load_start;
  Prompt prompt;
  if (argc > 7) {
    PARVL_ASSIGN_OR_RETURN(const std::string bytes, read_file(argv[7]));
    PARVL_ASSIGN_OR_RETURN(const Image image, decode_image(bytes));
    PARVL_ASSIGN_OR_RETURN(ProcessedImage processed, generator->prompts().image_processor().process(image));
    Message message{"user", {{ContentPart::Kind::kImage, "", 0}, {ContentPart::Kind::kText, "what is it?", -1}}};
    PARVL_ASSIGN_OR_RETURN(prompt, generator->prompts().build(
                                       {message}, {std::make_shared<const ProcessedImage>(std::move(processed))}, {}));
  }
  Rng rng(1);
  while (static_cast<int64_t>(prompt.ids.size()) < prompt_tokens)
    prompt.ids.push_back(static_cast<TokenId>(rng.below(256)));
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.ignore_eos = true;
  sampling.max_tokens = new_tokens;
  std::vector<double> ttft, tpot;
  for (int64_t i = 0; i <= repeats; ++i) {
    PARVL_ASSIGN_OR_RETURN(const GenerateResult result, generator->generate(prompt, sampling, nullptr));
    if (i == 0) continue;  // warm-up
    ttft.push_back(result.ttft_ms);
    tpot.push_back(result.tpot_ms);
  }
  const double peak = static_cast<double>(peak_resident_bytes());
  Json out = {{"prompt_tokens", prompt.ids.size()},
              {"ttft_ms", median(ttft)},
              {"tpot_ms", median(tpot)},
              {"load_s", load_seconds},
              {"peak_bytes", peak}};
  if (dtype == "bfloat16" || dtype == "float32") {
    const double roof = gemv_bytes_per_second(dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
    const double achieved = decode_bytes(spec.backbone, dtype == "bfloat16" ? 2 : 4) / (median(tpot) * 1e-3);
    out["gemv_gb_s"] = roof / 1e9;
    out["decode_gb_s"] = achieved / 1e9;
    out["decode_share_of_gemv"] = achieved / roof;
  }
  std::cout << out.dump() << "\n";
  return absl::OkStatus();
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: generate_bench MODEL_DIR DTYPE THREADS PROMPT_TOKENS NEW_TOKENS REPEATS [IMAGE]\n");
    return 2;
  }
  parvl::tune_memory();
  const absl::Status status = parvl::catch_exceptions("generate_bench", [&] { return parvl::run(argv, argc); });
  if (!status.ok()) std::cerr << status.message() << "\n";
  return parvl::exit_code(status);
}
