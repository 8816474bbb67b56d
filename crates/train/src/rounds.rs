//! The loop: from a pile of text to answers, round after round (Izacard and Grave, 2021, "Distilling knowledge from reader to
//! retriever"). Words find the first passages; a reader learns on them; its cross-attention tells which passages helped; a retriever learns
//! that from it; its vectors of all passages find the passages of the next round.
//!
//! ```text
//! LOOP/bm25/index            words of all passages
//! LOOP/untrained/{retriever,vectors,index,measure}       the retriever before any training, to compare with
//! LOOP/round-1/{search,reader,scores,retriever,vectors,index,measure}
//! LOOP/table.md, table.json  what each round brought
//! ```
//!
//! A stage's state (`state.rs`) says of which settings and of which results of other stages it is. What is up to date is
//! not computed again; what is not goes, with all that rests on it. A stage that was ended goes on where it was, as its command
//! by hand would. By all ranks every stage gives the same bits as by one.

mod inputs;
pub mod settings;
pub mod stage;
pub mod state;
mod table;
pub mod tables;
mod work;

use std::time::Instant;

use serde::Serialize;
use tercio_comm::World;

use crate::error::TrainError;
use crate::ranks::options::LinkOptions;
use crate::run::{Signals, StopReason};
use settings::LoopSettings;
use stage::{Stage, stages};
use state::{Standing, States};
use work::{Outcome, Work};

pub use table::{Row, Table, Times};

/// What of a loop is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Which {
    /// This stage only, whose own needs must be up to date; `None`: all.
    pub only: Option<Stage>,
    /// Of the vectors one of so many parts only: number and count.
    pub part: Option<(u64, u64)>,
}

/// How a loop ended.
#[derive(Clone, Debug, PartialEq)]
pub enum LoopOutcome {
    /// All that was asked for is up to date.
    Done,
    /// A signal ended it on some rank; the same command goes on. The signal is this rank's, where it has seen one.
    Stopped(Option<StopReason>),
}

/// A stage and how it stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedStage {
    /// Its name.
    pub stage: String,
    /// `up to date`, `to do`, `begun` or `out of date`.
    pub standing: &'static str,
    /// Why it is to be done, where there was something.
    pub reason: String,
    /// Seconds that it took, where it is up to date.
    pub seconds: Option<f64>,
}

/// How all stages stand; changes nothing.
///
/// # Errors
/// Files of inputs that cannot be read, a state that cannot be read.
pub fn plan(settings: &LoopSettings) -> Result<Vec<PlannedStage>, TrainError> {
    let mut states = States::of(&settings.all.output);
    let mut known = inputs::Known::default();
    let mut plan = Vec::new();
    for stage in stages(settings.shape()) {
        let planned = |standing, reason: String, seconds| PlannedStage {
            stage: stage.to_string(),
            standing,
            reason,
            seconds,
        };
        let waits = stage.needs(settings.shape()).into_iter().find(|need| !known.has(*need));
        if let Some(need) = waits {
            plan.push(planned("to do", format!("{need} comes first"), None));
            continue;
        }
        let inputs = inputs::of(stage, settings, &known, &mut states)?;
        plan.push(match states.standing(stage, &inputs)? {
            Standing::UpToDate(done) => {
                let seconds = done.seconds;
                known.add(stage, *done);
                planned("up to date", String::new(), Some(seconds))
            }
            Standing::Missing => planned("to do", String::new(), None),
            Standing::Begun => planned("begun", String::new(), None),
            Standing::Outdated(why) => planned("out of date", why, None),
        });
    }
    Ok(plan)
}

/// What rank 0 tells the others of a stage.
const SKIP: u8 = 0;
const DO: u8 = 1;
const FINISHED: u8 = 2;
const PARTS: u8 = 3;
const STOPPED: u8 = 4;

/// Does what is not up to date, in order, by all ranks of `world`; rank 0 decides and writes, and the others find its files in the same
/// folder. Afterwards the table is written, where all was asked for.
///
/// # Errors
/// What a stage finds wrong; with [`Which::only`] a stage that it needs and that is not up to date; a rank was lost or failed.
pub fn run_among(
    world: &World,
    settings: &LoopSettings,
    which: Which,
    link: &LinkOptions,
    signals: &Signals,
    progress: bool,
) -> Result<LoopOutcome, TrainError> {
    let mut states = States::of(&settings.all.output);
    let mut known = inputs::Known::default();
    for stage in stages(settings.shape()) {
        if ended(world, signals)? {
            return Ok(LoopOutcome::Stopped(signals.requested()));
        }
        // Rank 0's; the others hear of it.
        let mut inputs = state::Inputs::new();
        let mut order = SKIP;
        if world.is_main() {
            let is_wanted = which.only.is_none_or(|only| only == stage);
            let lacking = stage.needs(settings.shape()).into_iter().find(|need| !known.has(*need));
            if let Some(need) = lacking.filter(|_| is_wanted) {
                return Err(TrainError::Unusable(format!(
                    "{stage}: {need} is not up to date; do it first, or leave --stage out"
                )));
            }
            if lacking.is_none() {
                inputs = inputs::of(stage, settings, &known, &mut states)?;
                match states.standing(stage, &inputs)? {
                    Standing::UpToDate(done) => known.add(stage, *done),
                    standing if is_wanted => {
                        order = DO;
                        say(stage, &standing);
                        states.begin(stage, &inputs)?;
                    }
                    _ => {}
                }
            }
            states.save()?;
        }
        if world.broadcast_bytes(0, vec![order])? != [DO] {
            continue;
        }
        let since = Instant::now();
        let part = which.part;
        let work = Work { world, settings, link, signals, progress, part, stage };
        let done = work.run();
        let seconds = since.elapsed().as_secs_f64();
        if world.is_main() && !matches!(done, Ok(Outcome::Finished(..))) {
            states.spent(stage, seconds)?;
        }
        let code = match done? {
            Outcome::Finished(results, figures) => {
                if world.is_main() {
                    known.add(stage, states.finish(stage, inputs, &results, figures, seconds)?);
                }
                FINISHED
            }
            Outcome::Parts => PARTS,
            Outcome::Stopped => STOPPED,
        };
        match world.broadcast_bytes(0, vec![code])?[..] {
            [FINISHED] => {}
            [PARTS] => return Ok(LoopOutcome::Done),
            _ => return Ok(LoopOutcome::Stopped(signals.requested())),
        }
    }
    if world.is_main() && which.only.is_none() {
        Table::of(settings, &known).write(&settings.all.output)?;
    }
    world.barrier()?;
    Ok(LoopOutcome::Done)
}

/// The table of a loop whose stages are up to date, as far as they are.
///
/// # Errors
/// As [`plan`].
pub fn table(settings: &LoopSettings) -> Result<Table, TrainError> {
    let mut states = States::of(&settings.all.output);
    let mut known = inputs::Known::default();
    for stage in stages(settings.shape()) {
        if stage.needs(settings.shape()).iter().any(|need| !known.has(*need)) {
            continue;
        }
        let inputs = inputs::of(stage, settings, &known, &mut states)?;
        if let Standing::UpToDate(done) = states.standing(stage, &inputs)? {
            known.add(stage, *done);
        }
    }
    Ok(Table::of(settings, &known))
}

/// Whether a signal has come to any rank.
fn ended(world: &World, signals: &Signals) -> Result<bool, TrainError> {
    let all = world.all_gather_bytes(vec![u8::from(signals.requested().is_some())])?;
    Ok(all.concat().contains(&1))
}

fn say(stage: Stage, standing: &Standing) {
    match standing {
        Standing::Begun => tracing::info!("{stage}: going on with what was begun"),
        Standing::Outdated(why) => tracing::info!("{stage}: anew ({why})"),
        _ => tracing::info!("{stage}"),
    }
}
