#include "parvl/kernels/cuda_library.h"

extern "C" __attribute__((visibility("default"))) const parvl::kernels::CudaLibrary parvl_cuda_library = {
    parvl::kernels::kCudaElementwise,     parvl::kernels::decode_linear,
    parvl::kernels::decode_attention,     parvl::kernels::decode_attention_partial_bytes,
    parvl::kernels::has_decode_attention, parvl::kernels::decode_sample,
    parvl::kernels::store_rows,           parvl::kernels::prefill_attention};
