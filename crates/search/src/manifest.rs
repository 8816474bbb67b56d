//! What every index folder says of itself.
