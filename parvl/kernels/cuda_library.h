// What libparvl_cuda.so gives: the GPU kernels as a table of plain functions.
#pragma once

#include "parvl/kernels/decode_attention.h"
#include "parvl/kernels/decode_linear.h"
#include "parvl/kernels/decode_sample.h"
#include "parvl/kernels/elementwise.h"
#include "parvl/kernels/prefill_attention.h"

namespace parvl::kernels {

struct CudaLibrary {
  CudaElementwise elementwise;
  decltype(&decode_linear) linear;
  decltype(&decode_attention) attention;
  decltype(&decode_attention_partial_bytes) attention_partial_bytes;
  decltype(&has_decode_attention) has_attention;
  decltype(&decode_sample) sample;
  decltype(&store_rows) store;
  decltype(&prefill_attention) prefill;
};

inline constexpr char kCudaLibrarySymbol[] = "parvl_cuda_library";

}  // namespace parvl::kernels
