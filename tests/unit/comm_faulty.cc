#include "comm_faulty.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace parvl {
namespace {

// Only float64.
class FaultyGroup : public ProcessGroup {
 public:
  FaultyGroup(std::unique_ptr<ProcessGroup> inner, const Fault& fault, std::atomic<int>& applied)
      : inner_(std::move(inner)), fault_(fault), applied_(applied) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    if (!hit("all_reduce", values, op)) return inner_->all_reduce(values, op);
    const std::vector<double> own = copy(values);
    return spoil(inner_->all_reduce(values, op), [this, values, own] { put(values, own); });
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    if (!hit("all_gather", out, ReduceOp::kSum)) return inner_->all_gather(in, out);
    return spoil(inner_->all_gather(in, out), [this, out] {
      std::vector<double> own(static_cast<size_t>(out.count)), all = copy(out);
      const auto part = static_cast<size_t>(out.count / size()), first = part * static_cast<size_t>(rank());
      if (fault_.effect == Fault::kRotate) {
        for (size_t i = 0; i < own.size(); ++i) own[i] = all[(i + part) % own.size()];
      } else {
        std::copy_n(all.begin() + static_cast<int64_t>(first), part, own.begin() + static_cast<int64_t>(first));
      }
      put(out, own);
    });
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    if (!hit("reduce_scatter", out, ReduceOp::kSum)) return inner_->reduce_scatter(in, out);
    const double* first = static_cast<const double*>(in.data) + out.count * rank();
    const std::vector<double> own(first, first + out.count);
    return spoil(inner_->reduce_scatter(in, out), [this, out, own] { put(out, own); });
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override { return inner_->broadcast(values, root); }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    return inner_->all_to_all(in, in_counts, out, out_counts);
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override { return inner_->send(values, to); }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    if (!hit("receive", values, ReduceOp::kSum)) return inner_->receive(values, from);
    return spoil(inner_->receive(values, from), [this, values] {
      std::vector<double> halves = copy(values);  // for kRotate: the second before the first
      std::rotate(halves.begin(), halves.begin() + values.count / 2, halves.end());
      put(values, halves);
    });
  }
  std::unique_ptr<Work> barrier() override { return inner_->barrier(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  class SpoiledWork : public Work {
   public:
    SpoiledWork(std::unique_ptr<Work> inner, std::function<void()> spoil)
        : inner_(std::move(inner)), spoil_(std::move(spoil)) {}
    absl::Status wait() override {
      PARVL_RETURN_IF_ERROR(inner_->wait());
      spoil_();
      return absl::OkStatus();
    }

   private:
    std::unique_ptr<Work> inner_;
    std::function<void()> spoil_;
  };

  bool hit(const std::string& call, const Buffer& buffer, ReduceOp op) const {
    return call == fault_.call && buffer.dtype == DType::kFloat64 && (!fault_.which || fault_.which(buffer.count, op));
  }
  std::unique_ptr<Work> spoil(std::unique_ptr<Work> work, std::function<void()> how) {
    ++applied_;
    return std::make_unique<SpoiledWork>(std::move(work), std::move(how));
  }
  static std::vector<double> copy(const Buffer& buffer) {
    const auto* data = static_cast<const double*>(buffer.data);
    return {data, data + buffer.count};
  }
  // The spoiled result; `own` is it for kOwn and kRotate.
  void put(const Buffer& buffer, const std::vector<double>& own) {
    auto* data = static_cast<double*>(buffer.data);
    const std::vector<double> right = copy(buffer);
    for (size_t i = 0; i < right.size(); ++i) {
      switch (fault_.effect) {
        case Fault::kOwn:
        case Fault::kRotate:
          data[i] = own[i];
          break;
        case Fault::kTwice:
          data[i] = 2 * right[i];
          break;
        case Fault::kMean:
          data[i] = right[i] / static_cast<double>(size());
          break;
        case Fault::kZero:
          data[i] = 0;
          break;
        case Fault::kStale:
          data[i] = last_.empty() ? right[i] : last_[i % last_.size()];
          break;
      }
    }
    if (!right.empty()) last_ = right;
  }

  std::unique_ptr<ProcessGroup> inner_;
  const Fault& fault_;
  std::atomic<int>& applied_;
  std::vector<double> last_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> FaultyCommunicator::join(const GroupSpec& group) {
  PARVL_ASSIGN_OR_RETURN(std::unique_ptr<ProcessGroup> out, inner_.join(group));
  std::string kind = group.name;  // "llm_backbone.pp[0].1>2" without the number
  const size_t begin = kind.find('['), end = kind.find(']');
  if (begin != std::string::npos) kind.erase(begin, end - begin + 1);
  if (kind != fault_.group) return out;
  return std::make_unique<FaultyGroup>(std::move(out), fault_, applied_);
}

}  // namespace parvl
