/* All kernels as one translation unit. */

#ifdef _OPENMP
#include <omp.h>
#endif
#include "vectors.c"

INLINE int64_t thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

INLINE int64_t thread_count(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

#include "pages.c"
#include "attention.c"
#include "matmul.c"
#include "decoder.c"
