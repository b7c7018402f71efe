// The life of one request across instances: its images are encoded where there is room, its choices are generated on
// one instance at a time, and when an instance is lost the rest goes on elsewhere from the tokens that the client has
// already. Where prompts have instances of their own, a choice is begun on one, with its first token, and goes on on
// another from the keys and values that lie there. A pure state machine: events in, actions out; the gateway carries
// them out.
//
// Its promises, whatever comes in whatever order: exactly one end; each token of each choice is delivered once and in
// order; what was left on an instance, encoder output or keys and values, is let go once; nothing is asked of an
// instance that was lost.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/elastic/instance_id.h"

namespace parvl {

struct RequestShape {
  size_t items = 0;         // that instances with an encoder encode before the generation; 0: the generating one does
  size_t choices = 1;       // at least one
  int max_encodings = 8;    // of one item, those after a loss of the generating instance included
  int max_generations = 5;  // tries, the first one included
  // Not counted in either: what is done again because an answer that had begun had to give its memory to others, and
  // could not fetch its images a second time. Each such time has brought a token.
};

struct RequestEvent {
  enum class Kind {
    kEncodingPlaced,    // the router chose `instance` for `item`
    kEncoded,           // the item's encoder output lies on `instance`
    kEncodingFailed,    // `status`; Unavailable: somebody else might do it
    kOutputLost,        // the generation `attempt` could not have the output of `item`; before the failure of that
    kGenerationPlaced,  // the router chose `instance` for this `attempt`, which `hands_over` what it begins
    kToken,             // the `index`-th of `choice`, from 0
    kFinished,          // `choice`, after its last token
    kPrefilled,         // such an attempt has done its part: its keys and values lie where it ran
    kKvLost,            // the generation `attempt` could not have those; before the failure of that
    kGenerationFailed,  // `status`; Unavailable: somebody else might do it
    kInstanceLost,      // `instance` is fenced
    kNowhere,           // the router has no instance for what was last asked of it, and none is coming: `status`
    kLeft,              // the client has
    kTimeUp,            // `status`
  };
  Kind kind = Kind::kLeft;
  InstanceId instance = {};
  size_t item = 0, choice = 0;
  int attempt = 0;  // of what belongs to a generation or an encoding
  int64_t index = 0;
  bool hands_over = false;
  absl::Status status = absl::OkStatus();
};

struct RequestAction {
  enum class Kind {
    kPlaceEncoding,    // ask the router where to encode `item`, for the `attempt`-th time
    kEncode,           // on `instance`
    kPlaceGeneration,  // ask the router where to generate
    kGenerate,         // on `instance`: each choice that is not finished, from as many tokens as `delivered` says
    kPlaceDecoding,    // ask the router where to go on
    kDecode,           // on `instance`, likewise, from the keys and values that lie elsewhere
    kDeliver,          // the token of this event, to the client
    kLetGo,            // the output of `item` on `instance` is not needed any more
    kLetGoKv,          // the keys and values on `instance`, of `attempt`, are not needed any more
    kCancelEncoding,   // of `item` on `instance`
    kCancelGeneration,
    kEnd,  // the one and only; `status`. Cancelled: the client has left
  };
  Kind kind = Kind::kEnd;
  InstanceId instance = {};
  size_t item = 0, choice = 0;
  int attempt = 0;
  bool lost = false;  // kLetGo: it is broken, or cannot be had: of no use to others either
  absl::Status status = absl::OkStatus();
};

// Not thread-safe.
class RequestLifecycle {
 public:
  explicit RequestLifecycle(const RequestShape& shape);

  std::vector<RequestAction> start();  // once, before any event
  // What follows, in the order to be done. What is late, double or of an attempt that is over has no effect.
  std::vector<RequestAction> handle(const RequestEvent& event);

  bool ended() const { return ended_; }
  int64_t delivered(size_t choice) const { return choices_[choice].delivered; }
  bool finished(size_t choice) const { return choices_[choice].finished; }
  // Where the encoder output of an item lies; none while it does nowhere.
  std::optional<InstanceId> holder(size_t item) const;
  bool has_kv() const { return kv_.has_value(); }  // the keys and values up to what is delivered lie on an instance

 private:
  enum class Where { kNowhere, kAsked, kRunning, kThere };  // the router is asked, an instance works, it is done
  struct Item {
    Where where = Where::kNowhere;
    int attempt = 0;
    int uncounted = 0;  // attempts, of these
    InstanceId instance = {};
  };
  struct Kv {
    InstanceId instance = {};
    int attempt = 0;
  };
  struct Choice {
    int64_t delivered = 0;
    bool finished = false;
  };
  using Actions = std::vector<RequestAction>;

  Actions encode(size_t item, const absl::Status& why);
  Actions take_output_lost(const RequestEvent& event);
  Actions take_kv_lost(const RequestEvent& event);
  Actions take_place(const RequestEvent& event);
  void count_no_try();
  Actions encode_missing();
  Actions generate(const absl::Status& why);
  Actions go_on();
  Actions take_token(const RequestEvent& event);
  Actions take_finish(const RequestEvent& event);
  Actions lose(InstanceId instance);
  Actions end(absl::Status status);
  void let_go_all(Actions& out);
  bool is_current(const Item& item, const RequestEvent& event, Where where) const;
  bool generates(const RequestEvent& event) const;

  const RequestShape shape_;
  std::vector<Item> items_;
  std::vector<Choice> choices_;
  Item generation_;          // `item` has no meaning in its actions
  bool hands_over_ = false;  // this attempt does
  std::optional<Kv> kv_;     // while it is there no image is encoded
  bool has_begun_ = false;   // this attempt has given a token
  bool is_refetch_ = false;  // this attempt fails because images were not there the second time
  bool ended_ = false;
};

}  // namespace parvl
