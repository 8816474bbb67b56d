//! BM25 over an inverted index of our own, on disk and mapped into memory.
