// The scheduler under loads of requests that share prefixes and images, with cancels, failures and late encoders.
// rapidcheck chooses the load and shrinks one that fails; RC_PARAMS="reproduce=..." (as a failure prints it) runs that
// case again.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <deque>
#include <map>
#include <ostream>
#include <set>

#include "parvl/sched/record.h"
#include "tests/unit/sched_fixture.h"

namespace parvl {

struct ItemShape {
  int key = 0, gap = 0, length = 1;
};
std::ostream& operator<<(std::ostream& out, const ItemShape& i) {
  return out << "{key " << i.key << ", gap " << i.gap << ", length " << i.length << "}";
}

struct RequestShape {
  int prompt = 1, output = 1, priority = 0, other_token = 0, salt = 0, given = 0;
  std::vector<ItemShape> items;
};
std::ostream& operator<<(std::ostream& out, const RequestShape& r) {
  out << "{prompt " << r.prompt << ", output " << r.output << ", priority " << r.priority << ", other token "
      << r.other_token << ", salt " << r.salt << ", given " << r.given;
  for (const ItemShape& item : r.items) out << ", " << item;
  return out << "}";
}

// What happens around one step.
struct StepShape {
  int adds = 0, encodes = 0, fetches = 0;    // requests that come; encodings and fetches that end
  int cancel_before = 0, cancel_during = 0;  // 0: nobody
  bool fails = false, encode_fails = false, fetch_fails = false;
};
std::ostream& operator<<(std::ostream& out, const StepShape& s) {
  return out << "{adds " << s.adds << ", encodes " << s.encodes << ", fetches " << s.fetches << ", cancels "
             << s.cancel_before << " and " << s.cancel_during << (s.fails ? ", fails" : "")
             << (s.encode_fails ? ", encodings fail" : "") << (s.fetch_fails ? ", fetches fail" : "") << "}";
}

namespace {

using rc::gen::inRange;

rc::Gen<RequestShape> request_shape() {
  const auto item = rc::gen::build<ItemShape>(rc::gen::set(&ItemShape::key, inRange(0, 5)),
                                              rc::gen::set(&ItemShape::gap, inRange(0, 6)),
                                              rc::gen::set(&ItemShape::length, inRange(1, 9)));
  return rc::gen::build<RequestShape>(
      rc::gen::set(&RequestShape::prompt, inRange(1, 84)), rc::gen::set(&RequestShape::output, inRange(1, 84)),
      rc::gen::set(&RequestShape::priority, inRange(0, 3)), rc::gen::set(&RequestShape::other_token, inRange(0, 8)),
      rc::gen::set(&RequestShape::salt, inRange(0, 2)),
      rc::gen::set(&RequestShape::given, rc::gen::weightedOneOf<int>({{1, rc::gen::just(0)}, {1, inRange(0, 84)}})),
      rc::gen::set(&RequestShape::items, rc::gen::resize(4, rc::gen::container<std::vector<ItemShape>>(item))));
}

rc::Gen<StepShape> step_shape() {
  const auto seldom = [](int range) {
    return rc::gen::weightedOneOf<int>({{9, rc::gen::just(0)}, {1, inRange(1, range)}});
  };
  const auto rarely = rc::gen::map(inRange(0, 30), [](int n) { return n == 29; });
  const auto often = rc::gen::map(inRange(0, 4), [](int n) { return n == 3; });
  return rc::gen::build<StepShape>(
      rc::gen::set(&StepShape::adds, inRange(0, 3)), rc::gen::set(&StepShape::encodes, inRange(0, 4)),
      rc::gen::set(&StepShape::fetches, inRange(0, 3)), rc::gen::set(&StepShape::fetch_fails, often),
      rc::gen::set(&StepShape::cancel_before, seldom(100)), rc::gen::set(&StepShape::cancel_during, seldom(100)),
      rc::gen::set(&StepShape::fails, rarely), rc::gen::set(&StepShape::encode_fails, rarely));
}

SchedulerConfig some_config() {
  SchedulerConfig config;
  config.block_size = *inRange(1, 7);
  config.max_model_len = *inRange(24, 84);
  config.num_blocks = (config.max_model_len + config.block_size - 1) / config.block_size + *inRange(0, 40);
  config.max_seqs = *inRange(1, 7);
  config.max_batched_tokens = config.max_seqs + *inRange(0, 40);
  config.encode_budget = {*inRange(1, 101), 1, 1};
  config.encoder_cache_bytes = *inRange(100, 400);
  config.prefix_caching = *rc::gen::arbitrary<bool>();
  config.starvation_s = *inRange(1, 31);
  config.step_s = *rc::gen::element(0.0, 0.02);
  return config;
}

// The caller of the scheduler and its executor, and what by its answers every request must hold.
class Load {
 public:
  Load(const SchedulerConfig& config, std::vector<RequestShape> requests, std::vector<StepShape> steps)
      : config_(config),
        requests_(std::move(requests)),
        steps_(std::move(steps)),
        scheduler_(config, [this](std::string_view line) { record_ += line; }) {}

  void run() {
    int idle_steps = 0;
    for (size_t at = 0; added_ < requests_.size() || !scheduler_.scheduler().idle(); ++at) {
      RC_ASSERT(idle_steps < 50);  // or it stands still
      idle_steps = step(at < steps_.size() ? steps_[at] : StepShape{1, 1000, 1000}) ? 0 : idle_steps + 1;
      if (at < steps_.size()) idle_steps = 0;
    }
    while (!encoding_.empty()) encode_one(true);
    RC_ASSERT(fetching_.empty());  // each was in the scheduler until its end
    for (const auto& [id, wish] : wishes_) RC_ASSERT(wish.ended);
    RC_ASSERT(scheduler_.scheduler().stats().blocks_used == 0);
    scheduler_.scheduler().check_invariants();
    const auto report = replay(record_);
    RC_ASSERT(report.ok());
    RC_ASSERT(report->differing_line == 0);
  }

 private:
  struct Wish {
    int64_t prompt = 0, output = 0, got = 0, given = 0, fetched = 0;
    bool ended = false;
    bool in_step = false, fetching = false;
    std::vector<MediaItem> media;
  };
  struct Slot {
    int64_t bytes = 0;
    bool ready = false;
  };

  // Whether it had work.
  bool step(const StepShape& shape) {
    now_ += 0.5;
    for (int i = 0; i < shape.adds && added_ < requests_.size(); ++i) add(requests_[added_]);
    cancel(shape.cancel_before);
    const SchedulerOutput output = scheduler_.schedule(now_);
    take(output);
    check_work(output);
    cancel(shape.cancel_during);
    if (!output.sequences.empty()) {
      shape.fails ? fail(output) : commit(output);
    }
    const bool worked = !output.sequences.empty() || !encoding_.empty() || !fetching_.empty();
    for (int i = 0; i < shape.fetches && !fetching_.empty(); ++i) fetch_one(!shape.fetch_fails);
    for (int i = 0; i < shape.encodes && !encoding_.empty(); ++i) encode_one(!shape.encode_fails);
    check_memory();
    return worked;
  }

  void add(const RequestShape& shape) {
    const auto id = static_cast<int64_t>(added_++);
    Wish& wish = wishes_[id];
    wish.prompt = 1 + shape.prompt % (config_.max_model_len - 1);
    wish.output = 1 + shape.output % (config_.max_model_len - wish.prompt);
    int64_t at = 0;
    for (const ItemShape& item : shape.items) {
      at += item.gap;
      if (at + item.length > wish.prompt) break;
      const auto key = static_cast<uint8_t>(item.key);
      wish.media.push_back(image(key, at, item.length, 20 + 15 * key));  // an image's key decides its bytes
      at += item.length;
    }
    SchedRequest request = make_request(id, wish.prompt, wish.media, shape.priority);
    if (shape.other_token > 0) request.prompt[static_cast<size_t>(shape.other_token % wish.prompt)] = 1000;
    request.given = wish.given = shape.given % wish.prompt;
    request.cache_salt = std::string(static_cast<size_t>(shape.salt), 's');
    RC_ASSERT(scheduler_.add(std::move(request), now_).ok());
  }

  // Takes over what the output says of who holds what.
  void take(const SchedulerOutput& output) {
    for (const RequestId id : output.preempted) {
      RC_ASSERT(!wishes_.at(id.value).ended && !wishes_.at(id.value).fetching);
      wishes_.at(id.value).given = wishes_.at(id.value).fetched = 0;
      tables_.erase(id.value);
    }
    for (const SlotId slot : output.evicted) {
      RC_ASSERT(slots_.count(slot.value) == 1);
      RC_ASSERT(slots_.at(slot.value).ready);
      slots_.erase(slot.value);
    }
    for (const EncodeWork& work : output.encodes) {
      const MediaItem& item = wishes_.at(work.id.value).media.at(static_cast<size_t>(work.item));
      RC_ASSERT(slots_.emplace(work.slot.value, Slot{item.bytes, false}).second);
      encoding_.push_back(work.slot);
    }
    for (const SequenceWork& work : output.sequences) tables_[work.id.value] = work.blocks;
    for (const KvFetch& fetch : output.kv_fetches) {
      tables_[fetch.id.value] = fetch.blocks;
      fetching_.push_back(fetch);
    }
  }

  void check_work(const SchedulerOutput& output) {
    std::map<int32_t, int> holders;
    for (const auto& [id, table] : tables_) {
      for (const BlockId block : table) ++holders[block.value];
    }
    const auto owns = [&](const std::vector<BlockId>& blocks, int64_t begin, int64_t count) {
      RC_ASSERT(count > 0);
      RC_ASSERT(static_cast<int64_t>(blocks.size()) * config_.block_size >= begin + count);
      for (int64_t at = begin; at < begin + count; ++at) {  // what is written, nobody else holds
        RC_ASSERT(holders.at(blocks[static_cast<size_t>(at / config_.block_size)].value) == 1);
      }
    };
    for (const KvFetch& fetch : output.kv_fetches) {
      Wish& wish = wishes_.at(fetch.id.value);
      RC_ASSERT(!wish.ended && !wish.in_step && !wish.fetching);
      RC_ASSERT(fetch.begin + fetch.count == wish.given);  // all that was not there, and once
      RC_ASSERT(fetch.begin % config_.block_size == 0);
      wish.fetching = true;
      wish.given = 0;
      owns(fetch.blocks, fetch.begin, fetch.count);
    }
    int64_t tokens = 0;
    for (const SequenceWork& work : output.sequences) {
      tokens += work.count;
      Wish& wish = wishes_.at(work.id.value);
      RC_ASSERT(!wish.ended && !wish.in_step && !wish.fetching);
      RC_ASSERT(work.begin >= wish.given);  // nothing is computed that is given
      RC_ASSERT(work.begin >= wish.fetched);
      wish.in_step = true;
      owns(work.blocks, work.begin, work.count);
      RC_ASSERT(work.samples == (work.begin + work.count == wish.prompt + wish.got));
      for (const MediaUse& use : work.media) {
        RC_ASSERT(slots_.count(use.slot.value) == 1);
        RC_ASSERT(slots_.at(use.slot.value).ready);
      }
    }
    RC_ASSERT(tokens <= config_.max_batched_tokens);
    RC_ASSERT(static_cast<int64_t>(output.sequences.size()) <= config_.max_seqs);
  }

  // Between two steps: blocks and bytes are those of the model.
  void check_memory() {
    const SchedulerStats stats = scheduler_.scheduler().stats();
    std::set<int32_t> held;
    for (const auto& [id, table] : tables_) {
      for (const BlockId block : table) held.insert(block.value);
    }
    // One that has found a prefix but waits for its image holds blocks that no output has told yet.
    const auto told = static_cast<int64_t>(held.size());
    RC_ASSERT(stats.blocks_used >= told);
    if (static_cast<int64_t>(tables_.size()) == stats.running) RC_ASSERT(stats.blocks_used == told);
    int64_t bytes = 0;
    for (const auto& [id, slot] : slots_) bytes += slot.bytes;
    RC_ASSERT(stats.encoder_bytes_used == bytes);
    RC_ASSERT(bytes <= config_.encoder_cache_bytes);
    RC_ASSERT(stats.prefix_hits <= stats.prefix_queries);
    for (const auto& [id, wish] : wishes_)
      RC_ASSERT(scheduler_.scheduler().knows(RequestId{id}) == (!wish.ended || wish.in_step || wish.fetching));
    scheduler_.scheduler().check_invariants();
  }

  void commit(const SchedulerOutput& output) {
    StepTokens tokens{output.step, {}, 0.01 * static_cast<double>(output.step.value % 7)};
    for (const SequenceWork& work : output.sequences) {
      if (work.samples) tokens.tokens.push_back(static_cast<TokenId>(work.id.value % 3));
    }
    scheduler_.commit(tokens);
    for (const SequenceWork& work : output.sequences) {
      Wish& wish = wishes_.at(work.id.value);
      wish.in_step = false;
      if (wish.ended) {
        tables_.erase(work.id.value);
      } else if (work.samples && ++wish.got == wish.output) {
        scheduler_.finish(work.id);
        end(work.id.value);
      }
    }
  }

  void fail(const SchedulerOutput& output) {
    std::set<int64_t> lost;
    for (const RequestId id : scheduler_.commit_failed(output.step)) lost.insert(id.value);
    RC_ASSERT(lost.size() == output.sequences.size());
    for (const SequenceWork& work : output.sequences) {
      RC_ASSERT(lost.count(work.id.value) == 1);
      Wish& wish = wishes_.at(work.id.value);
      wish.in_step = false;
      wish.ended ? static_cast<void>(tables_.erase(work.id.value)) : end(work.id.value);
    }
  }

  void fetch_one(bool ok) {
    const KvFetch fetch = fetching_.front();
    fetching_.pop_front();
    RC_ASSERT(scheduler_.scheduler().fetches(fetch.id));
    scheduler_.commit_kv(fetch.id, ok);
    Wish& wish = wishes_.at(fetch.id.value);
    wish.fetching = false;
    if (ok) wish.fetched = fetch.begin + fetch.count;
    if (wish.ended) tables_.erase(fetch.id.value);
  }

  void encode_one(bool ok) {
    const SlotId slot = encoding_.front();
    encoding_.pop_front();
    for (const RequestId id : scheduler_.commit_encode(slot, ok)) {
      RC_ASSERT(!ok);
      end(id.value);
    }
    if (ok) {
      slots_.at(slot.value).ready = true;
    } else {
      slots_.erase(slot.value);
    }
  }

  void cancel(int which) {
    if (which == 0 || added_ == 0) return;
    const int64_t id = which % static_cast<int64_t>(added_);
    scheduler_.finish(RequestId{id});
    if (!wishes_.at(id).ended) end(id);
  }

  // Each ends once; its blocks are free at once, or when its step or its fetch is done.
  void end(int64_t id) {
    Wish& wish = wishes_.at(id);
    RC_ASSERT(!wish.ended);
    wish.ended = true;
    if (!wish.in_step && !wish.fetching) tables_.erase(id);
  }

  SchedulerConfig config_;
  std::vector<RequestShape> requests_;
  std::vector<StepShape> steps_;
  std::string record_;
  RecordedScheduler scheduler_;
  size_t added_ = 0;
  std::map<int64_t, Wish> wishes_;
  std::map<int64_t, std::vector<BlockId>> tables_;  // of those that run, as last told
  std::map<int64_t, Slot> slots_;
  std::deque<SlotId> encoding_;
  std::deque<KvFetch> fetching_;
  double now_ = 0;
};

// Every request ends once, every token that is sampled follows the whole prompt, what a step writes belongs to one
// sequence alone, nothing that is given is computed unless it did not come, nothing is held in the end, and the record
// of it all gives the same decisions again.
RC_GTEST_PROP(SchedulerProperty, NothingLeaksAndEachRequestEndsOnce, ()) {
  const SchedulerConfig config = some_config();
  const auto requests = *rc::gen::container<std::vector<RequestShape>>(request_shape());
  const auto steps = *rc::gen::container<std::vector<StepShape>>(step_shape());
  Load(config, requests, steps).run();
}

}  // namespace
}  // namespace parvl
