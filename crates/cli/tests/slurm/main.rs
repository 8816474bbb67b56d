//! Training under a real Slurm: where a job's ranks meet, and what becomes of the run when Slurm, a node, a cable or a task ends.
//!
//! Every test starts a cluster of virtual nodes (`tools/cluster`, needs root and the packages that it names), submits a
//! batch script as a person would write it, disturbs the job, and compares what it ends with, bit for bit, with one process
//! that was left alone.

mod announced;
mod cluster;
mod embed;
mod lost;
mod rounds;
#[path = "../rounds_support/mod.rs"]
mod rounds_support;
mod submit;
#[path = "../support/mod.rs"]
mod support;
mod trial;
