//! A compressed index of vectors: inverted lists, product or scalar quantisation, exact re-scoring.
