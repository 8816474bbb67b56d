//! The stages of a loop, in their order, and what each of them rests on.

use std::fmt;

/// What a stage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// The retriever as it is before any training, or (of [`Part::Bm25`]) nothing.
    Initial,
    /// Passages for the questions: training and held-out ones.
    Search,
    /// A reader, trained on them.
    Reader,
    /// The reader's cross-attention scores of the passages.
    Scores,
    /// A retriever, distilled from the scores.
    Retriever,
    /// Vectors of all passages.
    Vectors,
    /// An index: of the vectors, or of words.
    Index,
    /// What the retriever finds for the held-out questions, and what the reader makes of it.
    Measure,
}

impl Step {
    /// The stage's folder.
    pub fn name(self) -> &'static str {
        match self {
            Step::Initial | Step::Retriever => "retriever",
            Step::Search => "search",
            Step::Reader => "reader",
            Step::Scores => "scores",
            Step::Vectors => "vectors",
            Step::Index => "index",
            Step::Measure => "measure",
        }
    }
}

/// What a stage belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The search of words, for the first passages.
    Bm25,
    /// The retriever before any training, to compare with.
    Untrained,
    /// A round, from 1.
    Round(u32),
}

/// A stage: a folder of the loop's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stage {
    /// What it belongs to.
    pub part: Part,
    /// What it does.
    pub step: Step,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            Part::Bm25 => write!(f, "bm25/{}", self.step.name()),
            Part::Untrained => write!(f, "untrained/{}", self.step.name()),
            Part::Round(n) => write!(f, "round-{n}/{}", self.step.name()),
        }
    }
}

impl Stage {
    /// The stage of a round.
    pub fn of(round: u32, step: Step) -> Stage {
        Stage { part: Part::Round(round), step }
    }
    /// The index of words.
    pub const BM25: Stage = Stage { part: Part::Bm25, step: Step::Index };
    /// The retriever before any training.
    pub const INITIAL: Stage = Stage { part: Part::Untrained, step: Step::Initial };

    /// The stage of the same part.
    pub fn sibling(self, step: Step) -> Stage {
        let step = if self.part == Part::Untrained && step == Step::Retriever { Step::Initial } else { step };
        Stage { step, ..self }
    }

    /// The round whose reader and passages it uses: the first one's for what comes before all rounds.
    pub fn round(self) -> u32 {
        match self.part {
            Part::Round(n) => n,
            Part::Bm25 | Part::Untrained => 1,
        }
    }

    /// The stages whose results it reads. `hybrid`: rounds after the first ask the words' index too; `reader_goes_on` and
    /// `retriever_goes_on`: they start from those of the round before.
    pub fn needs(self, shape: Shape) -> Vec<Stage> {
        let own = |step| self.sibling(step);
        let before = |step| Stage::of(self.round() - 1, step);
        let first = self.round() == 1;
        match (self.part, self.step) {
            (Part::Bm25, _) => vec![],
            (_, Step::Search) if first => vec![Stage::BM25],
            (_, Step::Search) => {
                let mut needs = vec![before(Step::Index), before(Step::Retriever)];
                needs.extend(shape.hybrid.then_some(Stage::BM25));
                needs
            }
            (_, Step::Reader) => {
                let mut needs = vec![own(Step::Search)];
                needs.extend((shape.reader_goes_on && !first).then(|| before(Step::Reader)));
                needs
            }
            (_, Step::Scores) => vec![own(Step::Search), own(Step::Reader)],
            // Its settings take a file of examples, which tells nothing of the model.
            (_, Step::Initial) => vec![Stage::of(1, Step::Scores)],
            (_, Step::Retriever) => {
                let start = match shape.retriever_goes_on && !first {
                    true => before(Step::Retriever),
                    false => Stage::INITIAL,
                };
                vec![own(Step::Scores), start]
            }
            (_, Step::Vectors) => vec![own(Step::Retriever)],
            (_, Step::Index) => vec![own(Step::Vectors)],
            (_, Step::Measure) => {
                let mut needs =
                    vec![own(Step::Index), own(Step::Retriever), Stage::of(self.round(), Step::Reader)];
                needs.extend(shape.hybrid.then_some(Stage::BM25));
                needs
            }
        }
    }
}

/// What decides which stages need which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rounds.
    pub rounds: u32,
    /// Whether what words find and what vectors find are put together after the first round.
    pub hybrid: bool,
    /// Whether a round's reader starts from the one before.
    pub reader_goes_on: bool,
    /// Whether a round's retriever starts from the one before.
    pub retriever_goes_on: bool,
}

/// All stages, each after those that it needs.
pub fn stages(shape: Shape) -> Vec<Stage> {
    use Step::{Index, Initial, Measure, Reader, Retriever, Scores, Search, Vectors};
    let mut all = vec![Stage::BM25];
    for round in 1..=shape.rounds {
        all.extend([Search, Reader, Scores].map(|step| Stage::of(round, step)));
        if round == 1 {
            all.extend([Initial, Vectors, Index, Measure].map(|step| Stage { part: Part::Untrained, step }));
        }
        all.extend([Retriever, Vectors, Index, Measure].map(|step| Stage::of(round, step)));
    }
    all
}

/// The stage of a name, as [`Stage`] shows itself.
///
/// # Errors
/// There is none of this name; says which there are.
pub fn named(name: &str, shape: Shape) -> Result<Stage, String> {
    let all = stages(shape);
    all.iter().find(|stage| stage.to_string() == name).copied().ok_or_else(|| {
        let names: Vec<String> = all.iter().map(Stage::to_string).collect();
        format!("{name}: there is no such stage; expected one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_comes_after_what_it_needs() {
        for bits in 0..8 {
            let shape = Shape {
                rounds: 3,
                hybrid: bits & 1 > 0,
                reader_goes_on: bits & 2 > 0,
                retriever_goes_on: bits & 4 > 0,
            };
            let all = stages(shape);
            assert_eq!(all.len(), 1 + 4 + 3 * 7);
            let mut names: Vec<String> = all.iter().map(Stage::to_string).collect();
            for (i, stage) in all.iter().enumerate() {
                assert_eq!(named(&names[i], shape).unwrap(), *stage);
                for need in stage.needs(shape) {
                    assert!(all[..i].contains(&need), "{stage} needs {need}");
                }
            }
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all.len(), "every stage has a folder of its own");
        }
    }

    #[test]
    fn stages_by_name() {
        let shape = Shape { rounds: 1, hybrid: false, reader_goes_on: false, retriever_goes_on: true };
        let error = named("round-2/search", shape).unwrap_err();
        assert!(error.contains("no such stage; expected one of bm25/index, round-1/search, "), "{error}");
    }
}
