//! Exact inner product or cosine over vectors on disk.
