//! What the stages do. All ranks call these together; rank 0 writes, the others see its files.

mod read;
mod search;
mod vectors;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_engine::{Cpu, Device};
use tercio_models::folder::ModelFolder;
use tercio_models::sentence::SentenceConfig;

use super::settings::LoopSettings;
use super::stage::{Stage, Step};
use super::state::States;
use crate::error::TrainError;
use crate::objective::Objective;
use crate::options::{Precision, RetrieverOptions, TrainOptions};
use crate::ranks::options::LinkOptions;
use crate::ranks::start;
use crate::run::Signals;
use crate::scratch::ScratchFolder;
use crate::session::train_run;
use crate::setup::{self, AnyTask};

pub(super) use search::{ALONE, HITS};

/// Files of a run that tell nothing of its model.
const NOT_OF_THE_MODEL: [&str; 2] = ["optimizer.safetensors", crate::run::MANIFEST_NAME];

/// Figures of a stage.
pub(super) type Figures = Map<String, Value>;

/// What came of a stage's work.
pub(super) enum Outcome {
    /// It is finished: its results are these files, and this is what is to be said of them.
    Finished(Vec<PathBuf>, Figures),
    /// Some of its parts are not there yet: others do them.
    Parts,
    /// A signal ended it, and what is there can be gone on with.
    Stopped,
}

/// The loop at work on a stage.
pub(super) struct Work<'a> {
    pub world: &'a World,
    pub settings: &'a LoopSettings,
    pub link: &'a LinkOptions,
    pub signals: &'a Signals,
    /// Whether bars of progress are wanted.
    pub progress: bool,
    /// Of the vectors one of so many parts only: number and count.
    pub part: Option<(u64, u64)>,
    pub stage: Stage,
}

impl Work<'_> {
    /// Does the stage's work in its folder.
    pub fn run(&self) -> Result<Outcome, TrainError> {
        match self.stage.step {
            Step::Search => self.search(),
            Step::Reader => {
                let start = self.former(self.settings.shape().reader_goes_on, Step::Reader)?;
                let (dir, data) = (self.dir(), self.folder(self.stage.sibling(Step::Search)));
                self.train(&self.settings.reader_of(&dir, &data, start.as_deref(), self.link))
            }
            Step::Scores => self.scores(),
            Step::Initial => self.initial(),
            Step::Retriever => {
                let start = self.former(self.settings.shape().retriever_goes_on, Step::Retriever)?;
                let start = start.unwrap_or_else(|| self.folder(Stage::INITIAL));
                let (dir, data) = (self.dir(), self.folder(self.stage.sibling(Step::Scores)));
                self.train(&self.settings.retriever_of(&dir, &data, Some(&start), self.link))
            }
            Step::Vectors => self.vectors(),
            Step::Index => self.index(),
            Step::Measure => self.measure(),
        }
    }

    fn folder(&self, stage: Stage) -> PathBuf {
        States::of(&self.settings.all.output).folder(stage)
    }
    fn dir(&self) -> PathBuf {
        self.folder(self.stage)
    }
    /// Where indices of data files lie.
    fn cache(&self) -> PathBuf {
        self.settings.all.output.join("cache")
    }
    fn stop(&self) -> bool {
        self.signals.requested().is_some()
    }
    fn device(&self, precision: Precision) -> Result<Cpu, TrainError> {
        start::device_among(self.world, self.settings.all.threads, precision)
    }
    /// The folder of the model of the round before, where this round goes on from it.
    fn former(&self, goes_on: bool, step: Step) -> Result<Option<PathBuf>, TrainError> {
        if !goes_on || self.stage.round() == 1 {
            return Ok(None);
        }
        let run = self.folder(Stage::of(self.stage.round() - 1, step));
        Ok(Some(setup::model_folder(&run.to_string_lossy())?.path().to_owned()))
    }
    /// Says it once for all ranks.
    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.world.is_main() {
            tracing::info!("{}: {what}", self.stage);
        }
    }

    fn train<T: AnyTask>(&self, options: &TrainOptions<T>) -> Result<Outcome, TrainError> {
        options.check().map_err(TrainError::Options)?;
        let outcome = train_run(options, self.world, options.run.threads, self.progress, self.signals)?;
        if outcome.stopped.is_some() {
            return Ok(Outcome::Stopped);
        }
        let mut figures = Figures::new();
        figures.insert("updates".into(), outcome.step.into());
        // Kept in the checkpoint, so a run that was complete already tells it too.
        if let Some(best) = outcome.best {
            figures.insert("best_update".into(), best.step.into());
            figures.insert("best_score".into(), best.score.into());
        }
        Ok(Outcome::Finished(self.model_files()?, figures))
    }

    /// The files of the model that a run or a folder holds; rank 0's only.
    fn model_files(&self) -> Result<Vec<PathBuf>, TrainError> {
        match self.world.is_main() {
            true => files_of_model(&self.dir()),
            false => Ok(Vec::new()),
        }
    }

    /// The retriever as the first round's training begins with it, as a folder.
    fn initial(&self) -> Result<Outcome, TrainError> {
        let (dir, data) = (self.dir(), self.folder(Stage::of(1, Step::Scores)));
        if self.world.is_main() {
            let options: RetrieverOptions = self.settings.retriever_of(&dir, &data, None, self.link);
            let device = Cpu::new(1)?.with_precision(options.compute.get().into());
            let scratch = ScratchFolder::new()?;
            let run = device.run(|| setup::open_run_from(&options, None, scratch.path(), &device))?;
            Objective::<Cpu>::save(&run.objective, &device, &run.state.parameters, &dir)?;
        }
        self.world.barrier()?;
        Ok(Outcome::Finished(self.model_files()?, Figures::new()))
    }
}

/// The files that make up the model of a folder or of a run, sorted: what it computes is a function of them.
///
/// # Errors
/// No model; a folder that cannot be read.
pub(super) fn files_of_model(name: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let folder: ModelFolder = setup::model_folder(&name.to_string_lossy())?;
    let read = |source| TrainError::Read { path: folder.path().display().to_string(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder.path()).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() && !name.starts_with('.') && !NOT_OF_THE_MODEL.contains(&name.as_ref()) {
            files.push(path.clone());
        }
    }
    // sentence-transformers has the pooling in a folder of its own. Modules that cannot be read are refused by who uses them.
    if SentenceConfig::is_there(folder.path())
        && let Ok(modules) = SentenceConfig::read(folder.path())
    {
        files.push(folder.path().join(modules.pooling_folder).join("config.json"));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pooling_of_sentence_transformers_belongs_to_the_model() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/sentence/cls");
        let files = files_of_model(&folder).unwrap();
        for name in ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"] {
            assert!(files.iter().any(|file| file.ends_with(name)), "{name} is not among {files:?}");
        }
    }
}
