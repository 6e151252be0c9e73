// The AVX-512 kernels for processors without VNNI.
#define CSV_DECODE_NO_VNNI
#include "isa_avx512.cpp"
