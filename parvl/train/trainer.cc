#include "parvl/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <utility>

#include "parvl/comm/comm_site.h"
#include "parvl/nn/device.h"
#include "parvl/plan/cost/flops.h"
#include "parvl/train/pipeline_run.h"
#include "parvl/train/score.h"
#include "parvl/train/trainer_output.h"

namespace parvl {

SequenceInput to_sequence(const Prompt& prompt) {
  SequenceInput out;
  out.ids = prompt.ids;
  out.is_target = prompt.is_target;
  for (const MediaSpan& span : prompt.media) {
    const ProcessedImage& image = *prompt.images[static_cast<size_t>(span.image_index)];
    out.images.push_back({span.begin, {image.grid_t, image.grid_h, image.grid_w}});
    out.pixels.push_back(image.patches.empty() ? nullptr : image.patches.data());
  }
  return out;
}

std::vector<SequenceInput> to_sequences(const std::vector<Prompt>& prompts, size_t begin, size_t end) {
  std::vector<SequenceInput> out;
  for (size_t i = begin; i < end; ++i) out.push_back(to_sequence(prompts[i]));
  return out;
}

std::vector<int64_t> encoders_of(const Prompt& prompt, const std::vector<int64_t>& by_image) {
  std::vector<int64_t> out;
  for (const MediaSpan& span : prompt.media) out.push_back(by_image.at(static_cast<size_t>(span.image_index)));
  return out;
}

absl::Status Trainer::run() {
  const absl::Status status = catch_exceptions("training failed", [&] { return train_loop(); });
  output_->finish();
  return status;
}

std::unique_ptr<BatchLoader> Trainer::make_loader() const {
  LoaderOptions options;
  options.prepare.augment = recipe_.data.augment;
  options.prepare.seed = recipe_.data.shuffle_seed;
  options.prepare.max_length = recipe_.data.max_length;
  options.global_batch = recipe_.data.global_batch;
  options.share = ranks_->share(recipe_.data.micro_batch);
  options.encoders = ranks_->encoder_share();
  options.balance = ranks_->world() > 1;
  options.shuffle_seed = recipe_.data.shuffle_seed;
  options.first_step = optimizer_->steps_done();
  options.last_step = recipe_.train.steps;
  const int half = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8);
  options.threads = env_.loader_threads > 0 ? env_.loader_threads : half;
  return std::make_unique<BatchLoader>(train_set_, prompts_, options);
}

absl::Status Trainer::train_loop() {
  const int64_t last = recipe_.train.steps;
  const std::unique_ptr<BatchLoader> loader = make_loader();
  if (optimizer_->steps_done() == last)
    output_->line(absl::StrCat("all ", last, " steps are done; raise train.steps to go on"));
  absl::Status ended;
  while (ended.ok() && optimizer_->steps_done() < last) {
    PARVL_ASSIGN_OR_RETURN(const bool stop, all_stopping());
    if (stop) break;
    // Caught here, where the steps before can still be saved.
    ended = catch_exceptions(absl::StrCat("step ", optimizer_->steps_done() + 1, " failed"),
                             [&] { return next_step(*loader); });
    const int64_t every = recipe_.train.checkpoint_every, done = optimizer_->steps_done();
    if (!ended.ok() || !((every > 0 && done % every == 0) || done == last)) continue;
    const absl::Status kept = catch_exceptions(absl::StrCat("after step ", done), [&]() -> absl::Status {
      PARVL_RETURN_IF_ERROR(save());
      return evaluate();
    });
    if (kept.ok()) continue;
    ranks_->abort(std::string(kept.message()));
    return kept;
  }
  if (!ended.ok() && !all_are_here_) ranks_->abort(std::string(ended.message()));
  PARVL_RETURN_IF_ERROR(save_the_rest(ended));
  if (optimizer_->steps_done() == last) return absl::OkStatus();
  const bool continues = recipe_.train.resume == "auto" || recipe_.train.resume == "must";
  output_->line(
      absl::StrCat("stopped after step ", optimizer_->steps_done(), " as asked; ",
                   continues ? "the same command continues from there" : "train.resume=auto continues from there"));
  return absl::OkStatus();
}

// Saves the steps that no checkpoint holds yet. Gives `ended` back; a failure to save only adds to its message.
absl::Status Trainer::save_the_rest(const absl::Status& ended) {
  if (!worth_saving_ || optimizer_->steps_done() <= std::max<int64_t>(0, saved_step_)) return ended;
  if (!ended.ok() && ranks_->world() > 1 && !all_are_here_) return ended;  // others have the rest of the state
  const absl::Status saved = catch_exceptions("saving failed", [&] { return save(); });
  if (saved.ok() || ended.ok()) return ended.ok() ? saved : ended;
  return absl::Status(ended.code(), absl::StrCat(ended.message(), "; after that, ", saved.message()));
}

// Whether any rank was asked to stop.
absl::StatusOr<bool> Trainer::all_stopping() const {
  double asked = stopping() ? 1 : 0;
  PARVL_RETURN_IF_ERROR(ranks_->sum(absl::MakeSpan(&asked, 1)));
  return asked > 0;
}

// Once a run: whose every batch is so learns nothing, and nothing else would show it.
void Trainer::warn_of_no_targets() {
  if (std::exchange(warned_of_no_targets_, true)) return;
  bool any = false;
  for (int64_t i = 0; i < train_set_->size() && !any; ++i) {
    const std::vector<Message>& messages = train_set_->sample(i).messages;
    any = std::any_of(messages.begin(), messages.end(), [](const Message& m) { return m.role == "assistant"; });
  }
  output_->line(absl::StrCat("warning: no token of step ", optimizer_->steps_done(),
                             "'s batch is to be learned, so that step changes nothing",
                             any ? "" : ", nor will any other: data.train has no turn with the role \"assistant\"",
                             "; give the samples the answers to learn as assistant turns"));
}

absl::Status Trainer::next_step(BatchLoader& loader) {
  const double start = env_.clock->now_seconds();
  output_->working("preparing data");
  const absl::StatusOr<GlobalBatch> batch = loader.next();
  PARVL_ASSIGN_OR_RETURN(const int64_t bad, ranks_->last_failed(!batch.ok()));
  all_are_here_ = bad >= 0;
  PARVL_RETURN_IF_ERROR(batch.status());
  if (bad >= 0) return failed("rank ", bad, " failed; its own last line says why");
  output_->working("training");
  PARVL_ASSIGN_OR_RETURN(const StepResult result, train_step(*batch));
  if (result.targets == 0) warn_of_no_targets();
  return after_step(result, batch->indices, env_.clock->now_seconds() - start);
}

absl::StatusOr<StepResult> Trainer::compute_gradients(const GlobalBatch& batch) {
  StepResult result;
  std::array<double, 2> counts = {0, 0};  // targets and tokens, of all ranks
  for (const Prompt& prompt : batch.samples) {
    // A first token has nothing before it that could predict it.
    for (size_t i = 1; i < prompt.is_target.size(); ++i) counts[0] += prompt.is_target[i];
    counts[1] += static_cast<double>(prompt.ids.size());
  }
  if (!ranks_->counts()) counts = {0, 0};
  PARVL_RETURN_IF_ERROR(ranks_->sum(absl::MakeSpan(counts)));
  result.targets = static_cast<int64_t>(counts[0]);
  result.tokens = static_cast<int64_t>(counts[1]);
  if (result.targets == 0) return result;
  optimizer_->zero_grad();
  const at::Tensor loss = run_micro_batches(batch, result);
  optimizer_->reduce_grads();
  const at::Tensor figures = at::stack({loss, optimizer_->grad_norm()}).cpu();
  std::array<double, 2> sums = {ranks_->counts_loss() ? figures[0].item<double>() : 0,
                                ranks_->counts() ? result.flops : 0};
  PARVL_RETURN_IF_ERROR(ranks_->sum(absl::MakeSpan(sums)));
  result.loss = sums[0];
  result.flops = sums[1];
  result.grad_norm = figures[1].item<double>();
  return result;
}

at::Tensor Trainer::run_micro_batches(const GlobalBatch& batch, StepResult& result) {
  PipelineOptions options;
  options.scale = 1.0 / static_cast<double>(result.targets);
  options.recompute = recipe_.train.recompute == "full";
  options.clock = env_.clock;
  options.record = env_.actions;
  const BatchShare share = ranks_->share(recipe_.data.micro_batch);
  const auto micro = static_cast<size_t>(recipe_.data.micro_batch);
  std::vector<size_t> begins;  // of the micro batches with something to learn
  for (size_t begin = 0; begin < batch.samples.size(); begin += micro) {
    const size_t end = std::min(begin + micro, batch.samples.size());
    BatchShape shape;
    PipelineMicrobatch one;
    for (size_t i = begin; i < end; ++i) {
      const Prompt& prompt = batch.samples[i];
      shape.sequence_tokens.push_back(static_cast<int64_t>(prompt.ids.size()));
      for (size_t t = 1; t < prompt.is_target.size(); ++t) shape.loss_tokens += prompt.is_target[t];
      for (const ImageSpan& image : to_sequence(prompt).images) {
        one.grids.push_back(image.grid);
        shape.image_patches.push_back(image.grid.patches());
      }
      if (!ranks_->encoder_apart()) continue;
      for (const int64_t encoder : encoders_of(prompt, batch.encoders.at(i))) one.encoders.push_back(encoder);
    }
    if (shape.loss_tokens == 0) continue;
    result.flops += training_flops(model_->spec(), shape);
    begins.push_back(begin);
    one.replica = share.replica_of(static_cast<int64_t>(begin));
    options.microbatches.push_back(std::move(one));
  }
  options.is_final = [&](const std::string& prefix) { optimizer_->is_final(prefix); };
  options.sequences = [&](int64_t microbatch) {
    const size_t begin = begins[static_cast<size_t>(microbatch)];
    return to_sequences(batch.samples, begin, std::min(begin + micro, batch.samples.size()));
  };
  return run_pipeline(*model_, *ranks_, device_, options);
}

absl::StatusOr<StepResult> Trainer::train_step(const GlobalBatch& batch) {
  PARVL_ASSIGN_OR_RETURN(const StepResult result, compute_gradients(batch));
  PARVL_RETURN_IF_ERROR(update(result));
  return result;
}

absl::Status Trainer::update(const StepResult& result) {
  PARVL_RETURN_IF_ERROR(ranks_->compare());  // a step in which ranks called different things reaches no weight
  if (result.targets == 0) {
    optimizer_->skip_step();
    return absl::OkStatus();
  }
  const int64_t step = optimizer_->steps_done();
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    worth_saving_ = false;  // going on from there would only end the same way
    return failed("step ", step + 1, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
                  ", not finite, so this step's update was not made; lower optim.lr, raise optim.warmup_steps or set "
                  "optim.clip_norm");
  }
  if (recipe_.optim.clip_norm > 0 && recipe_.optim.clip_norm < result.grad_norm + 1e-6) {
    optimizer_->scale_grads(recipe_.optim.clip_norm / (result.grad_norm + 1e-6));
  }
  worth_saving_ = false;  // stays so when the update throws half-way
  optimizer_->step(lr_factor(recipe_.optim, step, recipe_.train.steps));
  worth_saving_ = true;
  return absl::OkStatus();
}

absl::Status Trainer::after_step(const StepResult& result, const std::vector<int64_t>& samples, double seconds) {
  interval_seconds_ += seconds;
  interval_flops_ += result.flops;
  interval_tokens_ += result.tokens;
  StepReport report;
  report.step = optimizer_->steps_done();
  report.loss = result.loss;
  report.grad_norm = result.grad_norm;
  report.lr = recipe_.optim.lr * lr_factor(recipe_.optim, report.step - 1, recipe_.train.steps);
  report.tokens_per_second = interval_seconds_ > 0 ? static_cast<double>(interval_tokens_) / interval_seconds_ : 0;
  report.memory_bytes = memory_in_use(device_);
  const double peak = peak_flops(device_, to_scalar_type(dtype_));
  if (peak > 0 && interval_seconds_ > 0) report.mfu = interval_flops_ / interval_seconds_ / peak;
  PARVL_RETURN_IF_ERROR(
      output_->step(report, {{"tokens", result.tokens}, {"loss_tokens", result.targets}, {"samples", samples}}));
  if (output_->is_logged(report.step)) {
    interval_seconds_ = interval_flops_ = 0;
    interval_tokens_ = 0;
  }
  return absl::OkStatus();
}

absl::Status Trainer::save() {
  output_->working("saving");
  const CommSite site("save", CommSite::Wait::kLong);
  CheckpointContents contents;
  contents.model = model_.get();
  contents.optimizer = optimizer_.get();
  contents.run = run_;
  contents.identity = identity_;
  contents.copy_from = recipe_.model.empty() ? recipe_.tokenizer : recipe_.model;
  contents.ranks = ranks_.get();
  contents.writer = writer_;
  const absl::StatusOr<std::string> dir = save_checkpoint(recipe_.train.out, dtype_, contents);
  if (!dir.ok()) {
    const std::string last = saved_step_ > 0 ? absl::StrCat("; the one of step ", saved_step_, " is whole") : "";
    return absl::Status(dir.status().code(), absl::StrCat(dir.status().message(), last));
  }
  saved_step_ = optimizer_->steps_done();
  output_->line("saved " + *dir);
  output_->record({{"event", "saved"}, {"step", saved_step_}, {"path", *dir}});
  return absl::OkStatus();
}

absl::Status Trainer::evaluate() {
  if (!eval_set_) return absl::OkStatus();
  output_->working("evaluating");
  const CommSite site("evaluate", CommSite::Wait::kLong);
  return ranks_->agree(evaluate_here());
}

absl::Status Trainer::evaluate_here() {
  ScoreOptions options;
  options.batch = recipe_.data.micro_batch;
  options.max_length = recipe_.data.max_length;
  options.ranks = ranks_.get();
  absl::Status asked;
  options.stop_requested = [&] {
    const absl::StatusOr<bool> stop = all_stopping();
    asked.Update(stop.status());
    return !stop.ok() || *stop;
  };
  options.images = eval_images_.get();
  const auto score = score_dataset(*model_, *prompts_, *eval_set_, device_, options);
  PARVL_RETURN_IF_ERROR(asked);
  if (absl::IsCancelled(score.status())) return absl::OkStatus();  // the loop leaves
  PARVL_RETURN_IF_ERROR(score.status());
  const int64_t step = optimizer_->steps_done();
  output_->line(absl::StrCat("step ", step, "  eval_loss ", score->loss, "  eval_accuracy ", score->accuracy, "  (",
                             score->samples, " samples, an answer counts when every token is the most likely one)"));
  output_->record({{"event", "eval"},
                   {"step", step},
                   {"loss", score->loss},
                   {"accuracy", score->accuracy},
                   {"samples", score->samples}});
  return output_->scalars(step, {{"eval/loss", score->loss}, {"eval/accuracy", score->accuracy}});
}

}  // namespace parvl
