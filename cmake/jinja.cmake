# parvl_jinja: the Jinja engine of llama.cpp (MIT), from .deps/jinja. Only parvl/media/jinja.cc and jinja_string.cc, which
# stands in for one file of it, include its headers.
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
set(JINJA_INCLUDES ${JINJA_SHIM} ${JINJA_ROOT})

add_library(parvl_jinja STATIC ${JINJA_ROOT}/jinja/caps.cpp ${JINJA_ROOT}/jinja/lexer.cpp ${JINJA_ROOT}/jinja/parser.cpp
  ${JINJA_ROOT}/jinja/runtime.cpp ${JINJA_ROOT}/jinja/value.cpp ${JINJA_ROOT}/json.cpp ${JINJA_ROOT}/unicode.cpp)
target_include_directories(parvl_jinja PRIVATE ${JINJA_INCLUDES})
target_link_libraries(parvl_jinja PRIVATE nlohmann_json::nlohmann_json)
target_compile_options(parvl_jinja PRIVATE -w)
