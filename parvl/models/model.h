// A model as three objects with named tensors between them: vision encoder → "features" → projector → "visual" →
// backbone. Each gives its work as a list of Pieces, so that training, pipelines and serving run the same code.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/nn/layers.h"
#include "parvl/nn/segment.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// Patches of one image or video: frames, rows, columns.
struct Grid {
  int64_t t = 1;
  int64_t h = 0;
  int64_t w = 0;
  int64_t patches() const { return t * h * w; }
};

// An image's place in a sequence: its merged tokens start at token `begin`.
struct ImageSpan {
  int64_t begin = 0;
  Grid grid;
};

// One forward's input to the vision encoder beside the pixels: P patches of all images one after another, each merge ×
// merge square contiguous. An encoder may compute them in an order of its own; V = P / merge² merged tokens.
struct VisionBatch {
  RotaryTable rope;   // of the patches in the encoder's order; float64 in a float64 model
  SeqLayout frames;   // attention that sees a whole frame
  SeqLayout windows;  // and a window of it; empty in a family without
  at::Tensor order;   // int64 [P]: row i of the encoder's order is patch order[i]; undefined: the patches' own order
  at::Tensor raster;  // int64 [V]: merged token i of the raster order is row raster[i] of the encoder's; likewise
  RowSplit merged;    // how V lies on the ranks that the projector is cut over
};

// Images → features. Reads "pixels" [P, patch_values], gives "features" [P, hidden] in its own order.
class VisionEncoder {
 public:
  virtual ~VisionEncoder() = default;
  virtual VisionBatch batch(const std::vector<Grid>& grids, at::Device device) const = 0;
  // Of the whole batch; with the encoder cut over ranks "features" are this rank's rows of it.
  virtual std::vector<Piece> pieces(const VisionBatch& batch) const = 0;
  // VisionBatch's `raster` by itself; empty: the encoder's order is the raster order. No image's rows lie among
  // another's.
  virtual std::vector<int64_t> raster(const std::vector<Grid>&) const { return {}; }
};

// Features → LLM embeddings. Reads "features", gives "visual" [V, LLM hidden] in the images' own raster order, or with
// `batch.raster` undefined in the order of the features. With the projector cut over ranks each reads and gives its
// own rows, which `batch.merged` counts.
class Projector {
 public:
  virtual ~Projector() = default;
  virtual std::vector<Piece> pieces(const VisionBatch& batch) const = 0;
};

// Positions of a packed batch's tokens on the rotary axes (time, height, width), all equal for plain text.
struct RopePositions {
  std::vector<std::array<int64_t, 3>> at;
  int64_t next = 0;  // the position that the token after the sequence gets, on every axis
};

// One forward's input to the backbone. Packed sequences.
struct BackboneBatch {
  at::Tensor ids;  // int64 [T] on the device
  at::Tensor
      visual_rows;   // int64 [V]: the rows of T that the "visual" embeddings take, in order; undefined without images
  RotaryTable rope;  // of the T tokens
  std::shared_ptr<AttentionBackend> attention;
};

// Embeddings and decoder. The first piece reads "visual" when visual_rows is there; all give "hidden" [T, hidden], or
// this rank's rows of it where the backbone is cut; the loss piece gives "loss", the whole of it on every rank.
class Backbone {
 public:
  virtual ~Backbone() = default;
  virtual std::vector<Piece> pieces(const BackboneBatch& batch) const = 0;
  // Final norm and loss over `rows` (int64 [R], those of T = `tokens` positions that predict) with `targets` (int64
  // [R]); see head_loss.
  virtual Piece loss_piece(int64_t tokens, at::Tensor rows, at::Tensor targets, double scale) const = 0;
  // Final norm and logits [R, V] of rows of "hidden", in the compute dtype. No autograd. Every rank gives
  // the same rows and gets all logits.
  virtual at::Tensor logits(const at::Tensor& hidden_RH) const = 0;
  virtual RotaryTable rope(const std::vector<std::array<int64_t, 3>>& positions, at::Device device) const = 0;
};

// A family's modules and names. Parameters have no tensors until `params().allocate`. Immutable after that while
// serving.
class Model {
 public:
  // Builds the family's model for a specification that parse_model_spec accepted.
  static std::unique_ptr<Model> create(const ModelSpec& spec);
  virtual ~Model() = default;

  const ModelSpec& spec() const { return spec_; }
  ParamTable& params() { return params_; }
  const ParamTable& params() const { return params_; }
  const VisionEncoder* vision_encoder() const { return vision_.get(); }  // null in a text-only model
  const Projector* projector() const { return projector_.get(); }
  const Backbone& backbone() const { return *backbone_; }

  // Rotary positions of one sequence of `tokens` with its images in order of position.
  virtual RopePositions positions(int64_t tokens, const std::vector<ImageSpan>& images) const;
  // The name a parameter has in a Hugging Face checkpoint as the hub's directories write it, and all spellings that are
  // read.
  virtual std::vector<std::string> checkpoint_names(const Param& param) const = 0;

 protected:
  explicit Model(ModelSpec spec) : spec_(std::move(spec)) {}
  ModelSpec spec_;
  ParamTable params_;
  std::unique_ptr<VisionEncoder> vision_;
  std::unique_ptr<Projector> projector_;
  std::unique_ptr<Backbone> backbone_;
};

// Runs pieces one after another without autograd.
Bundle run_pieces(const std::vector<Piece>& pieces, Bundle bundle);

std::unique_ptr<Model> make_llama(const ModelSpec& spec);  // and Qwen2
std::unique_ptr<Model> make_qwen2_vl(const ModelSpec& spec);
std::unique_ptr<Model> make_qwen2_5_vl(const ModelSpec& spec);

}  // namespace parvl
