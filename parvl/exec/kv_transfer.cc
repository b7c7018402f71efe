#include "parvl/exec/kv_transfer.h"

#include <algorithm>

#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

int64_t blocks_of(int64_t tokens, int64_t block_size) { return (tokens + block_size - 1) / block_size; }

at::Tensor table_of(const std::vector<BlockId>& blocks, int64_t from, int64_t to, at::Device device) {
  std::vector<int64_t> table;
  for (int64_t i = from; i < to; ++i) table.push_back(blocks[static_cast<size_t>(i)].value);
  return to_device(table, device);
}

// [layers, blocks, kv_heads, block_size, head_dim] over memory of somebody else's.
at::Tensor view_of(const KvPages& pages, const std::byte* memory, int64_t blocks) {
  const at::Tensor& like = pages.keys(0);
  const int64_t layers = pages.spec().layers;
  return at::from_blob(const_cast<std::byte*>(memory), {layers, blocks, like.size(1), like.size(2), like.size(3)},
                       at::TensorOptions().dtype(like.scalar_type()));
}

const at::Tensor& side_of(const KvPages& pages, int side, int64_t layer) {
  return side == 0 ? pages.keys(layer) : pages.values(layer);
}

}  // namespace

std::vector<TransferTensor> kv_layout(const BackboneSpec& spec, DType dtype, int64_t block_size, int64_t tokens) {
  const std::vector<int64_t> shape = {spec.layers, blocks_of(tokens, block_size), spec.kv_heads, block_size,
                                      spec.head_dim};
  std::vector<TransferTensor> out = {{"keys", dtype, shape}, {"values", dtype, shape}};
  for (TransferTensor& tensor : out) {
    tensor.bytes = dtype_bytes(dtype);
    for (const int64_t size : shape) tensor.bytes *= size;
  }
  return out;
}

absl::Status check_kv(const BackboneSpec& spec, DType dtype, int64_t block_size, const EngineRequest& request) {
  const auto tokens = static_cast<int64_t>(request.prompt->ids.size() + request.generated.size());
  const auto layout = [&](int64_t of) { return kv_layout(spec, dtype, block_size, of); };
  if (request.kv != nullptr) {
    const auto equal = [](const TransferTensor& a, const TransferTensor& b) {
      return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes;
    };
    const auto wanted = layout(request.kv->tokens());
    const auto& given = request.kv->tensors();
    if (!std::equal(wanted.begin(), wanted.end(), given.begin(), given.end(), equal)) {
      return failed("the keys and values that it brings are not of this model");
    }
  }
  if (request.kv_room == nullptr) return absl::OkStatus();
  const auto wanted = layout(tokens);
  const auto fits = [](const TransferTensor& tensor, absl::Span<std::byte> room) {
    return tensor.bytes == static_cast<int64_t>(room.size());
  };
  const auto& room = request.kv_room->pieces;
  if (std::equal(wanted.begin(), wanted.end(), room.begin(), room.end(), fits)) return absl::OkStatus();
  return invalid("the room for its keys and values is not of their size");
}

void copy_out(const KvPages& pages, const SequenceWork& work, const KvRoom& room) {
  const int64_t blocks = blocks_of(work.begin + work.count, pages.block_size());
  const at::Tensor table = table_of(work.blocks, 0, blocks, pages.keys(0).device());
  for (int side = 0; side < 2; ++side) {
    const at::Tensor to = view_of(pages, room.pieces[static_cast<size_t>(side)].data(), blocks);
    for (int64_t layer = 0; layer < pages.spec().layers; ++layer) {
      const at::Tensor& from = side_of(pages, side, layer);
      at::Tensor part = to[layer];
      if (from.is_cpu()) {
        at::index_select_out(part, from, 0, table);
      } else {
        part.copy_(from.index_select(0, table));
      }
    }
  }
}

void copy_in(absl::Span<const std::byte* const> data, const KvFetch& fetch, const KvPages& pages) {
  const at::NoGradGuard no_grad;
  const int64_t size = pages.block_size(), there = fetch.begin / size;
  const int64_t blocks = blocks_of(fetch.begin + fetch.count, size);
  const at::Device device = pages.keys(0).device();
  const at::Tensor table = table_of(fetch.blocks, there, blocks, device);
  for (int side = 0; side < 2; ++side) {
    const at::Tensor from = view_of(pages, data[static_cast<size_t>(side)], blocks);
    for (int64_t layer = 0; layer < pages.spec().layers; ++layer) {
      at::Tensor to = side_of(pages, side, layer);
      to.index_copy_(0, table, from[layer].narrow(0, there, blocks - there).to(device));
    }
  }
  synchronize(device);
}

}  // namespace parvl
