#include "parvl/train/trainer.h"

#include <ATen/Parallel.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "parvl/models/checkpoint.h"
#include "parvl/nn/device.h"
#include "parvl/plan/cost/flops.h"
#include "parvl/train/backprop.h"
#include "parvl/train/checkpointer.h"
#include "parvl/train/progress.h"
#include "parvl/train/score.h"
#include "parvl/train/tensorboard.h"

namespace parvl {

struct Trainer::Output {
  Progress progress;
  std::unique_ptr<EventWriter> events;
  // Sums since the last logged step.
  double seconds = 0, flops = 0;
  int64_t tokens = 0;
};

std::vector<SequenceInput> to_sequences(const std::vector<Prompt>& prompts, size_t begin, size_t end) {
  std::vector<SequenceInput> out;
  for (size_t i = begin; i < end; ++i) {
    const Prompt& prompt = prompts[i];
    SequenceInput sequence;
    sequence.ids = prompt.ids;
    sequence.is_target = prompt.is_target;
    for (const MediaSpan& span : prompt.media) {
      const ProcessedImage& image = *prompt.images[static_cast<size_t>(span.image_index)];
      sequence.images.push_back({span.begin, {image.grid_t, image.grid_h, image.grid_w}});
      sequence.pixels.push_back(image.patches.data());
    }
    out.push_back(std::move(sequence));
  }
  return out;
}

Trainer::Trainer(const Recipe& recipe, TrainerEnvironment environment) : recipe_(recipe), env_(std::move(environment)) {}
Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(const Recipe& recipe, TrainerEnvironment environment) {
  std::unique_ptr<Trainer> trainer(new Trainer(recipe, std::move(environment)));
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot start training", [&] { return trainer->set_up(); }));
  return trainer;
}

std::string Trainer::identity() const {
  int64_t count = 0;
  for (const Param* param : model_->params().owned()) count += param->numel();
  return absl::StrCat(model_->spec().model_type, " of ", count, " parameters, ", recipe_.train.dtype, ", ", recipe_.optim.name, ", data ",
                      recipe_.data.train, ", global_batch ", recipe_.data.global_batch, ", shuffle_seed ", recipe_.data.shuffle_seed,
                      ", augment ", recipe_.data.augment);
}

absl::Status Trainer::set_up() {
  std::error_code error;
  std::filesystem::create_directories(recipe_.train.out, error);
  if (error) return invalid("train.out: cannot make ", recipe_.train.out, ": ", error.message());
  PARVL_ASSIGN_OR_RETURN(dtype_, parse_dtype(recipe_.train.dtype));
  PARVL_ASSIGN_OR_RETURN(device_, select_device(recipe_.train.device));
  PARVL_RETURN_IF_ERROR(load_model_and_data());
  PARVL_RETURN_IF_ERROR(resume());
  ProgressOptions options;
  options.total_steps = recipe_.train.steps;
  options.first_step = optimizer_->steps_done();
  options.log_every = recipe_.train.log_every;
  options.terminal = env_.terminal;
  options.columns = env_.columns;
  output_ = std::make_unique<Output>(Output{Progress(*env_.clock, options, env_.write), nullptr});
  PARVL_ASSIGN_OR_RETURN(output_->events, EventWriter::create(recipe_.train.out, env_.clock->wall_seconds()));
  return absl::OkStatus();
}

absl::Status Trainer::load_model_and_data() {
  const bool from_directory = !recipe_.model.empty();
  const std::string text_dir = from_directory ? recipe_.model : recipe_.tokenizer;
  ModelSpec spec;
  if (from_directory) {
    PARVL_ASSIGN_OR_RETURN(spec, load_model_spec(recipe_.model));
  } else {
    PARVL_ASSIGN_OR_RETURN(const Json config, read_json_file(recipe_.config));
    PARVL_ASSIGN_OR_RETURN(spec, parse_model_spec(config, recipe_.config));
  }
  PARVL_ASSIGN_OR_RETURN(prompts_, PromptBuilder::load(text_dir));
  if (prompts_->tokenizer().vocab_size() > spec.backbone.vocab) {
    return invalid(text_dir, ": the tokenizer has ", prompts_->tokenizer().vocab_size(), " ids, the model's vocabulary only ",
                   spec.backbone.vocab);
  }
  if (recipe_.data.max_length <= 0) recipe_.data.max_length = spec.backbone.max_positions;
  PARVL_ASSIGN_OR_RETURN(train_set_, Dataset::load(recipe_.data.train, env_.base_dir));
  if (!recipe_.data.eval.empty()) {
    PARVL_ASSIGN_OR_RETURN(eval_set_, Dataset::load(recipe_.data.eval, env_.base_dir));
  }
  model_ = Model::create(spec);
  PARVL_ASSIGN_OR_RETURN(optimizer_, Optimizer::create(model_->params(), recipe_, dtype_, device_));
  if (from_directory) return load_weights(*model_, recipe_.model);
  model_->params().initialise(recipe_.seed, spec.init_std);
  optimizer_->refresh_values();
  return absl::OkStatus();
}

absl::Status Trainer::resume() {
  const std::string& how = recipe_.train.resume;
  if (how == "never") return absl::OkStatus();
  const ResumeTarget target{model_.get(), optimizer_.get(), identity()};
  std::string from;
  if (how == "auto" || how == "must") {
    const auto steps = list_checkpoints(recipe_.train.out);
    if (steps.empty()) {
      if (how == "must") return invalid("train.resume is must, but ", recipe_.train.out, " holds no checkpoint");
      return absl::OkStatus();
    }
    from = recipe_.train.out + "/step-" + std::to_string(steps[0]);
    auto step = load_checkpoint(from, target);
    if (!step.ok()) {
      const std::string previous =
          steps.size() > 1 ? absl::StrCat("; the one before is whole or not checked: set train.resume to ", recipe_.train.out, "/step-", steps[1])
                           : "; set train.resume to never to start over";
      return absl::InvalidArgumentError(absl::StrCat(step.status().message(), previous));
    }
  } else {
    from = how;
    auto step = load_checkpoint(from, target);
    if (!step.ok()) return step.status();
  }
  env_.write(absl::StrCat("resumed from ", from, " after step ", optimizer_->steps_done(), "\n"));
  saved_step_ = optimizer_->steps_done();
  return absl::OkStatus();
}

absl::Status Trainer::run() {
  return catch_exceptions("training failed", [&] {
    const absl::Status status = train_loop();
    output_->progress.finish();
    return status;
  });
}

absl::Status Trainer::train_loop() {
  LoaderOptions options;
  options.prepare.augment = recipe_.data.augment;
  options.prepare.seed = recipe_.data.shuffle_seed;
  options.prepare.max_length = recipe_.data.max_length;
  options.global_batch = recipe_.data.global_batch;
  options.shuffle_seed = recipe_.data.shuffle_seed;
  options.first_step = optimizer_->steps_done();
  options.last_step = recipe_.train.steps;
  options.threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8);
  BatchLoader loader(train_set_, prompts_, options);
  while (optimizer_->steps_done() < recipe_.train.steps) {
    const double start = env_.clock->now_seconds();
    output_->progress.working("preparing data");
    PARVL_ASSIGN_OR_RETURN(const GlobalBatch batch, loader.next());
    PARVL_ASSIGN_OR_RETURN(const StepResult result, train_step(batch));
    PARVL_RETURN_IF_ERROR(after_step(result, env_.clock->now_seconds() - start));
    const int64_t done = optimizer_->steps_done();
    const bool stop = env_.stop_requested && env_.stop_requested();
    const bool due = recipe_.train.checkpoint_every > 0 && done % recipe_.train.checkpoint_every == 0;
    if (due || stop || done == recipe_.train.steps) {
      PARVL_RETURN_IF_ERROR(save());
      if (!stop) PARVL_RETURN_IF_ERROR(evaluate());
    }
    if (stop) {
      output_->progress.line(absl::StrCat("stopped after step ", done, " as asked; the same command continues from there"));
      return absl::OkStatus();
    }
  }
  if (saved_step_ != optimizer_->steps_done()) PARVL_RETURN_IF_ERROR(save());
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Trainer::train_step(const GlobalBatch& batch) {
  StepResult result;
  for (const Prompt& prompt : batch.samples) {
    // A first token has nothing before it that could predict it.
    for (size_t i = 1; i < prompt.is_target.size(); ++i) result.targets += prompt.is_target[i];
    result.tokens += static_cast<int64_t>(prompt.ids.size());
  }
  if (result.targets == 0) {
    optimizer_->set_steps_done(optimizer_->steps_done() + 1);  // nothing to learn: weights and moments stay as they are
    return result;
  }
  optimizer_->zero_grad();
  at::Tensor loss = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device_));
  const size_t micro = static_cast<size_t>(recipe_.data.micro_batch);
  for (size_t begin = 0; begin < batch.samples.size(); begin += micro) {
    const size_t end = std::min(begin + micro, batch.samples.size());
    const PackedBatch packed = pack(*model_, to_sequences(batch.samples, begin, end), device_);
    output_->progress.working("training");
    loss.add_(forward_backward(*model_, packed, 1.0 / static_cast<double>(result.targets), recipe_.train.recompute == "full"));
    BatchShape shape;
    for (size_t i = begin; i < end; ++i) shape.sequence_tokens.push_back(static_cast<int64_t>(batch.samples[i].ids.size()));
    for (const Grid& grid : packed.grids) shape.image_patches.push_back(grid.patches());
    shape.loss_tokens = packed.num_targets;
    result.flops += training_flops(model_->spec(), shape);
  }
  const at::Tensor norm = optimizer_->grad_norm();
  if (recipe_.optim.clip_norm > 0) optimizer_->scale_grads((recipe_.optim.clip_norm / (norm + 1e-6)).clamp_max(1.0));
  const at::Tensor figures = at::stack({loss, norm}).cpu();
  result.loss = figures[0].item<double>();
  result.grad_norm = figures[1].item<double>();
  const int64_t step = optimizer_->steps_done();
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    return failed("step ", step + 1, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
                  ", not finite; the weights were not changed. Lower optim.lr, raise optim.warmup_steps or set optim.clip_norm");
  }
  optimizer_->step(lr_factor(recipe_.optim, step, recipe_.train.steps));
  return result;
}

absl::Status Trainer::after_step(const StepResult& result, double seconds) {
  Output& out = *output_;
  out.seconds += seconds;
  out.flops += result.flops;
  out.tokens += result.tokens;
  StepReport report;
  report.step = optimizer_->steps_done();
  report.loss = result.loss;
  report.grad_norm = result.grad_norm;
  report.lr = recipe_.optim.lr * lr_factor(recipe_.optim, report.step - 1, recipe_.train.steps);
  report.tokens_per_second = out.seconds > 0 ? static_cast<double>(out.tokens) / out.seconds : 0;
  report.memory_bytes = memory_in_use(device_);
  const double peak = peak_flops(device_, to_scalar_type(dtype_));
  if (peak > 0 && out.seconds > 0) report.mfu = out.flops / out.seconds / peak;
  out.progress.step(report);
  if (report.step % recipe_.train.log_every != 0 && report.step != recipe_.train.steps) return absl::OkStatus();
  std::vector<std::pair<std::string, double>> values = {{"train/loss", report.loss},
                                                        {"train/grad_norm", report.grad_norm},
                                                        {"train/lr", report.lr},
                                                        {"train/tokens_per_second", report.tokens_per_second},
                                                        {"train/memory_bytes", static_cast<double>(report.memory_bytes)}};
  if (report.mfu >= 0) values.emplace_back("train/mfu", report.mfu);
  PARVL_RETURN_IF_ERROR(out.events->scalars(report.step, env_.clock->wall_seconds(), values));
  out.seconds = out.flops = 0;
  out.tokens = 0;
  return absl::OkStatus();
}

absl::Status Trainer::save() {
  output_->progress.working("saving");
  CheckpointContents contents;
  contents.model = model_.get();
  contents.optimizer = optimizer_.get();
  contents.step = optimizer_->steps_done();
  contents.identity = identity();
  contents.copy_from = recipe_.model.empty() ? recipe_.tokenizer : recipe_.model;
  PARVL_ASSIGN_OR_RETURN(const std::string dir, save_checkpoint(recipe_.train.out, dtype_, contents));
  saved_step_ = contents.step;
  output_->progress.line("saved " + dir);
  return absl::OkStatus();
}

absl::Status Trainer::evaluate() {
  if (!eval_set_) return absl::OkStatus();
  ScoreOptions options;
  options.batch = recipe_.data.micro_batch;
  options.max_length = recipe_.data.max_length;
  options.on_batch = [this] { output_->progress.working("evaluating"); };
  PARVL_ASSIGN_OR_RETURN(const Score score, score_dataset(*model_, *prompts_, *eval_set_, device_, options));
  output_->progress.line(absl::StrCat("step ", optimizer_->steps_done(), "  eval_loss ", score.loss, "  eval_accuracy ", score.accuracy,
                                      "  (", score.samples, " samples, an answer counts when every token is the most likely one)"));
  return output_->events->scalars(optimizer_->steps_done(), env_.clock->wall_seconds(),
                                  {{"eval/loss", score.loss}, {"eval/accuracy", score.accuracy}});
}

}  // namespace parvl
