# parvl_jinja: the Jinja engine of llama.cpp (MIT), from .deps/jinja. Only parvl/media/jinja.cc, jinja_values.cc and
# jinja_string.cc, which stands in for one file of it, include its headers.
include(${CMAKE_SOURCE_DIR}/cmake/change_source.cmake)
set(JINJA_ROOT ${PARVL_DEPS}/jinja/vendor/llama.cpp/common)
if(NOT EXISTS ${JINJA_ROOT}/json.cpp)
  message(FATAL_ERROR "the Jinja engine is not in ${JINJA_ROOT}; run tools/setup.sh, or 'make build', which does")
endif()

# Stand-ins for two headers. The engine checks a template's syntax tree by assert(); there a bad template must be an error, not
# the end of the process. And of ggml.h it needs one macro.
set(JINJA_SHIM ${CMAKE_BINARY_DIR}/jinja_shim)
file(WRITE ${JINJA_SHIM}/cassert "#include <stdexcept>
#undef assert
#define assert(condition) \\
  ((condition) ? (void)0 : throw std::runtime_error(\"the template's structure makes no sense\"))
")
file(WRITE ${JINJA_SHIM}/ggml.h "#include <cstdlib>
#define GGML_ASSERT(condition) ((condition) ? (void)0 : std::abort())
")

# The engine bounds neither the time nor the memory of a template. What is built is a copy of it in which the places where
# either grows report to parvl/media/jinja_limits.h.
set(JINJA_LIMITED ${CMAKE_BINARY_DIR}/jinja_limited)
file(GLOB JINJA_FILES ${JINJA_ROOT}/jinja/*.h ${JINJA_ROOT}/jinja/*.cpp)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${JINJA_FILES})
foreach(file ${JINJA_FILES})
  get_filename_component(name ${file} NAME)
  file(READ ${file} jinja_${name})
endforeach()
# A step: a statement that runs, a value that is looked at or put into a list; a value that is made, with its memory, is ten.
change_source(jinja runtime.cpp "        return execute_impl(ctx);"
  "        parvl::TemplateNesting nesting; parvl::spend_template_steps(1); return execute_impl(ctx);")
change_source(jinja value.h "#include \"utils.h\"" "#include \"utils.h\"\n#include \"parvl/media/jinja_limits.h\"")
change_source(jinja value.h "    value_t() = default;" "    value_t() { parvl::spend_template_steps(10); }")
change_source(jinja value.h "return dynamic_cast<const PointeeType*>(ptr.get()) != nullptr;"
  "parvl::spend_template_steps(1); return dynamic_cast<const PointeeType*>(ptr.get()) != nullptr;")
change_source(jinja value.h "        val_arr.push_back(val);\n    }\n    void push_back" "        parvl::spend_template_steps(1); val_arr.push_back(val);\n    }\n    void push_back")
change_source(jinja value.h "return val->is_immutable() && val->is_hashable();"
  "parvl::spend_template_steps(1); return val->is_immutable() && val->is_hashable();")
# Built-in functions whose result, or whose work, is not in proportion to what they are given.
change_source(jinja value.h "struct func_args {" "void check_call(const std::string & name, const std::vector<value> & args);\nstruct func_args {")
change_source(jinja value.h "return val_func(new_args);" "check_call(name, new_args.get_args()); return val_func(new_args);")
change_source(jinja value.cpp "? std::string(indent, ' ')" "? (parvl::spend_template_bytes(indent), std::string(indent, ' '))")
change_source(jinja value.cpp "? std::string(curr_lvl * indent, ' ')"
  "? (parvl::spend_template_bytes(int64_t{curr_lvl} * indent), std::string(curr_lvl * indent, ' '))")
# Values in values, and expressions in expressions: read, printed, marked and destroyed, without a call for
# each level of them, or not beyond a limit.
change_source(jinja value.cpp "std::string value_to_string_repr(const value & val) {"
  "std::string value_to_string_repr(const value & val) { parvl::TemplateNesting nesting;")
change_source(jinja value.cpp "    auto newline = [indent]()" "    parvl::TemplateNesting nesting;\n    auto newline = [indent]()")
change_source(jinja value.cpp "    val->stats.used = true;" "    parvl::TemplateNesting nesting; parvl::spend_template_steps(1); val->stats.used = true;")
change_source(jinja runtime.h "value_string & parts) {\n    // TODO" "value_string & parts) {\n    parvl::TemplateNesting nesting;\n    // TODO")
change_source(jinja value.h "virtual ~value_t() = default;" "virtual ~value_t();")
change_source(jinja value.h "const func_builtins & global_builtins();"
  "const func_builtins & global_builtins();\nvoid note_change(const value & container, const value & item);")
change_source(jinja value.cpp "arr_editable->push_back(args.get_pos(1));"
  "arr_editable->push_back(args.get_pos(1)); note_change(args.get_pos(0), args.get_pos(1));")
change_source(jinja runtime.cpp "obj_ptr->insert(prop_name, rhs);" "obj_ptr->insert(prop_name, rhs); note_change(object, rhs);")
foreach(function "parse_any()" "parse_if_expression()" "parse_logical_negation_expression()" "parse_unary_expression()"
    "parse_call_expression(statement_ptr callee)" "parse_if_statement(size_t start_pos)")
  change_source(jinja parser.cpp "    statement_ptr ${function} {" "    statement_ptr ${function} { parvl::TemplateNesting nesting;")
endforeach()
# What the engine tries out when it compiles a template, where a failure is an answer.
change_source(jinja caps.cpp "jinja::runtime runtime(ctx);" "const parvl::TemplateBudget budget(parvl::kTrialLimits); jinja::runtime runtime(ctx);")
# Copies of whole tables of functions, which cost more than everything else that a name does.
change_source(jinja runtime.cpp "auto builtins = global_builtins();" "const auto & builtins = global_builtins();")
change_source(jinja runtime.cpp "auto builtins = input->get_builtins();" "const auto & builtins = input->get_builtins();")
foreach(file ${JINJA_FILES})
  get_filename_component(name ${file} NAME)
  file(CONFIGURE OUTPUT ${JINJA_LIMITED}/jinja/${name} CONTENT "${jinja_${name}}" @ONLY)
endforeach()
set(JINJA_INCLUDES ${JINJA_SHIM} ${JINJA_LIMITED} ${JINJA_ROOT})

add_library(parvl_jinja STATIC ${JINJA_LIMITED}/jinja/caps.cpp ${JINJA_LIMITED}/jinja/lexer.cpp ${JINJA_LIMITED}/jinja/parser.cpp
  ${JINJA_LIMITED}/jinja/runtime.cpp ${JINJA_LIMITED}/jinja/value.cpp ${JINJA_ROOT}/json.cpp ${JINJA_ROOT}/unicode.cpp)
target_include_directories(parvl_jinja PRIVATE ${JINJA_INCLUDES})
target_link_libraries(parvl_jinja PRIVATE nlohmann_json::nlohmann_json)
target_compile_options(parvl_jinja PRIVATE -w)
