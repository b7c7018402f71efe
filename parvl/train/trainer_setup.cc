// How a run starts: the folder, the model and data, and where an earlier run of the same recipe stopped.
#include <ATen/ATen.h>

#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/comm/comm_site.h"
#include "parvl/comm/nccl/nccl_communicator.h"
#include "parvl/kernels/gemm_bf16.h"
#include "parvl/models/checkpoint.h"
#include "parvl/nn/device.h"
#include "parvl/train/data_image_cache.h"
#include "parvl/train/layout.h"
#include "parvl/train/trainer.h"
#include "parvl/train/trainer_output.h"

namespace parvl {
namespace {

constexpr char kStartingWeights[] = "weights at the start";
constexpr double kDeviceDeadline_s = 600;              // for rank 0 to say what it trains on
constexpr size_t kEvalImageBytes = size_t{256} << 20;  // bound on decoded pixels kept from one evaluation to the next

std::string short_hash(std::string_view text) { return sha256_hex(text).substr(0, 16); }

// The configuration without what says nothing about the model.
std::string config_hash(Json config) {
  for (const char* key : {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}) {
    config.erase(key);
    for (const char* part : {"text_config", "vision_config"}) {
      if (config.contains(part) && config[part].is_object()) config[part].erase(key);
    }
  }
  return short_hash(config.dump());
}

// Over what is learned from each sample, in order; not where the files lie, so that a moved folder stays the same data.
std::string data_hash(const Dataset& data) {
  std::string hash;
  for (int64_t i = 0; i < data.size(); ++i) {
    const RawSample& sample = data.sample(i);
    for (const Message& message : sample.messages) {
      absl::StrAppend(&hash, "|", message.role.size(), ":", message.role);
      for (const ContentPart& part : message.content) {
        absl::StrAppend(&hash, "|", part.image_index, ":", part.text.size(), ":", part.text);
      }
    }
    for (const std::string& path : sample.image_paths) {
      absl::StrAppend(&hash, "|", std::filesystem::path(path).filename().string());
    }
    hash = sha256_hex(hash);
  }
  return hash.substr(0, 16);
}

// Over the bits of all weights, whatever the order of summation and however they are cut. All ranks call it.
absl::StatusOr<std::string> weights_hash(const ParamTable& params, const RunRanks& ranks) {
  std::vector<uint64_t> sums;
  for (const Param* param : params.untied()) {
    sums.push_back(0);
    const ProcessGroup* same = ranks.data(param->module);
    if (!ranks.counts(*param) || (same != nullptr && same->rank() > 0)) continue;
    const int64_t bytes = static_cast<int64_t>(param->master.element_size());
    const at::ScalarType bits = bytes == 8 ? at::kLong : bytes == 4 ? at::kInt : at::kShort;
    sums.back() = static_cast<uint64_t>(param->master.view(bits).sum(at::kLong).item<int64_t>());
  }
  PARVL_RETURN_IF_ERROR(ranks.sum_exactly(absl::MakeSpan(sums)));
  std::string text;
  for (size_t i = 0; i < sums.size(); ++i) {
    absl::StrAppend(&text, params.untied()[i]->name, "=", static_cast<int64_t>(sums[i]), "\n");
  }
  return short_hash(text);
}

std::string files_hash(const std::string& dir) {
  std::string text;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
                           "preprocessor_config.json", "processor_config.json"}) {
    absl::StrAppend(&text, name, "=", sha256_file(dir + "/" + name).value_or("none"), "\n");
  }
  return short_hash(text);
}

// What a run is: a checkpoint of another one is not continued. Learning rates, schedule, length and micro batch may
// change.
Json identity_of(const Recipe& recipe, const Model& model, const Dataset& data, const std::string& weights) {
  int64_t count = 0, trained = 0;
  std::string trained_names;
  for (const Param* param : model.params().untied()) {
    count += param->numel();
    if (!param->trains) continue;
    trained += param->numel();
    absl::StrAppend(&trained_names, param->name, "\n");
  }
  const std::string momentum = recipe.optim.momentum != 0 ? " with momentum" : "";
  return {{"model", absl::StrCat(model.spec().model_type, " of ", count, " parameters, configuration ",
                                 config_hash(model.spec().config))},
          {kStartingWeights, weights},
          {"tokenizer and processor files", files_hash(recipe.model.empty() ? recipe.tokenizer : recipe.model)},
          {"train.dtype", recipe.train.dtype},
          {"train.freeze", absl::StrCat(trained, " parameters train, names ", short_hash(trained_names))},
          {"optim.name", recipe.optim.name + momentum},
          {"data.train", absl::StrCat(data.size(), " samples, content ", data_hash(data))},
          {"data.global_batch", recipe.data.global_batch},
          {"data.shuffle_seed", recipe.data.shuffle_seed},
          {"data.augment", recipe.data.augment}};
}

}  // namespace

Trainer::Trainer(const Recipe& recipe, TrainerEnvironment environment)
    : recipe_(recipe), env_(std::move(environment)) {}
Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(const Recipe& recipe, TrainerEnvironment environment) {
  std::unique_ptr<Trainer> trainer(new Trainer(recipe, std::move(environment)));
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot start training", [&] { return trainer->set_up(); }));
  return trainer;
}

absl::Status Trainer::set_up() {
  const bool first = env_.communicator == nullptr || env_.communicator->rank() == 0;
  if (first) {
    PARVL_ASSIGN_OR_RETURN(lock_, OutputLock::take(recipe_.train.out));
  }
  PARVL_ASSIGN_OR_RETURN(dtype_, parse_dtype(recipe_.train.dtype));
  PARVL_ASSIGN_OR_RETURN(device_, select_device(recipe_.train.device, env_.local_rank));
  use_deterministic_kernels(device_);
  RunOutputOptions output{env_.write, env_.record, env_.terminal, env_.columns};
  if (!first) output = {[](std::string_view) {}, {}, false, 80, /*events=*/false};
  output_ = std::make_unique<RunOutput>(*env_.clock, recipe_.train, std::move(output));
  if (!device_.is_cuda() && dtype_ == DType::kBFloat16 && !kernels::has_bf16_dot()) {
    output_->line(
        "warning: this processor multiplies bfloat16 value by value, about ten times slower than float32; "
        "train.dtype=float32 is faster here");
  }
  run_ = env_.clock->wall_ns();
  PARVL_RETURN_IF_ERROR(load_model_and_data());
  const CommSite site("resume", CommSite::Wait::kLong);
  PARVL_RETURN_IF_ERROR(ranks_->agree(resume()));
  // A folder that is not shared, or not yet seen alike, would let ranks start from unlike steps.
  PARVL_RETURN_IF_ERROR(ranks_->expect_equal({{"the step that they start from", absl::StrCat(optimizer_->steps_done())},
                                              {"the run that they continue", absl::StrCat(saved_step_ < 0 ? 0 : run_)},
                                              {"data and model", identity_.dump()}},
                                             "give all ranks the same files, and a train.out that they share"));
  const int64_t done = optimizer_->steps_done();
  if (done > recipe_.train.steps) {
    return invalid("train.steps is ", recipe_.train.steps, ", but the resumed checkpoint already has ", done,
                   " steps; raise train.steps, use another train.out, or set train.resume to never");
  }
  return output_->begin(done);
}

absl::Status Trainer::load_model_and_data() {
  const bool from_directory = !recipe_.model.empty();
  const std::string text_dir = from_directory ? recipe_.model : recipe_.tokenizer;
  output_->working("reading the data");
  ModelSpec spec;
  if (from_directory) {
    PARVL_ASSIGN_OR_RETURN(spec, load_model_spec(recipe_.model));
  } else {
    PARVL_ASSIGN_OR_RETURN(const Json config, read_json_file(recipe_.config));
    PARVL_ASSIGN_OR_RETURN(spec, parse_model_spec(config, recipe_.config));
  }
  PARVL_ASSIGN_OR_RETURN(prompts_, PromptBuilder::load(text_dir));
  if (prompts_->tokenizer().vocab_size() > spec.backbone.vocab) {
    return invalid(text_dir, ": the tokenizer has ", prompts_->tokenizer().vocab_size(),
                   " ids, the model's vocabulary only ", spec.backbone.vocab);
  }
  if (prompts_->has_images()) {
    const ImageProcessorConfig& images = prompts_->image_processor().config();
    PARVL_RETURN_IF_ERROR(check_image_inputs(
        spec, {images.patch_size, images.temporal_patch_size, images.merge_size, 3, prompts_->image_token()},
        text_dir));
  }
  PARVL_ASSIGN_OR_RETURN(recipe_.data.max_length, max_length_of(recipe_.data, spec.backbone.max_positions));
  PARVL_ASSIGN_OR_RETURN(train_set_, Dataset::load(recipe_.data.train, env_.base_dir));
  if (!recipe_.data.eval.empty()) {
    PARVL_ASSIGN_OR_RETURN(eval_set_, Dataset::load(recipe_.data.eval, env_.base_dir));
    PARVL_RETURN_IF_ERROR(with_context(check_eval_set(), "data.eval"));
  }
  // On all ranks, though the ranks that a layout does not fit may be others.
  PARVL_RETURN_IF_ERROR(Layout::create(spec, recipe_).status());
  PARVL_RETURN_IF_ERROR(connect(spec));
  output_->working("loading the model");
  model_ = Model::create(spec);
  for (const Module module : {Module::kVisionEncoder, Module::kProjector, Module::kBackbone}) {
    PARVL_RETURN_IF_ERROR(with_context(model_->params().split(module, ranks_->tensor(module)), "parallel"));
  }
  model_->params().keep([this](const Param& param) { return ranks_->holds(param, ranks_->stage()); });
  OptimizerRanks ranks;
  ranks.data = [this](Module module) { return ranks_->data(module); };
  ranks.zero1 = recipe_.parallel.zero == 1;
  ranks.on_two_stages = [this](const Param& param) { return ranks_->on_two_stages(param); };
  ranks.counts = [this](const Param& param) { return ranks_->counts(param); };
  ranks.sum = [this](const at::Tensor& value) { ranks_->sum(value); };
  PARVL_ASSIGN_OR_RETURN(optimizer_, Optimizer::create(model_->params(), recipe_, dtype_, device_, ranks));
  if (from_directory) {
    PARVL_RETURN_IF_ERROR(load_weights(*model_, recipe_.model));
  } else {
    model_->params().initialise(recipe_.seed, spec.init_std);
    optimizer_->refresh_values();
  }
  PARVL_ASSIGN_OR_RETURN(const std::string weights, weights_hash(model_->params(), *ranks_));
  identity_ = identity_of(recipe_, *model_, *train_set_, weights);
  optimizer_->shard();
  return agree_on_writer();
}

absl::Status Trainer::connect(const ModelSpec& spec) {
  output_->working("waiting for the other ranks");
  CheckOptions checks = env_.checks;
  checks.clock = env_.clock;
  const int64_t started = env_.communicator == nullptr ? 1 : env_.communicator->world();
  PARVL_RETURN_IF_ERROR(RunRanks::plan(recipe_.parallel, spec, started).status());
  if (env_.communicator != nullptr) PARVL_RETURN_IF_ERROR(agree_on_device());
  if (env_.communicator != nullptr && device_.is_cuda()) {
    PARVL_ASSIGN_OR_RETURN(gpus_, make_nccl_communicator(*env_.communicator));
  }
  Communicator* const communicator = gpus_ != nullptr ? gpus_.get() : env_.communicator;
  PARVL_ASSIGN_OR_RETURN(ranks_, RunRanks::create(recipe_.parallel, spec, communicator, checks));
  std::vector<std::pair<std::string, std::string>> sections = recipe_sections(recipe_);
  for (auto& [name, text] : sections) name = absl::StrCat("their recipes' '", name, "'");
  return ranks_->expect_equal(sections, "start all ranks with the same recipe and the same --set");
}

// The first rank's clock tells this start of the run from all others.
absl::Status Trainer::agree_on_writer() {
  writer_ = ranks_->is_first() ? static_cast<uint64_t>(env_.clock->wall_ns()) : 0;
  return ranks_->sum_exactly(absl::MakeSpan(&writer_, 1));
}

// Before there are groups, which are made on GPUs or on none.
absl::Status Trainer::agree_on_device() {
  const std::string mine = device_.is_cuda() ? "a GPU" : "the CPU";
  const std::unique_ptr<Store> store = env_.communicator->make_store();
  if (env_.communicator->rank() == 0) return store->set("device", mine);
  PARVL_ASSIGN_OR_RETURN(const std::string first, store->get("device", kDeviceDeadline_s));
  if (first == mine) return absl::OkStatus();
  return invalid("rank ", env_.communicator->rank(), " trains on ", mine, ", rank 0 on ", first,
                 "; set train.device to cpu, or give every rank a GPU");
}

// Prepares every sample once: what is wrong with one is said now and not at the first checkpoint, hours later. It costs
// what each evaluation costs before the model runs, and the decoded images are kept for these.
absl::Status Trainer::check_eval_set() {
  output_->working("checking the evaluation data");
  eval_images_ = std::make_unique<ImageCache>(kEvalImageBytes);
  const PrepareOptions options{.max_length = recipe_.data.max_length};
  for (int64_t i = 0; i < eval_set_->size() && !stopping(); ++i) {
    PARVL_RETURN_IF_ERROR(prepare_sample(eval_set_->sample(i), *prompts_, options, i, eval_images_.get()).status());
  }
  return absl::OkStatus();
}

// Each rank a share of the hashes; all know when one of them finds damage.
absl::Status Trainer::check_together(const std::string& dir) const {
  const absl::Status mine = check_checkpoint(dir, {ranks_->rank(), ranks_->world()});
  PARVL_ASSIGN_OR_RETURN(const int64_t bad, ranks_->last_failed(!mine.ok()));
  if (mine.ok() && bad >= 0)
    return invalid("rank ", bad, " finds that checkpoint ", dir, " is damaged; its own last line says what is");
  return mine;
}

// What to do instead of going on from steps[0], which is damaged. All ranks call it.
std::string Trainer::way_out(const std::vector<int64_t>& steps) const {
  for (size_t i = 1; i < steps.size(); ++i) {
    const std::string dir = checkpoint_dir(recipe_.train.out, steps[i]);
    if (check_together(dir).ok())
      return absl::StrCat("; ", dir, " is whole: set train.resume to it, or remove the damaged one");
  }
  return "; no other checkpoint there is whole: set train.resume to never to start over";
}

absl::Status Trainer::resume() {
  const std::string& how = recipe_.train.resume;
  if (how == "never") return absl::OkStatus();
  output_->working("resuming");
  const bool newest = how == "auto" || how == "must";
  const std::vector<int64_t> steps = newest ? list_checkpoints(recipe_.train.out) : std::vector<int64_t>{};
  const std::string from = !newest ? how : steps.empty() ? "" : checkpoint_dir(recipe_.train.out, steps[0]);
  PARVL_RETURN_IF_ERROR(ranks_->expect_equal({{"the checkpoint that they go on from", from}},
                                             "give all ranks the same files, and a train.out that they share"));
  if (from.empty() && how == "auto") return absl::OkStatus();
  if (from.empty()) return invalid("train.resume is must, but ", recipe_.train.out, " holds no checkpoint");
  const absl::Status whole = check_together(from);
  if (!whole.ok() && newest) return absl::Status(whole.code(), absl::StrCat(whole.message(), way_out(steps)));
  PARVL_RETURN_IF_ERROR(whole);
  Json identity = identity_;
  // A path is a branch of that checkpoint's run, with steps of its own from there on; where that run once started does
  // not matter.
  if (!newest) identity.erase(kStartingWeights);
  PARVL_ASSIGN_OR_RETURN(const int64_t run, load_checkpoint(from, {model_.get(), optimizer_.get(), identity}));
  if (newest) {
    run_ = run;
    saved_step_ = optimizer_->steps_done();
  }
  output_->line(absl::StrCat("resumed from ", from, " after step ", optimizer_->steps_done()));
  output_->record({{"event", "resumed"}, {"step", optimizer_->steps_done()}, {"path", from}});
  return absl::OkStatus();
}

}  // namespace parvl
