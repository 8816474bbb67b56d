//! `tercio quickstart --loop`: the loop on the same questions, without being told which passage is whose. All passages of the data are
//! one collection; the reader is the quickstart's, the retriever starts from random values.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_comm::World;
use tercio_data::Questions;
use tercio_train::TrainError;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::rounds::settings::LoopSettings;
use tercio_train::rounds::{self, LoopOutcome, Table, Which};
use tercio_train::run::{Signals, write_atomic};

/// How large a loop is.
#[derive(Clone, Copy)]
pub struct Size {
    /// Training questions, spread over the file.
    pub questions: usize,
    /// Whether the passages of the others are in the collection, too.
    pub all_passages: bool,
    /// Updates of each round's reader.
    pub reader: u64,
    /// Updates of each round's retriever.
    pub retriever: u64,
}

/// The loop of a quickstart.
pub struct QuickLoop<'a> {
    /// Its folder.
    pub dir: &'a Path,
    /// The questions: training and held-out ones.
    pub train: &'a Questions,
    /// See `train`.
    pub eval: &'a Questions,
    /// Folder with the tokenizer's files.
    pub tokenizer: &'a Path,
    /// The reader to start from.
    pub reader: &'a Path,
    /// The seed.
    pub seed: u64,
    /// Threads; 0: all.
    pub threads: usize,
    /// How products are computed.
    pub precision: &'static str,
    /// How large it is.
    pub size: Size,
}

impl QuickLoop<'_> {
    /// Where its settings are.
    pub fn config(&self) -> PathBuf {
        self.dir.join("loop.toml")
    }

    /// Writes the collection, questions and settings.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn prepare(&self) -> anyhow::Result<()> {
        let retriever = self.dir.join("retriever");
        std::fs::create_dir_all(&retriever)?;
        let mut passages: BTreeMap<String, Value> = BTreeMap::new();
        let mut collect = |questions: &Questions, i: usize| -> anyhow::Result<()> {
            for passage in questions.get(i)?.ctxs {
                let item = json!({"id": passage.id, "title": passage.title, "text": passage.text});
                passages.insert(passage.id, item);
            }
            Ok(())
        };
        for (name, questions, most) in
            [("train", self.train, self.size.questions), ("dev", self.eval, self.eval.len())]
        {
            let count = most.min(questions.len());
            let mut lines = String::new();
            for i in 0..count {
                let row = i * questions.len() / count;
                collect(questions, row)?;
                let mut item: Map<String, Value> = questions.get_raw(row)?;
                item.remove("ctxs");
                lines += &(Value::Object(item).to_string() + "\n");
            }
            keep(&self.dir.join(format!("{name}.jsonl")), &lines)?;
        }
        if self.size.all_passages {
            (0..self.train.len()).try_for_each(|i| collect(self.train, i))?;
        }
        let lines: Vec<String> = passages.values().map(|passage| format!("{passage}\n")).collect();
        keep(&self.dir.join("passages.jsonl"), &lines.concat())?;
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            keep(&retriever.join(name), &std::fs::read_to_string(self.tokenizer.join(name))?)?;
        }
        keep(&retriever.join("config.json"), RETRIEVER)?;
        keep(&self.config(), &self.settings())
    }

    fn settings(&self) -> String {
        let text = |path: &Path| Value::from(path.to_string_lossy().into_owned()).to_string();
        let own = |name: &str| text(&self.dir.join(name));
        let QuickLoop { seed, threads, precision, size: Size { reader, retriever, .. }, .. } = self;
        format!(
            "# Written by `tercio quickstart --loop`; `tercio loop --config` with this file does the same.\n\
             passages = {}\ntrain_data = {}\neval_data = {}\noutput = {}\nrounds = 2\nseed = {seed}\nthreads = {threads}\n\
             precision = \"{precision}\"\n\n\
             [search]\nn_docs = 100\nhybrid = true\nhybrid_method = \"weighted\"\nwords_weight = 4.0\n\n\
             # This small reader confuses places: it answers best from the first passage alone.\n\
             [reader]\nmodel_path = {}\nn_context = 3\neval_n_context = 1\ntext_maxlength = 128\ngeneration_max_length = 24\n\
             global_batch_size = 32\nmicro_batch_size = 32\noptim = \"adamw\"\nweight_decay = 0.01\nscheduler = \"linear\"\n\
             lr = 5e-4\nwarmup_steps = 20\ntotal_steps = {reader}\neval_freq = {reader}\nsave_freq = 100\nlog_freq = 20\n\
             keep_last = 1\n\n\
             [scores]\nn_context = 8\nper_gpu_batch_size = 32\n\n\
             [retriever]\ninit = \"random\"\nmodel_config = {}\nno_projection = true\nquestion_maxlength = 64\n\
             passage_maxlength = 96\nquestion_template = \"{{question}}\"\npassage_template = \"{{title}} {{text}}\"\n\
             n_context = 8\nloss = \"both\"\nhard_negatives = 3\nkl_mean = \"batch\"\ntemperature = 0.1\n\
             global_batch_size = 64\nmicro_batch_size = 64\noptim = \"adamw\"\nweight_decay = 0.01\nscheduler = \"linear\"\n\
             lr = 2e-3\nwarmup_steps = 30\ntotal_steps = {retriever}\neval_freq = {retriever}\nsave_freq = 100\nlog_freq = 20\n\
             keep_last = 1\n\n\
             [embed]\nbatch_tokens = 8192\n",
            own("passages.jsonl"),
            own("train.jsonl"),
            own("dev.jsonl"),
            own("rounds"),
            text(self.reader),
            own("retriever/config.json"),
        )
    }

    /// Runs it, or goes on with it.
    ///
    /// # Errors
    /// As [`rounds::run_among`].
    pub fn run(&self, signals: &Signals, progress: bool) -> Result<(LoopOutcome, Table), TrainError> {
        let settings = LoopSettings::read(&self.config())?;
        let link: LinkOptions = settings.reader.run.ranks.link.clone();
        let outcome =
            rounds::run_among(&World::alone(), &settings, Which::default(), &link, signals, progress)?;
        Ok((outcome, rounds::table(&settings)?))
    }
}

/// Writes a file unless it holds this already: what was made of it stays up to date.
fn keep(path: &Path, content: &str) -> anyhow::Result<()> {
    if std::fs::read(path).ok().as_deref() != Some(content.as_bytes()) {
        write_atomic(path, content.as_bytes())?;
    }
    Ok(())
}

/// A BERT of one layer for the quickstart's vocabulary.
const RETRIEVER: &str = r#"{
  "model_type": "bert",
  "vocab_size": 1995,
  "hidden_size": 128,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "intermediate_size": 256,
  "hidden_act": "gelu",
  "hidden_dropout_prob": 0.0,
  "attention_probs_dropout_prob": 0.0,
  "max_position_embeddings": 256,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
  "pad_token_id": 0
}
"#;
