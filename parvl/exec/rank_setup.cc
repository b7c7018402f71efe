#include "parvl/exec/rank_setup.h"

#include "parvl/base/json.h"

namespace parvl {

std::string to_message(const RankSetup& setup) {
  const LoadOptions& load = setup.options.load;
  return Json{{"dir", setup.dir},
              {"device", load.device},
              {"dtype", load.dtype},
              {"max_model_len", load.max_model_len},
              {"memory_utilization", load.memory_utilization.value_or(0)},
              {"memory_limit_bytes", load.memory_limit_bytes},
              {"max_seqs", setup.options.max_seqs},
              {"max_batched_tokens", setup.options.max_batched_tokens},
              {"pipeline_stages", setup.options.pipeline_stages},
              {"enforce_eager", setup.options.enforce_eager},
              {"encodes", setup.encodes},
              {"num_blocks", setup.num_blocks},
              {"shared_weights", load.shared_weights}}
      .dump();
}

absl::StatusOr<RankSetup> read_setup(const std::string& message) {
  PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(message, "the first rank's setup"));
  RankSetup out;
  LoadOptions& load = out.options.load;
  PARVL_ASSIGN_OR_RETURN(out.dir, json_value<std::string>(json, "dir", ""));
  PARVL_ASSIGN_OR_RETURN(load.device, json_value<std::string>(json, "device", ""));
  PARVL_ASSIGN_OR_RETURN(load.dtype, json_value<std::string>(json, "dtype", ""));
  PARVL_ASSIGN_OR_RETURN(const double share, json_value<double>(json, "memory_utilization", 0));
  PARVL_ASSIGN_OR_RETURN(out.options.enforce_eager, json_value<bool>(json, "enforce_eager", false));
  PARVL_ASSIGN_OR_RETURN(out.encodes, json_value<bool>(json, "encodes", false));
  if (share > 0) load.memory_utilization = share;
  for (const auto& [name, value] :
       {std::pair("max_model_len", &load.max_model_len), std::pair("memory_limit_bytes", &load.memory_limit_bytes),
        std::pair("max_seqs", &out.options.max_seqs), std::pair("max_batched_tokens", &out.options.max_batched_tokens),
        std::pair("pipeline_stages", &out.options.pipeline_stages), std::pair("num_blocks", &out.num_blocks)}) {
    PARVL_ASSIGN_OR_RETURN(*value, json_value<int64_t>(json, name, 0));
  }
  for (const Json& block : json.value("shared_weights", Json::array())) {
    load.shared_weights.push_back(block.is_string() ? block.get<std::string>() : "");
  }
  return out;
}

}  // namespace parvl
