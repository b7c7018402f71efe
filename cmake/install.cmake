# `make install`: the program in bin/, and beside it in lib/parvl/ the libraries that Debian does not have.
install(FILES ${TORCH_ROOT}/lib/libtorch_cpu.so ${TORCH_ROOT}/lib/libc10.so ${TORCH_ROOT}/lib/libgomp.so.1
              ${TORCH_CUDART}/libcudart.so.13 ${TORCH_CUDART}/libcupti.so.13 DESTINATION lib/parvl)
install(FILES ${PARVL_DEPS}/jinja/vendor/llama.cpp/LICENSE DESTINATION share/doc/parvl RENAME LICENSE.llama.cpp)
install(FILES ${PARVL_DEPS}/xgrammar/LICENSE DESTINATION share/doc/parvl RENAME LICENSE.xgrammar)
# picojson's licence is the comment that its one file begins with.
file(READ ${PARVL_DEPS}/xgrammar/3rdparty/picojson/picojson.h picojson LIMIT 4096)
string(FIND "${picojson}" "*/" picojson_end)
string(SUBSTRING "${picojson}" 0 ${picojson_end} picojson_licence)
file(WRITE ${CMAKE_BINARY_DIR}/LICENSE.picojson "${picojson_licence}*/\n")
install(FILES ${CMAKE_BINARY_DIR}/LICENSE.picojson DESTINATION share/doc/parvl)
install(FILES ${PARVL_DEPS}/xgrammar/NOTICE DESTINATION share/doc/parvl RENAME NOTICE.xgrammar)
install(FILES ${CMAKE_SOURCE_DIR}/README.md DESTINATION share/doc/parvl)
