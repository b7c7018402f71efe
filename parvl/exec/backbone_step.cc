#include "parvl/exec/backbone_step.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "parvl/models/packing.h"
#include "parvl/nn/device.h"
#include "parvl/nn/stage.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

template <typename T>
void put(std::string& out, const std::vector<T>& values) {
  const uint64_t count = values.size();
  out.append(reinterpret_cast<const char*>(&count), sizeof count);
  out.append(reinterpret_cast<const char*>(values.data()), count * sizeof(T));
}

class Parser {
 public:
  explicit Parser(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  std::vector<T> list() {
    uint64_t count = 0;
    copy(&count, 1);
    std::vector<T> out;
    if (failed_ || count > bytes_.size() / sizeof(T)) {
      failed_ = true;
      return out;
    }
    out.resize(count);
    copy(out.data(), count);
    return out;
  }
  bool done() const { return !failed_ && bytes_.empty(); }
  bool failed() const { return failed_; }

 private:
  template <typename T>
  void copy(T* out, size_t count) {
    failed_ = failed_ || count > bytes_.size() / sizeof(T);
    if (failed_ || count == 0) return;
    std::memcpy(out, bytes_.data(), count * sizeof(T));
    bytes_.remove_prefix(count * sizeof(T));
  }
  std::string_view bytes_;
  bool failed_ = false;
};

}  // namespace

std::string to_message(const BackboneStep& step) {
  std::string out;
  std::vector<int64_t> sequences;
  std::vector<int32_t> blocks;
  for (const PagedSequence& sequence : step.sequences) {
    sequences.insert(sequences.end(), {sequence.begin, sequence.count, static_cast<int64_t>(sequence.blocks.size())});
    blocks.insert(blocks.end(), sequence.blocks.begin(), sequence.blocks.end());
  }
  put(out, step.ids);
  put(out, step.positions);
  put(out, sequences);
  put(out, blocks);
  put(out, step.visual_rows);
  put(out, step.sample_rows);
  put(out, std::vector<int64_t>{step.micro_batches, step.recorded ? 1 : 0});
  return out;
}

absl::StatusOr<BackboneStep> read_step(std::string_view message) {
  Parser parser(message);
  BackboneStep out;
  out.ids = parser.list<int64_t>();
  out.positions = parser.list<std::array<int64_t, 3>>();
  const auto sequences = parser.list<int64_t>();
  const auto blocks = parser.list<int32_t>();
  out.visual_rows = parser.list<int64_t>();
  out.sample_rows = parser.list<int64_t>();
  const auto how = parser.list<int64_t>();
  bool fits = parser.done() && how.size() == 2 && how[0] >= 1 && out.positions.size() == out.ids.size() &&
              sequences.size() % 3 == 0;
  size_t at = 0;
  for (size_t i = 0; fits && i < sequences.size(); i += 3) {
    const auto count = static_cast<uint64_t>(sequences[i + 2]);
    fits = count <= blocks.size() - at;
    if (!fits) break;
    const auto begin = blocks.begin() + static_cast<int64_t>(at);
    out.sequences.push_back({{begin, begin + static_cast<int64_t>(count)}, sequences[i], sequences[i + 1]});
    at += count;
  }
  if (fits) out.micro_batches = how[0];
  if (fits) out.recorded = how[1] != 0;
  fits = fits && (!out.recorded || out.is_decode());
  if (fits && at == blocks.size()) return out;
  return invalid("a message of ", message.size(), " bytes is not a step");
}

int64_t count_micro_batches(int64_t tokens, int64_t stages, int64_t least) {
  return std::clamp<int64_t>(tokens / std::max<int64_t>(1, least), 1, stages);
}

BackboneStep micro_batch_of(const BackboneStep& step, int64_t index) {
  const auto tokens = static_cast<int64_t>(step.ids.size());
  const int64_t begin = index * tokens / step.micro_batches, end = (index + 1) * tokens / step.micro_batches;
  BackboneStep out;
  out.ids.assign(step.ids.begin() + begin, step.ids.begin() + end);
  out.positions.assign(step.positions.begin() + begin, step.positions.begin() + end);
  int64_t at = 0;
  for (const PagedSequence& sequence : step.sequences) {
    const int64_t from = std::max(begin, at), to = std::min(end, at + sequence.count);
    if (from < to) out.sequences.push_back({sequence.blocks, sequence.begin + from - at, to - from});
    at += sequence.count;
  }
  const auto inside = [&](const std::vector<int64_t>& rows, std::vector<int64_t>& own) {
    for (const int64_t row : rows) {
      if (row >= begin && row < end) own.push_back(row - begin);
    }
  };
  inside(step.visual_rows, out.visual_rows);
  inside(step.sample_rows, out.sample_rows);
  return out;
}

std::vector<DecodeRow> decode_rows(const BackboneStep& step) {
  std::vector<DecodeRow> out;
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    const PagedSequence& sequence = step.sequences[i];
    DecodeRow row;
    row.token = static_cast<int32_t>(step.ids[i]);
    row.position = step.positions[i];
    row.blocks = sequence.blocks.data();
    row.num_blocks = static_cast<int64_t>(sequence.blocks.size());
    row.length = sequence.begin + 1;
    out.push_back(row);
  }
  return out;
}

namespace {

StagePart part_of(const LoadedFiles& files) {
  return files.rank.stage.value_or(StagePart{0, files.model->spec().backbone.layers, true, true});
}

}  // namespace

BackboneRunner::BackboneRunner(const LoadedFiles& files, int64_t blocks, int64_t block_size)
    : model_(*files.model),
      device_(files.device),
      others_(files.ranks),
      part_(part_of(files)),
      pages_(rank_backbone(model_.spec().backbone, files.rank), pixel_type(model_), device_, block_size,
             part_.first_layer),
      attention_(std::make_shared<PagedAttention>(pages_)) {
  pages_.reserve(blocks);
}

// Through the group, so that it goes from GPU to GPU.
at::Tensor BackboneRunner::share_visual(const at::Tensor& visual, int64_t rows) const {
  if (ranks().alone()) return visual;
  const at::Tensor out =
      ranks().rank() == 0 ? visual.to(pixel_type(model_)).to(device_).contiguous() : empty_rows(rows);
  wait(ranks().group()->broadcast(buffer_of(out), 0));
  return out;
}

at::Tensor BackboneRunner::empty_rows(int64_t rows) const {
  const at::TensorOptions options = at::TensorOptions().dtype(pixel_type(model_)).device(device_);
  return at::empty({rows, model_.spec().backbone.hidden}, options);
}

// This rank's rows of the hidden states. None are not sent.
at::Tensor BackboneRunner::from_stage_before(int64_t tokens) const {
  const RowSplit rows = ranks().split(tokens);
  const int64_t own = rows.counts.empty() ? tokens : rows.counts[static_cast<size_t>(ranks().rank())];
  const at::Tensor out = empty_rows(own);
  if (own > 0) wait(others_->from_before()->receive(buffer_of(out), 0));
  return out;
}

// This stage's part of a micro batch: this rank's rows of the hidden states.
at::Tensor BackboneRunner::run_stage(const BackboneStep& step, const at::Tensor& visual) {
  const Backbone& backbone = model_.backbone();
  BackboneBatch batch;
  batch.ids = to_device(step.ids, device_);
  batch.rope = backbone.rope(step.positions, device_);
  attention_->begin(step.sequences);
  batch.attention = attention_;
  Bundle in;
  if (!part_.embedding) {
    in.set("hidden", from_stage_before(batch.ids.size(0)));
  } else if (!step.visual_rows.empty()) {
    batch.visual_rows = to_device(step.visual_rows, device_);
    in.set("visual", share_visual(visual, batch.visual_rows.size(0)));
  }
  return run_pieces(stage_pieces(backbone.pieces(batch), part_), std::move(in)).at("hidden");
}

// The last stage makes the logits of the rows that are asked for, and gives them to the first rank of all.
at::Tensor BackboneRunner::share_logits(const at::Tensor& hidden_SH, int64_t rows) const {
  at::Tensor out;
  if (part_.head) out = model_.backbone().logits(hidden_SH).contiguous();
  ProcessGroup* const group = others_ == nullptr ? nullptr : others_->logits();
  if (group == nullptr) return out;
  if (group->rank() == 1) {
    wait(group->send(buffer_of(out), 0));
  } else {
    out = at::empty({rows, model_.spec().backbone.vocab}, empty_rows(0).options());
    wait(group->receive(buffer_of(out), 1));
  }
  return out;
}

at::Tensor BackboneRunner::run(const BackboneStep& step, const at::Tensor& visual) {
  at::NoGradGuard no_grad;
  const WholeRows whole(model_.params(), Module::kBackbone, step.is_decode());
  std::vector<at::Tensor> sampled;  // on the last stage
  Sent sent;                        // what the next stage may not have yet
  int64_t images = 0;
  for (int64_t i = 0; i < step.micro_batches; ++i) {
    const BackboneStep micro_batch = micro_batch_of(step, i);
    const auto rows = static_cast<int64_t>(micro_batch.visual_rows.size());
    const at::Tensor own =
        run_stage(micro_batch, visual.defined() && rows > 0 ? visual.narrow(0, images, rows) : at::Tensor());
    images += rows;
    if (!part_.head) {
      if (sent.work != nullptr) wait(std::exchange(sent.work, nullptr));
      sent.values = own.contiguous();
      if (own.size(0) > 0) sent.work = others_->to_next()->send(buffer_of(sent.values), 1);
    } else if (!micro_batch.sample_rows.empty()) {
      const at::Tensor hidden = ranks().gather_rows(own, ranks().split(static_cast<int64_t>(micro_batch.ids.size())));
      sampled.push_back(hidden.index_select(0, to_device(micro_batch.sample_rows, device_)));
    }
  }
  if (sent.work != nullptr) wait(sent.work);
  if (step.sample_rows.empty()) {
    synchronize(device_);
    return {};
  }
  const at::Tensor hidden_SH = sampled.size() > 1 ? at::cat(sampled, 0) : sampled.empty() ? at::Tensor() : sampled[0];
  return share_logits(hidden_SH, static_cast<int64_t>(step.sample_rows.size()));
}

std::unique_ptr<DecodeGraphs> make_decode_graphs(const LoadedFiles& files, BackboneRunner& runner, int64_t max_seqs,
                                                 int64_t max_model_len, bool record) {
  constexpr int64_t kMaxRows = 256;
  if (!files.device.is_cuda() || runner.stages() > 1) return nullptr;
  const int64_t size = runner.pages().block_size();
  return DecodeGraphs::create(*files.model, runner.pages(),
                              {std::min(max_seqs, kMaxRows), (max_model_len + size - 1) / size, record});
}

}  // namespace parvl
