//! The plan of a run (`--dry-run`): what it will read, take and cost, from a sample of its updates and two of them measured.
//! Nothing of it is kept: the run's folder is not touched.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::Device;

use crate::error::TrainError;
use crate::objective::{Objective, ShardSize};
use crate::optimizer::moments;
use crate::ranks::RankDevice;
use crate::ranks::deal::{notes, own_shards};
use crate::run::{free_bytes, memory, progress};
use crate::state::checkpoint_bytes;
use crate::step::{Stepper, TrainState};
use crate::trainer::LoopOptions;

/// Updates of the sample at most.
const SAMPLE_UPDATES: u64 = 64;

/// Examples of the sample at most, but for a single update that has more.
const SAMPLE_EXAMPLES: usize = 2_000;

/// Bytes of an element of an arena on a device that computes in f32.
const ELEMENT: u64 = 4;

/// Memory in bytes: what each part takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// The values.
    pub parameters: u64,
    /// What the optimizer keeps: Adam's two moments, Adafactor's statistics.
    pub moments: u64,
    /// Gradients of `gradient_arenas` sums of shards.
    pub gradients: u64,
    /// Sums of gradients that exist at a time: `log2(groups) + 1`.
    pub gradient_arenas: u64,
    /// The running average of the parameters, where one is kept.
    pub average: u64,
    /// Activations and workspace of the largest shard of the sample, as measured; `None` where nothing was measured.
    pub activations: Option<u64>,
    /// The program, its tokenizer and the data's index.
    pub program: u64,
    /// All of the above.
    pub total: u64,
    /// What the machine, or the job's limit, lets this process have; `None` where the system does not tell.
    pub available: Option<u64>,
}

/// What a run will do and cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Training examples that are used.
    pub examples: usize,
    /// What computes: instruction set and precision.
    pub arithmetic: String,
    /// Updates that are done already: the run would go on from a checkpoint.
    pub done: u64,
    /// Updates of the run.
    pub updates: u64,
    /// Updates of an epoch.
    pub updates_per_epoch: u64,
    /// Epochs of the run.
    pub epochs: f64,
    /// Examples of an update.
    pub global_batch_size: usize,
    /// Examples of a shard.
    pub micro_batch_size: usize,
    /// Shards of an update.
    pub shards: usize,
    /// Groups of shards.
    pub bit_groups: usize,
    /// Processes that share the work.
    pub ranks: usize,
    /// Shards of an update that the rank with the most of them computes.
    pub shards_of_a_rank: usize,
    /// Updates of the sample that the next five fields are of.
    pub sample_updates: u64,
    /// Input tokens of an update, on average.
    pub tokens_per_update: f64,
    /// What the loss of an update is a mean over (target tokens of a reader), on average.
    pub targets_per_update: f64,
    /// Share of the tokens of padded batches that is padding, and is not computed here.
    pub padding_saved: f64,
    /// Share of the inputs that are as long as the limit: cut, or just fitting.
    pub truncated: f64,
    /// Input tokens of the sample's largest shard.
    pub largest_shard: u64,
    /// Memory.
    pub memory: MemoryPlan,
    /// Updates that were measured: two, or none where the memory forbids it.
    pub measured_updates: u64,
    /// Time of an average update; communication, evaluation and saving not counted.
    pub seconds_per_update: Option<f64>,
    /// Time of all updates that are left.
    pub seconds: Option<f64>,
    /// Bytes of a checkpoint.
    pub checkpoint: u64,
    /// Checkpoints that will lie on the disk at a time, at most.
    pub checkpoints: u64,
    /// Free bytes where the run's folder is or will be.
    pub disk_free: Option<u64>,
    /// What does not fit, as sentences.
    pub warnings: Vec<String>,
}

struct Sample {
    updates: Vec<(UpdateExamples, ShardSize, u64)>,
    sum: ShardSize,
}

impl Sample {
    fn draw<D: Device, O: Objective<D>>(
        objective: &O,
        options: &LoopOptions,
        from: u64,
    ) -> Result<Sample, TrainError> {
        let batches = options.batches(objective.examples())?;
        let fits = (SAMPLE_EXAMPLES / options.batch.global).max(1) as u64;
        let left = options.optim.total_steps.saturating_sub(from).max(1);
        let mut sample = Sample { updates: Vec::new(), sum: ShardSize::default() };
        for u in from..from + SAMPLE_UPDATES.min(fits).min(left) {
            let examples = batches.batch(u);
            let (mut size, mut largest) = (ShardSize::default(), 0);
            for shard in objective.shards(&examples, options.batch.micro)? {
                let shard = objective.size(&shard);
                size.add(shard);
                largest = largest.max(shard.tokens);
            }
            sample.sum.add(size);
            sample.updates.push((examples, size, largest));
        }
        Ok(sample)
    }
    fn mean(&self, sum: u64) -> f64 {
        sum as f64 / self.updates.len() as f64
    }
    /// The update with the largest shard, for the memory.
    fn largest(&self) -> &(UpdateExamples, ShardSize, u64) {
        self.updates.iter().max_by_key(|u| u.2).expect("a sample has an update")
    }
    /// The update nearest to the mean, for the time.
    fn typical(&self) -> &(UpdateExamples, ShardSize, u64) {
        let mean = self.mean(self.sum.tokens) as u64;
        self.updates.iter().min_by_key(|u| u.1.tokens.abs_diff(mean)).expect("a sample has an update")
    }
}

/// Plans the updates that are left from `state`, which two measured updates change; `run_dir` need not exist.
///
/// # Errors
/// What the run itself would fail with: data that cannot be read, batches that do not fit, a loss that is not finite.
pub fn plan<D: RankDevice, O: Objective<D>>(
    device: &D,
    objective: &O,
    options: &LoopOptions,
    run_dir: &Path,
    state: &mut TrainState<D>,
) -> Result<Plan, TrainError> {
    plan_among((1, false), device, objective, options, run_dir, state)
}

/// As [`plan`], of the rank of `ranks` that has most to compute; measured by its share of the shards, on this machine. The
/// flag says whether the optimizer is shared out.
///
/// # Errors
/// Likewise.
pub fn plan_among<D: RankDevice, O: Objective<D>>(
    (ranks, split): (usize, bool),
    device: &D,
    objective: &O,
    options: &LoopOptions,
    run_dir: &Path,
    state: &mut TrainState<D>,
) -> Result<Plan, TrainError> {
    let (batch, total, done) = (options.batch, options.optim.total_steps, state.step);
    let left = total.saturating_sub(done);
    let resident = memory::resident().unwrap_or(0);
    let room = memory::available();
    let available = room.map(|bytes| bytes.saturating_add(resident));
    let sample = device.run(|| Sample::draw(objective, options, done))?;
    let parameters = (objective.layout().len() as u64).saturating_mul(ELEMENT);
    let arenas = |groups: usize| u64::from(groups.max(1).next_power_of_two().ilog2()) + 1;
    let gradient_arenas = arenas(batch.groups.div_ceil(ranks));
    let gradients = parameters.saturating_mul(gradient_arenas);
    // What is measured is one rank's update of all shards.
    let measured_gradients = parameters.saturating_mul(arenas(batch.groups));
    let fits = room.is_none_or(|bytes| measured_gradients < bytes);
    let before = memory::resident().unwrap_or(0);
    let mut shortage = None;
    let measured = match fits.then(|| measure(device, objective, options, state, &sample)).transpose() {
        Err(TrainError::OutOfMemory(what)) => {
            shortage = Some(format!("no update could be measured: {what}"));
            None
        }
        measured => measured?,
    };
    let peak = measured.as_ref().and_then(|m| m.peak);
    let activations = peak.map(|peak| peak.saturating_sub(before).saturating_sub(measured_gradients));
    let kept: u64 = moments(options.optim.optim, objective.layout()).iter().map(|l| l.len() as u64).sum();
    let moments = kept.saturating_mul(ELEMENT);
    let program = before.saturating_sub(parameters).saturating_sub(moments);
    let moments = moments / if split { ranks as u64 } else { 1 };
    let average = if options.average.is_some() { parameters } else { 0 };
    let memory = MemoryPlan {
        parameters,
        moments,
        gradients,
        gradient_arenas,
        average,
        activations,
        program,
        total: [parameters, moments, gradients, average, activations.unwrap_or(0), program]
            .iter()
            .fold(0, |sum, &part| sum.saturating_add(part)),
        available,
    };
    let most = (0..ranks).map(|r| own_shards(r, ranks, &batch, batch.shards).len()).max().unwrap_or(0);
    let share = most as f64 / batch.shards as f64;
    let seconds_per_update = measured.as_ref().map(|m| m.seconds * share);
    let updates_per_epoch = options.batches(objective.examples())?.updates_per_epoch();
    let mut plan = Plan {
        examples: objective.examples(),
        arithmetic: device.arithmetic(),
        done,
        updates: total,
        updates_per_epoch,
        epochs: total as f64 / updates_per_epoch as f64,
        global_batch_size: batch.global,
        micro_batch_size: batch.micro,
        shards: batch.shards,
        bit_groups: batch.groups,
        ranks,
        shards_of_a_rank: most,
        sample_updates: sample.updates.len() as u64,
        tokens_per_update: sample.mean(sample.sum.tokens),
        targets_per_update: sample.mean(sample.sum.count),
        padding_saved: 1.0 - sample.sum.tokens as f64 / sample.sum.padded_tokens.max(1) as f64,
        truncated: sample.sum.truncated as f64 / sample.sum.inputs.max(1) as f64,
        largest_shard: sample.largest().2,
        memory,
        measured_updates: if measured.is_some() { 2 } else { 0 },
        seconds_per_update,
        seconds: seconds_per_update.map(|s| s * left as f64),
        checkpoint: checkpoint_bytes(options.optim.optim, objective.layout()).saturating_add(average),
        checkpoints: checkpoints(options, left),
        disk_free: free_bytes(run_dir),
        warnings: Vec::new(),
    };
    plan.warnings = shortage.into_iter().chain(warnings(&plan, options)).collect();
    plan.warnings.extend(notes(ranks, &batch));
    Ok(plan)
}

struct Measured {
    seconds: f64,
    peak: Option<u64>,
}

fn measure<D: RankDevice, O: Objective<D>>(
    device: &D,
    objective: &O,
    options: &LoopOptions,
    state: &mut TrainState<D>,
    sample: &Sample,
) -> Result<Measured, TrainError> {
    let mut stepper = Stepper::new(device, objective, options.batch, &options.optim, options.seed);
    // Without it the peak would be that of reading the model.
    memory::reset_peak();
    stepper.update(state, &sample.largest().0)?;
    let (examples, size, _) = sample.typical();
    let start = Instant::now();
    stepper.update(state, examples)?;
    let per_token = start.elapsed().as_secs_f64() / size.tokens.max(1) as f64;
    Ok(Measured { seconds: per_token * sample.mean(sample.sum.tokens), peak: memory::peak_resident() })
}

/// Checkpoints on the disk while the last one is being written: the kept ones, the best one, the new one.
fn checkpoints(options: &LoopOptions, left: u64) -> u64 {
    let saves = left.div_ceil(options.save_freq).max(1);
    match options.keep_last as u64 {
        0 => saves,
        kept => saves.min(kept.saturating_add(2)),
    }
}

fn warnings(plan: &Plan, options: &LoopOptions) -> Vec<String> {
    let mut warnings = Vec::new();
    let human = memory::human;
    if let Some(room) = plan.memory.available.filter(|&room| plan.memory.total > room) {
        let not_measured = match plan.memory.activations {
            Some(_) => "",
            None => " before any activation, so no update was measured",
        };
        warnings.push(format!(
            "the run takes about {} of memory{not_measured}, this process can have {}: a smaller --micro_batch_size, \
             --recompute or --bit_groups 1 takes less",
            human(plan.memory.total),
            human(room)
        ));
    }
    let on_disk = plan.checkpoint.saturating_mul(plan.checkpoints);
    if let Some(free) = plan.disk_free.filter(|&free| on_disk > free) {
        warnings.push(format!(
            "{} checkpoints of {} take {}, {} are free: free some space or keep fewer (--keep_last)",
            plan.checkpoints,
            human(plan.checkpoint),
            human(on_disk),
            human(free)
        ));
    }
    let grace = options.grace_seconds as f64;
    if let Some(seconds) = plan.seconds_per_update.filter(|&s| s > grace) {
        warnings.push(format!(
            "an update takes {seconds:.0} s and does not fit into the {grace:.0} s after a signal: it would be dropped; let the \
             scheduler signal earlier (Slurm: --signal=USR1@SECONDS) and raise --grace_seconds"
        ));
    }
    let o = &options.optim;
    if o.scheduler.has_course() && o.warmup_steps >= o.total_steps {
        warnings.push(format!(
            "the warm-up of {} updates does not fit into the run's {}: the learning rate never reaches --lr",
            o.warmup_steps, o.total_steps
        ));
    }
    if plan.done >= plan.updates {
        warnings.push(format!("update {} of {} is done: nothing is left to train", plan.done, plan.updates));
    }
    warnings
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let human = memory::human;
        let known = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), human);
        writeln!(
            f,
            "examples      {} used, {} an update ({} shards of {} in {} groups)",
            self.examples, self.global_batch_size, self.shards, self.micro_batch_size, self.bit_groups
        )?;
        if self.ranks > 1 {
            writeln!(
                f,
                "ranks         {}, each with up to {} shards of an update; memory is that of one of them",
                self.ranks, self.shards_of_a_rank
            )?;
        }
        let done = match self.done {
            0 => String::new(),
            n => format!(", {n} of them done"),
        };
        writeln!(
            f,
            "updates       {}{done}: {:.2} epochs of {} updates",
            self.updates, self.epochs, self.updates_per_epoch
        )?;
        writeln!(
            f,
            "tokens        {:.0} an update and {:.0} of targets (mean of {} updates); largest shard {}",
            self.tokens_per_update, self.targets_per_update, self.sample_updates, self.largest_shard
        )?;
        writeln!(f, "padding       {:.1}% of a padded batch, not computed here", 100.0 * self.padding_saved)?;
        writeln!(f, "truncation    {:.1}% of the inputs reach the length limit", 100.0 * self.truncated)?;
        let m = &self.memory;
        writeln!(f, "arithmetic    {}", self.arithmetic)?;
        writeln!(f, "memory        {} of {} available", human(m.total), known(m.available))?;
        writeln!(
            f,
            "              parameters {}, moments {}, gradients {} ({} sums){}, activations {}, program {}",
            human(m.parameters),
            human(m.moments),
            human(m.gradients),
            m.gradient_arenas,
            if m.average > 0 { format!(", average {}", human(m.average)) } else { String::new() },
            m.activations.map_or("not measured".to_owned(), human),
            human(m.program)
        )?;
        match (self.seconds_per_update, self.seconds) {
            (Some(one), Some(all)) => writeln!(
                f,
                "time          {one:.3} s an update, {} for the updates that are left; {} not counted",
                progress::duration(all),
                if self.ranks > 1 { "communication, evaluation and saving" } else { "evaluation and saving" }
            )?,
            _ => writeln!(f, "time          not measured")?,
        }
        write!(
            f,
            "disk          {} a checkpoint, {} at a time, {} free",
            human(self.checkpoint),
            self.checkpoints,
            known(self.disk_free)
        )?;
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}
