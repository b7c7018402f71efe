// The whole decode step of a batch on a GPU, from token ids to chosen tokens, as one recorded graph for each of a few
// batch sizes: a step is one copy of its inputs into fixed memory and one launch.
#pragma once

#include <absl/types/span.h>

#include <array>
#include <memory>
#include <vector>

#include "parvl/exec/kv_cache.h"
#include "parvl/kernels/decode_sample.h"
#include "parvl/models/model.h"
#include "parvl/nn/cuda_graph.h"

namespace parvl {

// A sequence whose newest token is `token`; its keys and values are in `blocks` but for that token's.
struct DecodeRow {
  int32_t token = 0;
  std::array<int64_t, 3> position = {};  // of it on the rotary axes
  const int32_t* blocks = nullptr;       // borrowed for the call; enough for `length`
  int64_t num_blocks = 0;
  int64_t length = 0;  // tokens, the newest included
  kernels::SampleRow sample;
};

struct DecodeGraphsOptions {
  int64_t max_rows = 1;    // sequences a step
  int64_t max_blocks = 1;  // of a sequence
  bool record = true;      // false: the same steps without recording them, launch by launch
};

// All calls from one thread, which has a stream of its own (use_own_stream). Model and pages outlive it; the pages'
// tensors must stay where they are. Of a backbone that is cut by tensors all ranks make the same graphs, with what they
// say to each other in them, and the same runs.
class DecodeGraphs {
 public:
  // nullptr where there are no graphs: on the CPU, without libparvl_cuda.so, for a type or heads without kernels.
  // Records the graphs here, about a tenth of a second each.
  static std::unique_ptr<DecodeGraphs> create(Model& model, KvPages& pages, const DecodeGraphsOptions& options);

  int64_t max_rows() const { return options_.max_rows; }
  bool recorded() const { return options_.record; }
  // The next token of each row, in order; waits for it. Borrowed until the next run.
  absl::Span<const kernels::SampledRow> run(absl::Span<const DecodeRow> rows);
  // The last run's logits [V] of a row, float32 on the CPU.
  at::Tensor logits(size_t row) const;

 private:
  struct Graph {
    int64_t rows = 0;
    std::unique_ptr<CudaGraph> graph;
    at::Tensor logits;  // [rows, V]
  };
  // Views into one block of memory that has the same layout on the host and on the device.
  struct Inputs {
    at::Tensor all;                  // bytes
    at::Tensor ids, lengths, table;  // int64 [R], int32 [R], int32 [R, blocks]
    at::Tensor cos, sin, sample;     // float32 [R, D/2], bytes of SampleRow
  };

  DecodeGraphs(Model& model, KvPages& pages, const DecodeGraphsOptions& options);
  Inputs make_inputs(bool pinned) const;
  void fill(absl::Span<const DecodeRow> rows, int64_t padded);
  Graph& graph_for(int64_t rows);
  void record(Graph& graph);
  void step(Graph& graph);

  Model& model_;
  KvPages& pages_;
  DecodeGraphsOptions options_;
  std::unique_ptr<CudaGraphPool> pool_;
  Inputs host_, device_;
  at::Tensor host_out_, device_out_, finished_;
  std::vector<Graph> graphs_;
  const Graph* last_ = nullptr;
};

}  // namespace parvl
