//! What a search writes: FiD's JSON, a TREC run, JSON lines.
