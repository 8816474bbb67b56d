//! Several ranks from within a program: one call that starts them, does a piece of work on each, and gives rank 0's result back.
//!
//! What starts them is [`tercio_comm::launch::launch_distributed`]: the ranks are this program, started again with the same arguments, so a
//! program makes such a call once and early. `examples/classifier_on_ranks.rs` is a whole program.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tercio_comm::launch::Launch;
use tercio_comm::{CommError, Place, World};

use crate::error::TrainError;
use crate::options::TrainOptions;
use crate::ranks::options::LinkOptions;
use crate::run::Signals;
use crate::session::train_run;
use crate::setup::AnyTask;
use crate::state::Best;
use crate::trainer::RunOutcome;

/// How a training ended, as it comes back from rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// Updates done in all.
    pub step: u64,
    /// The signal that ended it, if one did; then the state is saved and the run can go on.
    pub stopped: Option<String>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Figures of the last evaluation, by name.
    pub figures: Vec<(String, f64)>,
    /// The last checkpoint, a model's folder.
    pub checkpoint: Option<PathBuf>,
}

impl From<RunOutcome> for Trained {
    fn from(o: RunOutcome) -> Trained {
        Trained {
            step: o.step,
            stopped: o.stopped.map(|reason| reason.name().to_owned()),
            best: o.best,
            figures: o.figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            checkpoint: o.checkpoint,
        }
    }
}

/// Does `work` on `ranks` processes of this host, which have found each other, and returns what it gave on rank 0, of any size. A process that
/// is a rank already (under `tercio launch`, torchrun, Slurm or MPI) starts nothing, but is one of those.
///
/// ```no_run
/// use tercio_train::launch::on_ranks;
///
/// let link = tercio_train::options::classifier_options(["--train_data", "train.txt"])?.run.ranks.link;
/// let sum = on_ranks(4, &link, |world| {
///     let mut sum = [world.rank() as f32];
///     world.all_reduce(&mut sum)?;
///     Ok(sum[0].to_le_bytes().to_vec())
/// })?;
/// assert_eq!(sum, 6f32.to_le_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`TrainError::Options`] when this process is one of another number of ranks than asked for; ranks that cannot be started or do not find each
/// other; what `work` failed with on a rank.
pub fn on_ranks(
    ranks: usize,
    link: &LinkOptions,
    work: impl FnOnce(&World) -> Result<Vec<u8>, TrainError>,
) -> Result<Vec<u8>, TrainError> {
    let program = std::env::current_exe().map_err(|source| {
        TrainError::Ranks(CommError::Io { what: "finding this program's own file".into(), source })
    })?;
    launch(Launch::new(program, std::env::args_os().skip(1).collect(), ranks), link, work)
}

/// As [`on_ranks`], of a launch with settings of one's own; the program it starts must come to this very call too.
///
/// # Errors
/// As [`on_ranks`].
pub fn launch(
    launch: Launch,
    link: &LinkOptions,
    work: impl FnOnce(&World) -> Result<Vec<u8>, TrainError>,
) -> Result<Vec<u8>, TrainError> {
    let ranks = launch.nproc_per_node * launch.nnodes;
    let in_rank = |place: Place| {
        if place.world_size != ranks {
            return Err(TrainError::Options(format!(
                "the program asks for {ranks} ranks, and was started as one of {}: start as many, or start it alone and it \
                 starts them itself",
                place.world_size
            )));
        }
        let world = World::join(&place, &link.settings())?;
        let done = work(&world);
        if let Err(error) = &done
            && !matches!(error, TrainError::Ranks(_))
        {
            if error.is_common() {
                let _ = world.barrier();
            } else {
                world.fail(&error.to_string());
            }
        }
        done
    };
    Ok(launch.distributed(in_rank)?)
}

/// Trains the run of `options`, or goes on with it, on `ranks` processes of this host; see [`on_ranks`]. `signals` end it in order, with a
/// checkpoint.
///
/// # Errors
/// Settings that do not fit each other, before anything is started; as [`on_ranks`] and [`train_run`].
pub fn train_on_ranks<T: AnyTask>(
    options: &TrainOptions<T>,
    ranks: usize,
    signals: &Signals,
) -> Result<Trained, TrainError> {
    options.check().map_err(TrainError::Options)?;
    let bytes = on_ranks(ranks, &options.run.ranks.link, |world| trained(options, world, signals))?;
    outcome(&bytes)
}

/// The outcome of a training on this rank of `world`, as bytes for rank 0's starter; [`outcome`] reads them.
///
/// # Errors
/// As [`train_run`].
pub fn trained<T: AnyTask>(
    options: &TrainOptions<T>,
    world: &World,
    signals: &Signals,
) -> Result<Vec<u8>, TrainError> {
    let trained = Trained::from(train_run(options, world, options.run.threads, false, signals)?);
    Ok(serde_json::to_vec(&trained).expect("numbers and texts"))
}

/// What [`trained`] wrote.
///
/// # Errors
/// It is something else.
pub fn outcome(bytes: &[u8]) -> Result<Trained, TrainError> {
    serde_json::from_slice(bytes)
        .map_err(|e| TrainError::Unusable(format!("rank 0 gave no outcome of a training back: {e}")))
}
