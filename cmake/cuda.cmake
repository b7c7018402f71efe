# CUDA kernels go into libparvl_cuda.so, which the program loads when it uses a GPU; without nvcc it is not built, and a GPU
# runs on PyTorch's own operations.
include(CheckLanguage)
check_language(CUDA)
option(PARVL_CUDA "Build the CUDA kernels when nvcc is there" ON)
if(PARVL_CUDA AND CMAKE_CUDA_COMPILER)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual")
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25 does not know that nvcc 12 and later have it
  set(CMAKE_CUDA_STANDARD 20)
  set(PARVL_HAVE_CUDA ON)
endif()
message(STATUS "CUDA kernels: ${PARVL_HAVE_CUDA}")
