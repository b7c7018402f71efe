#include "parvl/exec/gpu_attention.h"

#include <algorithm>

#include "parvl/exec/kv_cache.h"
#include "parvl/kernels/prefill_attention.h"

namespace parvl {
namespace {

// int32 arrays that reach the device in one copy.
class Upload {
 public:
  // Index of the array for `view`.
  size_t add(const std::vector<int32_t>& values) {
    parts_.push_back({static_cast<int64_t>(all_.size()), static_cast<int64_t>(values.size())});
    all_.insert(all_.end(), values.begin(), values.end());
    all_.resize((all_.size() + 3) / 4 * 4);  // tiles are read 16 bytes at a time
    return parts_.size() - 1;
  }
  void run(at::Device device) { device_ = at::tensor(all_, at::kInt).to(device); }
  at::Tensor view(size_t index) const { return device_.narrow(0, parts_[index].begin, parts_[index].count); }

 private:
  struct Part {
    int64_t begin, count;
  };
  std::vector<Part> parts_;
  std::vector<int32_t> all_;
  at::Tensor device_;
};

// The block tables of some sequences, each as long as the longest.
struct Tables {
  std::vector<const PagedSequence*> sequences;

  std::vector<int32_t> flat() const {
    size_t widest = 0;
    for (const PagedSequence* s : sequences) widest = std::max(widest, s->blocks.size());
    std::vector<int32_t> out;
    for (const PagedSequence* s : sequences) {
      out.insert(out.end(), s->blocks.begin(), s->blocks.end());
      out.resize(out.size() + widest - s->blocks.size());
    }
    return out;
  }
};

}  // namespace

void GpuAttention::begin(const std::vector<PagedSequence>& sequences, const std::vector<int32_t>& places,
                         const LayerPages& pages) {
  std::vector<int32_t> rows, lengths, tiles;
  Tables decode, prefill;
  int64_t row = 0;
  for (const PagedSequence& s : sequences) {
    if (s.count == 1) {
      rows.push_back(static_cast<int32_t>(row));
      lengths.push_back(static_cast<int32_t>(s.begin + 1));
      decode.sequences.push_back(&s);
    } else {
      const int32_t index = static_cast<int32_t>(prefill.sequences.size());
      for (int64_t i = 0; i < s.count; i += kernels::kPrefillTile) {
        const int64_t count = std::min<int64_t>(kernels::kPrefillTile, s.count - i);
        tiles.insert(tiles.end(), {index, static_cast<int32_t>(row + i), static_cast<int32_t>(s.begin + i),
                                   static_cast<int32_t>(count)});
      }
      prefill.sequences.push_back(&s);
    }
    row += s.count;
  }
  decode_count_ = static_cast<int64_t>(decode.sequences.size());
  prefill_count_ = static_cast<int64_t>(prefill.sequences.size());
  Upload upload;
  const size_t at_places = upload.add(places), at_rows = upload.add(rows), at_lengths = upload.add(lengths),
               at_decode = upload.add(decode.flat()), at_tiles = upload.add(tiles),
               at_prefill = upload.add(prefill.flat());
  upload.run(pages.keys.device());
  places_ = upload.view(at_places);
  tiles_ = upload.view(at_tiles);
  if (prefill_count_ > 0) table_ = upload.view(at_prefill).view({prefill_count_, -1});
  if (decode_count_ == 0) return;
  decode_.rows = upload.view(at_rows);
  decode_.lengths = upload.view(at_lengths);
  decode_.table = upload.view(at_decode).view({decode_count_, -1});
  decode_.allocate_scratch(decode_count_, pages.keys.size(1), pages.keys.size(3), pages.keys.device());
}

at::Tensor GpuAttention::attend(const LayerPages& pages, const at::Tensor& q_TND, const at::Tensor& k_TKD,
                                const at::Tensor& v_TKD, const RotaryTable& rope) const {
  const at::Tensor out = at::empty(q_TND.sizes(), q_TND.options());
  const at::Tensor qkv = cuda::joined_qkv(q_TND, k_TKD, v_TKD);
  if (prefill_count_ > 0) {
    const at::Tensor q = cuda::store_rows(qkv, rope, places_, pages.keys, pages.values);
    cuda::prefill_attention(q, pages.keys, pages.values, table_, tiles_, out);
  }
  // Stores its rows' keys and values itself, if need be again.
  if (decode_count_ > 0) cuda::decode_attention(qkv, rope, pages.keys, pages.values, decode_, out);
  return out;
}

}  // namespace parvl
