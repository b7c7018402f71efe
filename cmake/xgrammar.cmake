# parvl_xgrammar: xgrammar (Apache 2.0), grammars over a tokenizer's vocabulary, from .deps/xgrammar. Only
# parvl/media/grammar.cc includes its headers.
include(${CMAKE_SOURCE_DIR}/cmake/change_source.cmake)
set(XGRAMMAR_ROOT ${PARVL_DEPS}/xgrammar)
if(NOT EXISTS ${XGRAMMAR_ROOT}/cpp/grammar_matcher.cc)
  message(FATAL_ERROR "xgrammar is not in ${XGRAMMAR_ROOT}; run tools/setup.sh, or 'make build', which does")
endif()

# It bounds neither the time nor the memory of compiling a schema or of following it. What is built is a copy in which the places
# where either grows report to parvl/media/grammar_limits.h. Changed are: the parser's states (which masks and matching are made of), expressions and automata as they are built, and
# visits of a grammar by the passes over it.
set(XGRAMMAR_LIMITED ${CMAKE_BINARY_DIR}/xgrammar_limited)
set(XGRAMMAR_CHANGED earley_parser.h earley_parser.cc grammar_builder.cc grammar_functor.h fsm.cc grammar_compiler.cc json_schema_converter.cc)
file(GLOB_RECURSE XGRAMMAR_FILES RELATIVE ${XGRAMMAR_ROOT}/cpp ${XGRAMMAR_ROOT}/cpp/*.h ${XGRAMMAR_ROOT}/cpp/*.cc)
list(FILTER XGRAMMAR_FILES EXCLUDE REGEX "^tvm_ffi/")
foreach(name ${XGRAMMAR_FILES})
  if(NOT name IN_LIST XGRAMMAR_CHANGED)
    configure_file(${XGRAMMAR_ROOT}/cpp/${name} ${XGRAMMAR_LIMITED}/${name} COPYONLY)
  endif()
endforeach()
foreach(name ${XGRAMMAR_CHANGED})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${XGRAMMAR_ROOT}/cpp/${name})
  file(READ ${XGRAMMAR_ROOT}/cpp/${name} xgrammar_${name})
endforeach()
foreach(name earley_parser.h grammar_builder.cc grammar_functor.h fsm.cc grammar_compiler.cc json_schema_converter.cc)
  string(PREPEND xgrammar_${name} "#include \"parvl/media/grammar_limits.h\"\n")
endforeach()
change_source(xgrammar earley_parser.h "void Enqueue(const ParserState& state) {"
  "void Enqueue(const ParserState& state) { parvl::spend_grammar_steps(1);")
change_source(xgrammar earley_parser.cc "void EarleyParser::Scan(const ParserState& state, const uint8_t ch) {"
  "void EarleyParser::Scan(const ParserState& state, const uint8_t ch) { parvl::spend_grammar_steps(1);")
change_source(xgrammar grammar_builder.cc "int32_t GrammarBuilder::AddGrammarExpr(const GrammarExpr& grammar_expr) {"
  "int32_t GrammarBuilder::AddGrammarExpr(const GrammarExpr& grammar_expr) { parvl::spend_grammar_steps(4 + grammar_expr.data_len);")
change_source(xgrammar grammar_functor.h "virtual T VisitExpr(const GrammarExpr& grammar_expr) {"
  "virtual T VisitExpr(const GrammarExpr& grammar_expr) { parvl::spend_grammar_steps(1);")
change_source(xgrammar fsm.cc "  int AddState() {" "  int AddState() { parvl::spend_grammar_steps(4);")
change_source(xgrammar fsm.cc "  void AddEdge(int from, int to, int32_t min, int32_t max) {"
  "  void AddEdge(int from, int to, int32_t min, int32_t max) { parvl::spend_grammar_steps(1);")
change_source(xgrammar fsm.cc "    int current = queue.front();" "    parvl::spend_grammar_steps(1); int current = queue.front();")
change_source(xgrammar fsm.cc "    for (const auto& state : closures[now_process]) {"
  "    for (const auto& state : closures[now_process]) { parvl::spend_grammar_steps(1);")
# A mask is up to a bit a token of the vocabulary.
change_source(xgrammar grammar_compiler.cc "AdaptiveTokenMask GrammarMatcherForTokenMaskCache::GetAdaptiveTokenMask(bool is_root_rule) {"
  "AdaptiveTokenMask GrammarMatcherForTokenMaskCache::GetAdaptiveTokenMask(bool is_root_rule) { parvl::spend_grammar_steps(tokenizer_info_.GetVocabSize() / 16);")
change_source(xgrammar json_schema_converter.cc "  std::string cache_key = ComputeCacheKey(schema);"
  "  std::string cache_key = ComputeCacheKey(schema); parvl::spend_grammar_steps(4 + cache_key.size() / 16);")
# Strings that it writes wrongly: raw control characters under minLength and maxLength, characters that JSON escapes under a pattern
# outside ASCII, and further keys that spell a described key with escapes.
change_source(xgrammar json_schema_converter.cc
  [=[AddCharacterClass({{'"', '"'}, {'\\', '\\'}, {'\r', '\r'}, {'\n', '\n'}}, true)]=]
  [=[AddCharacterClass({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}}, true)]=])
change_source(xgrammar json_schema_converter.cc
  [=[  // Keep regex conversion independent. Only the uncommon]=]
  [=[  if (json_string) XGRAMMAR_LOG(FATAL) << "the pattern '" << regex << "' is not supported, or matches no string";
  // Keep regex conversion independent. Only the uncommon]=])
change_source(xgrammar json_schema_converter.cc
  [=[  choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));
  for (const auto& [character, child] : node.children) {]=]
  [=[  for (const auto& [character, child] : node.children) {]=])
# Numbers that hardly any reader of JSON can hold.
change_source(xgrammar json_schema_converter.cc
  [=[builder_.AddCharacterClassStar({{'0', '9'}})}]=]
  [=[Repeat(rule_name + "_more_digits", builder_.AddCharacterClass({{'0', '9'}}), 0, 17)}]=])
change_source(xgrammar json_schema_converter.cc
  [=[            one_or_more_digits}
       )}
  );
  // Note]=]
  [=[            Repeat(rule_name + "_exponent", builder_.AddCharacterClass({{'0', '9'}}), 1, 2)}
       )}
  );
  // Note]=])
foreach(name ${XGRAMMAR_CHANGED})
  file(CONFIGURE OUTPUT ${XGRAMMAR_LIMITED}/${name} CONTENT "${xgrammar_${name}}" @ONLY)
endforeach()

list(FILTER XGRAMMAR_FILES INCLUDE REGEX "\\.cc$")
list(TRANSFORM XGRAMMAR_FILES PREPEND ${XGRAMMAR_LIMITED}/)
add_library(parvl_xgrammar STATIC ${XGRAMMAR_FILES})
target_include_directories(parvl_xgrammar SYSTEM PUBLIC ${XGRAMMAR_ROOT}/include ${XGRAMMAR_ROOT}/3rdparty/dlpack/include
  PRIVATE ${XGRAMMAR_ROOT}/3rdparty/picojson)
# What it would print, and every failure, goes to parvl/media/grammar.cc.
target_compile_definitions(parvl_xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0 XGRAMMAR_LOG_CUSTOMIZE=1)
target_compile_options(parvl_xgrammar PRIVATE -w -g0)
target_link_libraries(parvl_xgrammar PUBLIC Threads::Threads)
