//! A folder with a collection, for tests of `tercio index` and `tercio search` as processes.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tercio_data::Vectors;

use crate::support::{finish, golden, stderr, tercio};

/// A folder with a collection, questions, and whatever comes of them.
pub struct Place {
    pub root: tempfile::TempDir,
}

/// A passage's words: one of its own, one of ten others, and one that all have.
fn passage(i: usize) -> String {
    format!("{i}\tthe word w{i} beside group{} and \"quotes\"\ttitle{}\n", i % 10, i % 7)
}

impl Place {
    /// With a collection of so many passages.
    pub fn new(passages: usize) -> Place {
        let place = Place { root: tempfile::tempdir().unwrap() };
        place.collection(passages);
        place
    }
    pub fn collection(&self, passages: usize) {
        self.write(
            "passages.tsv",
            &("id\ttext\ttitle\n".to_owned() + &(0..passages).map(passage).collect::<String>()),
        );
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
    pub fn write(&self, name: &str, content: &str) -> String {
        std::fs::write(self.path(name), content).unwrap();
        self.text(name)
    }
    pub fn index(&self, output: &str, flags: &[&str]) -> Command {
        let mut command = tercio(&["index", "--threads", "2", "--quiet"]);
        command.args(["--passages", &self.text("passages.tsv"), "--output", &self.text(output)]).args(flags);
        command
    }
    pub fn search(&self, flags: &[&str]) -> Command {
        let mut command = tercio(&["search", "--threads", "1", "--index", &self.text("index")]);
        command.args(flags);
        command
    }
    /// Questions about single passages, and about none.
    pub fn questions(&self, count: usize) -> String {
        let line = |i: usize| match i % 50 {
            7 => json!({"id": format!("q{i}"), "question": "nothing of this", "answers": ["x"]}),
            _ => json!({"id": format!("q{i}"), "question": format!("which W{} of group{}?", i % 40, i % 10),
                        "answers": [format!("W{}", i % 40)], "more": i}),
        };
        self.write("questions.jsonl", &(0..count).map(|i| line(i).to_string() + "\n").collect::<String>())
    }
    /// Embeds with the stored retriever.
    pub fn embed(&self, output: &str, flags: &[&str]) {
        let (model, output) = (self.model(), self.text(output));
        let base = ["embed", "--threads", "2", "--model_path", &model, "--output", &output];
        succeed(tercio(&base).args(flags));
    }
    pub fn model(&self) -> String {
        golden().join("fid_retriever/model").to_str().unwrap().to_owned()
    }
    /// The scores of every question of `questions` with every passage of `passages`, folders of vectors, in f64.
    pub fn products(&self, questions: &str, passages: &str) -> Vec<Vec<f64>> {
        let rows = |name: &str| -> Vec<Vec<f32>> {
            let vectors = Vectors::open(&self.path(name)).unwrap();
            let mut all = Vec::new();
            for n in 0..vectors.shards() {
                let shard = vectors.shard(n).unwrap();
                let mut part = vec![0.0; shard.len() * vectors.dimension()];
                shard.rows(0, &mut part).unwrap();
                all.extend(part.chunks(vectors.dimension()).map(<[f32]>::to_vec));
            }
            all
        };
        let passages = rows(passages);
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        rows(questions).iter().map(|q| passages.iter().map(|p| dot(q, p)).collect()).collect()
    }
    pub fn json(&self, name: &str) -> Vec<Value> {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }
}

pub fn run(command: &mut Command) -> Output {
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

pub fn succeed(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}
