//! Where the data and models that Fusion-in-Decoder's users bring are published: its own addresses, or a mirror's.

use super::Source;

/// Models that Fusion-in-Decoder's authors released, each `NAME.tar.gz`.
pub const MODELS: [&str; 6] = [
    "nq_reader_base",
    "nq_reader_large",
    "nq_retriever",
    "tqa_reader_base",
    "tqa_reader_large",
    "tqa_retriever",
];
const MODEL_BASE: &str = "https://dl.fbaipublicfiles.com/FiD/pretrained_models";
const FID_DATA: &str = "https://dl.fbaipublicfiles.com/FiD/data";
const PASSAGES: &str = "https://dl.fbaipublicfiles.com/dpr/wikipedia_split";
const NQ_OPEN: &str =
    "https://raw.githubusercontent.com/google-research-datasets/natural-questions/master/nq_open";
const TRIVIAQA: &str = "https://nlp.cs.washington.edu/triviaqa/data";

/// A set of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSet {
    /// NQ-open, with the rows and passages that Fusion-in-Decoder's authors chose.
    Nq,
    /// TriviaQA (unfiltered), likewise.
    TriviaQa,
    /// The 21 million passages of Wikipedia (December 2018) that both are answered from.
    WikipediaPassages,
}

/// The files of a set. With a mirror, which holds them all in one folder, its addresses are `MIRROR/FILE`.
pub fn data_set(set: DataSet, mirror: Option<&str>) -> Vec<Source> {
    let files: &[(&str, &str)] = match set {
        DataSet::Nq => &[
            (NQ_OPEN, "NQ-open.train.jsonl"),
            (NQ_OPEN, "NQ-open.dev.jsonl"),
            (FID_DATA, "dataindex.tar.gz"),
            (FID_DATA, "nq_passages.tar.gz"),
        ],
        DataSet::TriviaQa => &[
            (TRIVIAQA, "triviaqa-unfiltered.tar.gz"),
            (FID_DATA, "dataindex.tar.gz"),
            (FID_DATA, "tqa_passages.tar.gz"),
        ],
        DataSet::WikipediaPassages => &[(PASSAGES, "psgs_w100.tsv.gz")],
    };
    files.iter().map(|(base, name)| source(mirror.unwrap_or(base), name)).collect()
}

/// A released model; `None` where there is none of this name.
pub fn model(name: &str, mirror: Option<&str>) -> Option<Source> {
    let base = mirror.unwrap_or(MODEL_BASE);
    MODELS.contains(&name).then(|| source(base, &format!("{name}.tar.gz")))
}

fn source(base: &str, name: &str) -> Source {
    Source { url: format!("{}/{name}", base.trim_end_matches('/')), name: name.to_owned(), sha256: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_takes_the_place_of_all_addresses() {
        let urls = |set, mirror| data_set(set, mirror).into_iter().map(|s| s.url).collect::<Vec<_>>();
        assert!(urls(DataSet::Nq, None).iter().all(|url| url.starts_with("https://")));
        assert_eq!(urls(DataSet::WikipediaPassages, Some("http://a/b/")), ["http://a/b/psgs_w100.tsv.gz"]);
        assert_eq!(urls(DataSet::TriviaQa, Some("http://a")).len(), 3);
        let url = "https://dl.fbaipublicfiles.com/FiD/pretrained_models/nq_retriever.tar.gz";
        assert_eq!(model("nq_retriever", None).unwrap().url, url);
        assert_eq!(model("nq_retriever", Some("http://a")).unwrap().url, "http://a/nq_retriever.tar.gz");
        assert_eq!(model("../x", None), None);
    }
}
