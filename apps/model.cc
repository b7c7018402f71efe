// parvl model inspect: what a model directory holds, from its headers alone.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "apps/commands.h"
#include "parvl/models/checkpoint.h"

namespace parvl {
namespace {

struct InspectFlags {
  std::string dir;
  bool json = false;
};

struct Row {
  const Param* param;
  std::string checkpoint_name, dtype, file;  // a tied one is stored nowhere
  uint64_t bytes = 0;
};

struct Totals {
  std::string name;
  int64_t tensors = 0, parameters = 0;
  uint64_t bytes = 0;
};

absl::StatusOr<std::vector<Row>> read_rows(const Model& model, const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(const std::vector<StoredTensor> stored, match_weights(model, dir));
  std::vector<Row> rows;
  for (size_t i = 0; i < stored.size(); ++i) {
    const Param* param = model.params().all()[i].get();
    Row row{param, stored[i].entry.name, stored[i].entry.dtype, stored[i].file_name, stored[i].entry.bytes};
    if (param->tied_to != nullptr) row.checkpoint_name = model.checkpoint_names(*param)[0];
    rows.push_back(std::move(row));
  }
  return rows;
}

// Of each module in the model's order, and of all. A tied parameter counts where it is stored.
std::vector<Totals> sum_modules(const std::vector<Row>& rows) {
  std::vector<Totals> modules;
  Totals total{"total"};
  for (const Row& row : rows) {
    const std::string name = to_string(row.param->module);
    auto at = std::find_if(modules.begin(), modules.end(), [&](const Totals& m) { return m.name == name; });
    if (at == modules.end()) at = modules.insert(at, Totals{name});
    if (row.param->tied_to != nullptr) continue;
    for (Totals* sum : {&*at, &total}) {
      sum->tensors += 1;
      sum->parameters += row.param->numel();
      sum->bytes += row.bytes;
    }
  }
  modules.push_back(total);
  return modules;
}

const std::vector<int64_t>& stored_shape(const Param& param) {
  return param.checkpoint_shape.empty() ? param.shape : param.checkpoint_shape;
}

Json to_json(const ModelSpec& spec, const std::vector<Row>& rows) {
  Json parameters = Json::array(), modules = Json::object();
  for (const Row& row : rows) {
    Json item = {{"name", row.param->name},
                 {"module", to_string(row.param->module)},
                 {"checkpoint_name", row.checkpoint_name},
                 {"shape", row.param->shape},
                 {"checkpoint_shape", stored_shape(*row.param)},
                 {"bytes", row.bytes}};
    if (row.param->tied_to != nullptr) {
      item["tied_to"] = row.param->tied_to->name;
    } else {
      item["dtype"] = row.dtype;
      item["file"] = row.file;
    }
    parameters.push_back(std::move(item));
  }
  for (const Totals& m : sum_modules(rows)) {
    modules[m.name] = {{"tensors", m.tensors}, {"parameters", m.parameters}, {"bytes", m.bytes}};
  }
  const Json total = modules["total"];
  modules.erase("total");
  return {{"model_type", spec.model_type},
          {"dtype", to_string(spec.dtype)},
          {"modules", modules},
          {"total", total},
          {"parameters", parameters}};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) absl::StrAppend(&text, text.empty() ? "" : " x ", size);
  return text;
}

void print_table(const ModelSpec& spec, const std::vector<Row>& rows) {
  size_t name = 4, stored = 18, shape = 5;
  for (const Row& row : rows) {
    name = std::max(name, row.param->name.size());
    stored = std::max(stored, row.checkpoint_name.size());
    shape = std::max(shape, shape_text(stored_shape(*row.param)).size());
  }
  const auto line = [&](const std::string& a, const std::string& b, const std::string& c, const std::string& d,
                        const std::string& e) {
    std::printf("%-*s  %-*s  %-*s  %-5s  %14s\n", static_cast<int>(name), a.c_str(), static_cast<int>(stored),
                b.c_str(), static_cast<int>(shape), c.c_str(), d.c_str(), e.c_str());
  };
  std::printf("%s, %s\n\n", spec.model_type.c_str(), to_string(spec.dtype));
  line("name", "in the checkpoint", "shape", "dtype", "bytes");
  for (const Row& row : rows) {
    const bool tied = row.param->tied_to != nullptr;
    line(row.param->name, tied ? "= " + row.param->tied_to->name : row.checkpoint_name,
         shape_text(stored_shape(*row.param)), tied ? "" : row.dtype, std::to_string(row.bytes));
  }
  std::printf("\n%-16s  %8s  %16s  %16s\n", "module", "tensors", "parameters", "bytes");
  for (const Totals& m : sum_modules(rows)) {
    std::printf("%-16s  %8ld  %16ld  %16lu\n", m.name.c_str(), m.tensors, m.parameters, m.bytes);
  }
}

absl::Status run_inspect(const InspectFlags& flags) {
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(flags.dir));
  const std::unique_ptr<Model> model = Model::create(spec);
  PARVL_ASSIGN_OR_RETURN(const std::vector<Row> rows, read_rows(*model, flags.dir));
  if (flags.json) {
    std::printf("%s\n", to_json(spec, rows).dump().c_str());
  } else {
    print_table(spec, rows);
  }
  return absl::OkStatus();
}

}  // namespace

void add_model_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command = app.add_subcommand("model", "Looks into model directories: parvl model inspect DIR");
  command->require_subcommand(1);
  CLI::App* inspect =
      command->add_subcommand("inspect", "Lists modules, parameter names, shapes and bytes; reads headers, no weight");
  named(inspect->add_option("DIR", flags->dir, "Model directory"))->required();
  inspect->add_flag("--json", flags->json, "One JSON object: model_type, dtype, modules, total, parameters");
  run_with(*inspect, context, [flags] { return run_inspect(*flags); });
}

}  // namespace parvl
