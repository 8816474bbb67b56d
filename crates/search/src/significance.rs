//! Whether two runs differ by more than chance: a paired test.
