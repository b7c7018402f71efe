#include "parvl/exec/backbone_step.h"

#include <cstring>
#include <utility>

#include "parvl/models/packing.h"
#include "parvl/nn/device.h"
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
  bool fits = parser.done() && out.positions.size() == out.ids.size() && sequences.size() % 3 == 0;
  size_t at = 0;
  for (size_t i = 0; fits && i < sequences.size(); i += 3) {
    const auto count = static_cast<uint64_t>(sequences[i + 2]);
    fits = count <= blocks.size() - at;
    if (!fits) break;
    const auto begin = blocks.begin() + static_cast<int64_t>(at);
    out.sequences.push_back({{begin, begin + static_cast<int64_t>(count)}, sequences[i], sequences[i + 1]});
    at += count;
  }
  if (fits && at == blocks.size()) return out;
  return invalid("a message of ", message.size(), " bytes is not a step");
}

BackboneRunner::BackboneRunner(const LoadedFiles& files, int64_t blocks, int64_t block_size)
    : model_(*files.model),
      device_(files.device),
      pages_(rank_backbone(model_.spec().backbone, ranks().size()), pixel_type(model_), device_, block_size),
      attention_(std::make_shared<PagedAttention>(pages_)) {
  pages_.reserve(blocks);
}

// Through the group, so that it goes from GPU to GPU. Each rank could as well have encoded other images: then each
// would send what it has.
at::Tensor BackboneRunner::share_visual(const at::Tensor& visual, int64_t rows) const {
  if (!is_cut()) return visual;
  const at::TensorOptions options = at::TensorOptions().dtype(pixel_type(model_)).device(device_);
  const at::Tensor out =
      ranks().rank() == 0 ? visual.to(options).contiguous() : at::empty({rows, model_.spec().backbone.hidden}, options);
  wait(ranks().group()->broadcast(buffer_of(out), 0));
  return out;
}

at::Tensor BackboneRunner::run(const BackboneStep& step, const at::Tensor& visual) {
  at::NoGradGuard no_grad;
  const Backbone& backbone = model_.backbone();
  BackboneBatch batch;
  batch.ids = to_device(step.ids, device_);
  batch.rope = backbone.rope(step.positions, device_);
  attention_->begin(step.sequences);
  batch.attention = attention_;
  Bundle in;
  if (!step.visual_rows.empty()) {
    batch.visual_rows = to_device(step.visual_rows, device_);
    in.set("visual", share_visual(visual, batch.visual_rows.size(0)));
  }
  const at::Tensor own = run_pieces(backbone.pieces(batch), std::move(in)).at("hidden");
  if (step.sample_rows.empty()) {
    synchronize(device_);
    return {};
  }
  const at::Tensor hidden = ranks().gather_rows(own, ranks().split(batch.ids.size(0)));
  return backbone.logits(hidden.index_select(0, to_device(step.sample_rows, device_))).contiguous();
}

}  // namespace parvl
