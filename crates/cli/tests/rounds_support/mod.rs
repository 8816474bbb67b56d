//! A small loop: its stages, its settings, its collection, and what it comes to.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::golden;

/// Stages of a loop of two rounds, in order.
pub const STAGES: [&str; 19] = [
    "bm25/index",
    "round-1/search",
    "round-1/reader",
    "round-1/scores",
    "untrained/retriever",
    "untrained/vectors",
    "untrained/index",
    "untrained/measure",
    "round-1/retriever",
    "round-1/vectors",
    "round-1/index",
    "round-1/measure",
    "round-2/search",
    "round-2/reader",
    "round-2/scores",
    "round-2/retriever",
    "round-2/vectors",
    "round-2/index",
    "round-2/measure",
];

/// The settings of a small loop; paths are relative to the folder.
pub fn settings() -> String {
    let model = |name: &str| golden().join(name).join("model").to_str().unwrap().to_owned();
    format!(
        "passages = \"passages.tsv\"\ntrain_data = \"train.jsonl\"\neval_data = \"eval.jsonl\"\nrounds = 2\nseed = 3\n\
         threads = 1\noutput = \"loop\"\n\n\
         [search]\nn_docs = 6\n\n\
         [reader]\nmodel_path = \"{}\"\nn_context = 3\ntext_maxlength = 64\ngeneration_max_length = 8\nlr = 1e-3\ndropout = 0.1\n\
         global_batch_size = 8\nmicro_batch_size = 1\ntotal_steps = 4\nsave_freq = 2\neval_freq = 2\nlog_freq = 1\n\n\
         [scores]\nn_context = 4\nper_gpu_batch_size = 2\n\n\
         [retriever]\nmodel_path = \"{}\"\nn_context = 3\nquestion_maxlength = 24\npassage_maxlength = 48\nlr = 2e-3\n\
         global_batch_size = 8\nmicro_batch_size = 1\ntotal_steps = 4\nsave_freq = 2\neval_freq = 2\nlog_freq = 1\n\n\
         [embed]\npassages_per_shard = 16\nwindow = 4\n",
        model("fid_reader_t5v10"),
        model("fid_retriever")
    )
}

/// Passages of the stored case, no two alike.
pub fn collection() -> String {
    let text = std::fs::read_to_string(golden().join("fid_retriever/input.json")).unwrap();
    let stored: Value = serde_json::from_str(&text).unwrap();
    let all: Vec<&Value> =
        stored["questions"].as_array().unwrap().iter().flat_map(|q| q["ctxs"].as_array().unwrap()).collect();
    let row = |i: usize| {
        let passage = all[i % all.len()];
        let text: String =
            passage["text"].as_str().unwrap().split_inclusive(' ').skip(i / all.len()).collect();
        format!("p{i}\t\"{} {i}\"\t\"{}\"\n", text.replace('"', "\"\""), passage["title"].as_str().unwrap())
    };
    "id\ttext\ttitle\n".to_owned() + &(0..40).map(row).collect::<String>()
}

/// Results and figures of all stages.
pub fn results(folder: &Path) -> BTreeMap<&'static str, Value> {
    let read = |stage: &&'static str| {
        let text =
            std::fs::read(folder.join(format!("{stage}.json"))).unwrap_or_else(|e| panic!("{stage}: {e}"));
        let state: Value = serde_json::from_slice(&text).unwrap();
        // What an index's manifest says of files holds names of folders.
        let mut results = state["results"].clone();
        if stage.ends_with("/index") {
            results.as_object_mut().unwrap().retain(|name, _| name != "manifest.json");
        }
        (*stage, json!({"results": results, "figures": figures_of(stage, &state["figures"])}))
    };
    STAGES.iter().map(read).collect()
}

/// Figures that are functions of the settings; sizes of indexes have names of folders in them.
fn figures_of(stage: &str, figures: &Value) -> Value {
    if stage.ends_with("/index") { Value::Null } else { figures.clone() }
}
