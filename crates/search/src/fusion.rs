//! One ranking of several: reciprocal rank fusion, weighted scores.
