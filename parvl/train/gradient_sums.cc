#include "parvl/train/gradient_sums.h"

#include <ATen/ATen.h>
#include <absl/strings/match.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "parvl/comm/comm_site.h"
#include "parvl/nn/tensor_buffer.h"
#include "parvl/plan/cost/traffic.h"
#include "parvl/train/optimizer.h"

namespace parvl {
namespace {

c10::impl::VirtualGuardImpl gpu() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

// What `after` queues from here on comes after what `before` holds.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(at::kCUDA);
  event.record(before);
  event.block(after);
}

}  // namespace

GradientSums::GradientSums(const std::vector<OptimGroupState>& groups, at::Device device)
    : groups_(groups), device_(device) {
  // On the CPU the threads that would make the sums are those of the backward. Beside calls in a tensor group they
  // would have to keep one order with these on all ranks' GPUs.
  early_ =
      device.is_cuda() && std::all_of(groups.begin(), groups.end(), [](const auto& g) { return g.tensor.alone(); });
  if (early_) stream_ = gpu().getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  start_over();
}

void GradientSums::start_over() {
  parts_.clear();
  works_.clear();
  next_ = 0;
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    if (group->data == nullptr) continue;
    const int64_t total = group->grad.size(0), at_once = gradient_values_at_once();
    for (int64_t begin = (total - 1) / at_once * at_once; begin >= 0; begin -= at_once) {
      Part part{&*group, begin, std::min(at_once, total - begin), {}};
      for (size_t i = 0; early_ && i < group->params.size(); ++i) {
        const int64_t first = group->offsets[i], last = first + group->params[i]->part_numel();
        if (first < begin + part.count && last > begin) part.adding.push_back(group->params[i]->name);
      }
      parts_.push_back(std::move(part));
    }
  }
}

void GradientSums::is_final(const std::string& prefix) {
  if (!early_) return;
  for (Part& part : parts_) {
    const auto is_ready = [&](const std::string& name) { return absl::StartsWith(name, prefix); };
    part.adding.erase(std::remove_if(part.adding.begin(), part.adding.end(), is_ready), part.adding.end());
  }
  while (next_ < parts_.size() && parts_[next_].adding.empty()) begin_next();
}

void GradientSums::begin_next() {
  const CommSite site("optimizer.reduce_grads");
  const Part& part = parts_[next_++];
  const at::Tensor values = part.group->grad.narrow(0, part.begin, part.count);
  const auto begin = [&] { works_.push_back(part.group->data->all_reduce(buffer_of(values), ReduceOp::kSum)); };
  if (!early_) return begin();
  order(gpu().getStream(device_), *stream_);
  const c10::Stream before = gpu().exchangeStream(*stream_);
  begin();
  gpu().exchangeStream(before);
}

void GradientSums::finish() {
  while (next_ < parts_.size()) begin_next();
  for (const auto& work : works_) wait(work);
  if (early_ && !works_.empty()) order(*stream_, gpu().getStream(device_));
  start_over();
}

}  // namespace parvl
