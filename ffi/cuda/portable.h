// What lets a header be compiled as C++17 on the host and under NVRTC.

#ifndef JAX_EP_FFI_CUDA_PORTABLE_H_
#define JAX_EP_FFI_CUDA_PORTABLE_H_

#ifdef __CUDACC__
#define JAX_EP_HD __host__ __device__
#else
#define JAX_EP_HD
#endif

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#endif  // JAX_EP_FFI_CUDA_PORTABLE_H_
