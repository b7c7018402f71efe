# parvl_room(NAME [TORCH] SOURCES ... [LINK ...]): one static library a folder of parvl/.
function(parvl_room name)
  cmake_parse_arguments(ROOM "TORCH" "" "SOURCES;LINK" ${ARGN})
  add_library(parvl_${name} STATIC ${ROOM_SOURCES})
  target_link_libraries(parvl_${name} PUBLIC ${ROOM_LINK})
  if(ROOM_TORCH)
    parvl_use_torch(parvl_${name})
  endif()
endfunction()

# parvl_unit_test(NAME [TORCH] LINK ...): tests/unit/NAME.cc as a gtest program; tests/run.py runs all of build/tests/.
function(parvl_unit_test name)
  cmake_parse_arguments(TEST "TORCH" "" "LINK;SOURCES" ${ARGN})
  add_executable(${name} ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cc ${TEST_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_compile_definitions(${name} PRIVATE PARVL_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data"
    PARVL_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${TEST_LINK} GTest::gmock GTest::gtest_main)
  if(TEST_TORCH)
    parvl_use_torch(${name})
  endif()
endfunction()
