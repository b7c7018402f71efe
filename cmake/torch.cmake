# libtorch from .deps/torch, as imported targets: torch's own CMake package pulls in CUDA and every header folder.
set(PARVL_DEPS ${CMAKE_SOURCE_DIR}/.deps)
set(TORCH_ROOT ${PARVL_DEPS}/torch/torch CACHE PATH "Folder of the torch package (include/ and lib/)")
set(TORCH_CUDART ${PARVL_DEPS}/torch/nvidia/cu13/lib CACHE PATH "Folder of libcudart.so.13 and libcupti.so.13")
if(NOT EXISTS ${TORCH_ROOT}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "libtorch is not in ${TORCH_ROOT}; run tools/setup.sh, or 'make build', which does")
endif()

foreach(lib c10 torch_cpu)
  add_library(torch_${lib} SHARED IMPORTED)
  set_target_properties(torch_${lib} PROPERTIES IMPORTED_LOCATION ${TORCH_ROOT}/lib/lib${lib}.so IMPORTED_NO_SONAME FALSE)
endforeach()

# torch: what a target that includes torch headers links. CUDA's half of libtorch is not linked: parvl loads it when a GPU
# is asked for, so a machine without one needs none of its libraries and starts faster.
add_library(parvl_torch INTERFACE)
target_include_directories(parvl_torch SYSTEM INTERFACE ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
target_link_libraries(parvl_torch INTERFACE torch_torch_cpu torch_c10 Threads::Threads ${TORCH_ROOT}/lib/libgomp.so.1)
# ATen's parallel_for is a header; without OpenMP in our own files it is a plain loop. The runtime is the one that libtorch
# brings, since two of them would fight over the cores.
target_compile_options(parvl_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(parvl_torch INTERFACE -Wl,--allow-shlib-undefined)
set(CMAKE_BUILD_RPATH "$ORIGIN" ${TORCH_ROOT}/lib ${TORCH_CUDART})  # $ORIGIN: libparvl_cuda.so
set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib/parvl")

# One precompiled header for every file that includes torch.
file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cc "\n")
add_library(parvl_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cc)
target_link_libraries(parvl_torch_pch PUBLIC parvl_torch)
set_target_properties(parvl_torch_pch PROPERTIES POSITION_INDEPENDENT_CODE OFF)
target_compile_options(parvl_torch_pch PRIVATE -fpch-preprocess -fPIC)
target_precompile_headers(parvl_torch_pch PRIVATE <ATen/ATen.h> <torch/csrc/autograd/custom_function.h>
  <torch/csrc/autograd/autograd.h> <torch/csrc/autograd/variable.h> <vector> <string> <map> <memory> <functional>)
function(parvl_use_torch target)
  # Executables too are compiled as -fPIC (not -fPIE), or the precompiled header would not fit them.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_link_libraries(${target} PUBLIC parvl_torch)
  target_precompile_headers(${target} REUSE_FROM parvl_torch_pch)
  target_compile_options(${target} PRIVATE -fpch-preprocess)
endfunction()
