// Images through the vision encoder and the projector on a GPU, as one recorded graph for each of a few numbers of
// patches: one launch where there would be hundreds, which is what a few images wait for.
#pragma once

#include <absl/functional/function_ref.h>

#include <memory>
#include <optional>
#include <vector>

#include "parvl/models/packing.h"
#include "parvl/nn/cuda_graph.h"

namespace parvl {

struct EncoderGraphsOptions {
  int64_t max_patches = 4096;  // of a batch; from there on the work itself takes longer than its launches
  bool record = true;          // false: the same work without recording it, launch by launch
};

// Numbers of patches to record graphs for, sorted: multiples of `merged`, at most `max_patches`, a third apart at most
// from 256 on. None when not even `merged` fit.
std::vector<int64_t> encoder_buckets(int64_t max_patches, int64_t merged);

// The first of `buckets` (sorted) that has so many patches and for which has_room(its patches); its index. None when
// that is more than twice the first with so many patches: that work would cost more than the launches it saves.
std::optional<size_t> pick_encoder_bucket(const std::vector<int64_t>& buckets, int64_t patches,
                                          absl::FunctionRef<bool(int64_t)> has_room);

// All calls from one thread, which has a stream of its own (use_own_stream). The model outlives it.
class EncoderGraphs {
 public:
  // nullptr where there are no graphs: without a vision encoder, on the CPU, without libparvl_cuda.so, for a type or
  // heads without kernels. Records the graphs here.
  static std::unique_ptr<EncoderGraphs> create(const Model& model, at::Device device,
                                               const EncoderGraphsOptions& options);

  bool recorded() const { return options_.record; }
  // Each image's "visual" [its merged tokens, hidden], in its own memory, when the current stream comes to that. None
  // at all when the images are too many, or have too many frames or windows for a graph of about their size.
  std::vector<at::Tensor> run(const SequenceInput& images);

 private:
  // The same values on the host, pinned, and on the device.
  struct Mirror {
    at::Tensor host, device;
    Mirror() = default;
    Mirror(std::vector<int64_t> sizes, at::ScalarType type, at::Device target);
    void upload(int64_t rows) const;  // the first ones
    // Rows from `begin` on; `values` is on the CPU.
    void put(int64_t begin, const at::Tensor& values) const;
  };
  // Borders of sequences. A graph of so many rows has room for one sequence every `spacing` of them, the rest is empty:
  // an empty sequence costs little, but not nothing.
  struct Borders {
    Mirror starts;
    int64_t spacing = 0, longest = 0;
    int64_t room(int64_t rows) const { return rows / spacing + 1; }
    bool takes(const SeqLayout& layout, int64_t rows) const;
    void put(const SeqLayout& layout, int64_t rows) const;
    SeqLayout upload(int64_t rows) const;
  };
  struct Graph {
    int64_t patches = 0;
    std::unique_ptr<CudaGraph> graph;
    at::Tensor visual;  // [patches / merge², hidden]
  };

  EncoderGraphs(const Model& model, at::Device device, const EncoderGraphsOptions& options,
                std::vector<int64_t> buckets);
  void fill(const SequenceInput& images, const VisionBatch& batch, int64_t padded);
  void step(Graph& graph);
  void record(Graph& graph);

  const Model& model_;
  at::Device device_;
  EncoderGraphsOptions options_;
  int64_t merged_;                       // patches a token
  std::unique_ptr<CudaGraphPool> pool_;  // not null where graphs are recorded
  Mirror pixels_, cos_, sin_, order_, raster_;
  Borders frames_, windows_;
  std::vector<int64_t> buckets_;
  std::vector<Graph> graphs_;  // one for each of them
};

}  // namespace parvl
