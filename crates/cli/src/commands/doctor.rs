//! `tercio doctor`: whether ranks can work here, and what to change.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tercio_comm::doctor::{Finding, Grade, examine};
use tercio_comm::place::Flags;
use tercio_comm::{Backend, Place, Settings};
use tercio_cuda::gpu;
use tercio_engine::memory::human;
use tercio_train::TrainError;
use tercio_train::run::{Verbosity, init_logging};

use super::common::line;

/// Flags of `tercio doctor`.
#[derive(Args)]
#[command(after_help = "Examples:\n  tercio doctor\n  tercio launch --nproc-per-node 4 -- doctor\n  \
    srun --nodes 2 --ntasks-per-node 8 tercio doctor --folder /shared/runs\n\n\
    Exit code: 1 where a run would fail.")]
pub struct Doctor {
    /// Folder that all hosts should share: is what rank 0 writes there seen by all?
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Way of the bytes between ranks: auto, local, tcp, mpi
    #[arg(long, env = "TERCIO_BACKEND", default_value = "auto")]
    backend: Backend,
    /// Network interface (eth0) or own address of the ranks' connections
    #[arg(long, env = "TERCIO_INTERFACE")]
    interface: Option<String>,
    /// Seconds that the ranks have to find each other
    #[arg(long, env = "TERCIO_JOIN_TIMEOUT", default_value_t = 60)]
    join_timeout: u64,
    /// Port where rank 0 listens, under srun and MPI
    #[arg(long, env = "TERCIO_MAIN_PORT", default_value_t = -1, allow_negative_numbers = true)]
    main_port: i64,
    /// Print the findings as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Looks, and tells.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        init_logging(None, Verbosity::Quiet)?;
        let flags = Flags { main_port: self.main_port, ..Flags::default() };
        let place = Place::from_env(flags).map_err(|e| TrainError::Options(e.to_string()))?;
        let settings = Settings {
            backend: self.backend,
            interface: self.interface,
            join_timeout: Duration::from_secs(self.join_timeout),
            collective_timeout: Duration::from_secs(120),
            ..Settings::default()
        };
        let findings = examine(&place, &settings, self.folder.as_deref(), gpus());
        let bad = findings.iter().any(|f| f.grade == Grade::Bad);
        if self.json && place.rank == 0 {
            let all: Vec<_> = findings.iter().map(json).collect();
            line(&serde_json::json!({ "ok": !bad, "findings": all }).to_string())?;
        }
        for finding in findings.iter().filter(|_| !self.json) {
            // What keeps another rank from the meeting is heard on stderr only.
            match place.rank {
                0 => line(&finding.to_string())?,
                _ if finding.grade == Grade::Bad => eprintln!("{finding}"),
                _ => {}
            }
        }
        Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// What this host has of GPUs. None is no fault.
fn gpus() -> Vec<Finding> {
    let topic = "gpu";
    let survey = gpu::survey();
    let cards = match survey.cards {
        Ok(cards) => cards,
        Err(why) => return vec![Finding::ok(topic, format!("{why}; commands compute on the processor"))],
    };
    let mut findings: Vec<Finding> = (cards.iter().enumerate())
        .map(|(i, card)| {
            let (major, minor) = card.capability;
            let what = format!(
                "cuda:{i} is {}, {}, compute capability {major}.{minor}",
                card.name,
                human(card.memory)
            );
            match card.works() {
                true => Finding::ok(topic, what),
                false => Finding::new(topic, Grade::Warn, what, "A100 and later can be used (8.0 and more)"),
            }
        })
        .collect();
    let libraries = [
        (survey.products, "libcublasLt.so", "cuBLAS"),
        (survey.compiler, "libnvrtc.so", "NVRTC (not needed where its kernels were compiled before)"),
    ];
    for (_, file, package) in libraries.into_iter().filter(|l| !l.0) {
        let advice = format!(
            "install the CUDA toolkit, or its package of {package}; put its folder on LD_LIBRARY_PATH"
        );
        findings.push(Finding::new(topic, Grade::Warn, format!("{file} is not found"), &advice));
    }
    findings
}

fn json(f: &Finding) -> serde_json::Value {
    serde_json::json!({
        "topic": f.topic,
        "grade": f.grade.name(),
        "what": f.what,
        "advice": (!f.advice.is_empty()).then_some(&f.advice),
        "hosts": f.hosts,
    })
}
