//! Metrics of rankings: nDCG, MAP, MRR, recall, success at k.
