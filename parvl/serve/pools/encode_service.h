// What an encode instance does: takes images in, encodes them, and keeps what became of them for others to pull.
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>

#include "parvl/base/job_thread.h"
#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/exec/encode_engine.h"
#include "parvl/serve/pools/output_cache.h"
#include "parvl/serve/pools/stream_client.h"

namespace parvl {

class EncodeService {
 public:
  // Sink and stream outlive it.
  EncodeService(std::unique_ptr<EncodeEngine> engine, std::unique_ptr<TransferSource> source, TransferSink& sink,
                StreamClient& stream);
  ~EncodeService();

  EncodeEngine& engine() { return *engine_; }
  // All from one thread; they do not wait. What is asked for is done in order.
  void encode(const wire::Encode& message);
  // It is not needed any more, whether it is done or not.
  void let_go(const wire::ItemOf& message);
  void fence(const wire::Fence& message);

 private:
  using Item = std::tuple<int64_t, int32_t, int32_t>;  // request, item, attempt
  struct Job {
    Item of;
    std::shared_ptr<ProcessedImage> image;
    std::string pixels;
  };

  void run(const Job& job);
  bool given_up(const Item& of);
  absl::StatusOr<TransferRegion> make_room(const ProcessedImage& image, const Item& of);
  absl::Status submit(const Job& job, TransferRegion region);
  void done(const Item& of, const OutputCache::Key& key, TransferRegion region,
            const absl::StatusOr<EncodedImage>& result);
  void say(const Item& of, const std::string& handle, double seconds);
  void say(const Item& of, wire::Encoded encoded);
  void fail(const Item& of, const absl::Status& status);

  TransferSink& sink_;
  StreamClient& stream_;
  std::unique_ptr<TransferSource> source_;
  std::mutex mutex_;
  std::condition_variable one_done_;
  bool stopping_ = false;
  int64_t in_engine_ = 0;
  struct Live {
    std::optional<EncodeId> id;  // none before the engine has it
    bool given_up = false;
  };
  std::map<Item, Live> live_;         // that are not done
  std::map<Item, TransferId> holds_;  // whose output is there
  OutputCache outputs_;
  std::unique_ptr<EncodeEngine> engine_;
  JobThread thread_;  // last: it uses all of the above until it is joined
};

}  // namespace parvl
