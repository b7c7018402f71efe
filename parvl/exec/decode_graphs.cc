#include "parvl/exec/decode_graphs.h"

#include <algorithm>
#include <cstring>

#include "parvl/base/check.h"
#include "parvl/nn/cuda_ops.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

constexpr int64_t kAlign = 256;

// Attention of a recorded step: every row is a sequence with one new token.
class GraphAttention : public AttentionBackend {
 public:
  GraphAttention(KvPages& pages, cuda::DecodeRows rows) : pages_(pages), rows_(std::move(rows)) {}
  at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                    const RotaryTable& rope) override {
    const at::Tensor out = at::empty(q_TND.sizes(), q_TND.options());
    cuda::decode_attention(cuda::joined_qkv(q_TND, k_TKD, v_TKD), rope, pages_.keys(layer), pages_.values(layer), rows_,
                           out);
    return out;
  }

 private:
  KvPages& pages_;
  cuda::DecodeRows rows_;
};

}  // namespace

std::unique_ptr<DecodeGraphs> DecodeGraphs::create(Model& model, KvPages& pages, const DecodeGraphsOptions& options) {
  if (!cuda::has_decode_attention(pages.keys(0), pages.spec().heads) || pages.spec().vocab % 8 != 0) return nullptr;
  std::unique_ptr<DecodeGraphs> out(new DecodeGraphs(model, pages, options));
  if (out->pool_ == nullptr) return nullptr;
  for (Graph& graph : out->graphs_) out->record(graph);
  return out;
}

DecodeGraphs::DecodeGraphs(Model& model, KvPages& pages, const DecodeGraphsOptions& options)
    : model_(model), pages_(pages), options_(options), pool_(make_cuda_graph_pool()) {
  const int64_t max_rows = options.max_rows;
  host_ = make_inputs(/*pinned=*/true);
  device_ = make_inputs(/*pinned=*/false);
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const int64_t out_bytes = max_rows * static_cast<int64_t>(sizeof(kernels::SampledRow));
  host_out_ = at::empty({out_bytes}, bytes.pinned_memory(true));
  device_out_ = at::empty({out_bytes}, bytes.device(pages.keys(0).device()));
  finished_ = at::zeros({max_rows}, bytes.device(pages.keys(0).device()).dtype(at::kInt));
  // As fine as costs change: products take up to 8 rows at one price, then in steps of a tile.
  for (int64_t rows = 1; rows < max_rows; rows += rows < 4 ? rows : rows < 32 ? 4 : rows < 128 ? 16 : 64) {
    graphs_.push_back({.rows = rows});
  }
  graphs_.push_back({.rows = max_rows});
}

DecodeGraphs::Inputs DecodeGraphs::make_inputs(bool pinned) const {
  int64_t total = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t at = total;
    total = (total + bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  };
  const int64_t half = pages_.spec().head_dim / 2, sample_bytes = sizeof(kernels::SampleRow);
  const int64_t ids = place(options_.max_rows * 8), lengths = place(options_.max_rows * 4),
                cos = place(options_.max_rows * half * 4), sin = place(options_.max_rows * half * 4),
                sample = place(options_.max_rows * sample_bytes),
                table = place(options_.max_rows * options_.max_blocks * 4);  // last: a smaller batch copies less of it
  at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
  options = pinned ? options.pinned_memory(true) : options.device(pages_.keys(0).device());
  Inputs in;
  in.all = at::zeros({total}, options);
  const auto view = [&](int64_t at, int64_t bytes, at::ScalarType type) {
    return in.all.narrow(0, at, bytes).view(type);
  };
  in.ids = view(ids, options_.max_rows * 8, at::kLong);
  in.lengths = view(lengths, options_.max_rows * 4, at::kInt);
  in.cos = view(cos, options_.max_rows * half * 4, at::kFloat).view({options_.max_rows, half});
  in.sin = view(sin, options_.max_rows * half * 4, at::kFloat).view({options_.max_rows, half});
  in.sample = view(sample, options_.max_rows * sample_bytes, at::kByte);
  in.table =
      view(table, options_.max_rows * options_.max_blocks * 4, at::kInt).view({options_.max_rows, options_.max_blocks});
  return in;
}

void DecodeGraphs::fill(absl::Span<const DecodeRow> rows, int64_t padded) {
  std::vector<std::array<int64_t, 3>> positions;
  auto* ids = host_.ids.data_ptr<int64_t>();
  auto* lengths = host_.lengths.data_ptr<int32_t>();
  auto* table = host_.table.data_ptr<int32_t>();
  auto* sample = reinterpret_cast<kernels::SampleRow*>(host_.sample.data_ptr());
  for (size_t i = 0; i < rows.size(); ++i) {
    const DecodeRow& row = rows[i];
    PARVL_CHECK(row.num_blocks <= options_.max_blocks, "a sequence has more blocks than the graphs were made for");
    positions.push_back(row.position);
    ids[i] = row.token;
    lengths[i] = static_cast<int32_t>(row.length);
    std::copy_n(row.blocks, row.num_blocks, table + static_cast<int64_t>(i) * options_.max_blocks);
    sample[i] = row.sample;
  }
  for (int64_t i = static_cast<int64_t>(rows.size()); i < padded; ++i) {
    ids[i] = 0;
    lengths[i] = 0;
    sample[i] = {};
  }
  const RotaryTable rope = model_.backbone().rope(positions, at::kCPU);
  std::memcpy(host_.cos.data_ptr(), rope.cos.data_ptr(), rope.cos.nbytes());
  std::memcpy(host_.sin.data_ptr(), rope.sin.data_ptr(), rope.sin.nbytes());
}

// What is recorded.
void DecodeGraphs::step(Graph& graph) {
  const auto first = [&](const at::Tensor& x) { return x.narrow(0, 0, graph.rows); };
  const auto* start = static_cast<const char*>(host_.all.data_ptr());
  const int64_t bytes = static_cast<const char*>(host_.table.data_ptr()) - start + graph.rows * options_.max_blocks * 4;
  device_.all.narrow(0, 0, bytes).copy_(host_.all.narrow(0, 0, bytes), /*non_blocking=*/true);
  BackboneBatch batch;
  batch.ids = first(device_.ids);
  batch.rope = {first(device_.cos), first(device_.sin)};
  cuda::DecodeRows rows;
  rows.table = first(device_.table);
  rows.lengths = first(device_.lengths);
  rows.allocate_scratch(graph.rows, pages_.spec().kv_heads, pages_.spec().head_dim, pages_.keys(0).device());
  batch.attention = std::make_shared<GraphAttention>(pages_, std::move(rows));
  const WholeRows whole(model_.params(), Module::kBackbone);
  const at::Tensor hidden = run_pieces(model_.backbone().pieces(batch), {}).at("hidden");
  graph.logits = model_.backbone().logits(hidden).contiguous();
  const int64_t out_bytes = graph.rows * static_cast<int64_t>(sizeof(kernels::SampledRow));
  cuda::decode_sample(graph.logits, device_.sample, device_out_, finished_);
  host_out_.narrow(0, 0, out_bytes).copy_(device_out_.narrow(0, 0, out_bytes), /*non_blocking=*/true);
}

void DecodeGraphs::record(Graph& graph) {
  // Once without recording: libraries choose their kernels and set memory aside. No row is a sequence in it.
  fill({}, graph.rows);
  step(graph);
  synchronize(device_.all.device());
  if (options_.record) graph.graph = pool_->capture([&] { step(graph); });
}

DecodeGraphs::Graph& DecodeGraphs::graph_for(int64_t rows) {
  const auto graph = std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& g) { return g.rows >= rows; });
  PARVL_CHECK(graph != graphs_.end(), "more sequences than the graphs were made for");
  return *graph;
}

absl::Span<const kernels::SampledRow> DecodeGraphs::run(absl::Span<const DecodeRow> rows) {
  Graph& graph = graph_for(static_cast<int64_t>(rows.size()));
  fill(rows, graph.rows);
  if (graph.graph != nullptr) {
    graph.graph->replay();
  } else {
    step(graph);
  }
  synchronize(device_.all.device());
  last_ = &graph;
  return {reinterpret_cast<const kernels::SampledRow*>(host_out_.data_ptr()), rows.size()};
}

at::Tensor DecodeGraphs::logits(size_t row) const {
  return last_->logits.select(0, static_cast<int64_t>(row)).to(at::kCPU).to(at::kFloat);
}

}  // namespace parvl
