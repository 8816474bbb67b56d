/* The same measurement as crates/comm/examples/all_reduce.rs with MPI_Allreduce: mpicc -O2 all_reduce.c; prints one line of JSON. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    size_t bytes = argc > 1 ? strtoull(argv[1], 0, 10) : 400000000;
    int rounds = argc > 2 ? atoi(argv[2]) : 5, rank, ranks;
    size_t n = bytes / 4;
    float *data = malloc(n * 4);
    double *seconds = malloc(rounds * sizeof *seconds);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int round = 0; round <= rounds; round++) { /* the first is not counted */
        for (size_t i = 0; i < n; i++) data[i] = i % 1000 + rank;
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, data, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        if (round > 0) seconds[round - 1] = MPI_Wtime() - start;
        for (size_t i = 0; i < n; i++)
            if (data[i] != (float)(i % 1000) * ranks + ranks * (ranks - 1) / 2) {
                fprintf(stderr, "wrong sum at element %zu: %g\n", i, data[i]);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
    }
    qsort(seconds, rounds, sizeof *seconds, ascending);
    if (rank == 0)
        printf("{\"backend\": \"MPI_Allreduce\", \"ranks\": %d, \"bytes\": %zu, \"rounds\": %d, \"seconds\": %.6f, "
               "\"best_seconds\": %.6f, \"gb_per_second\": %.4f}\n",
               ranks, bytes, rounds, seconds[rounds / 2], seconds[0], bytes / seconds[rounds / 2] / 1e9);
    MPI_Finalize();
    return 0;
}
