//! Tokenizer files that are small, odd or hostile, and how ragged questions are encoded with a small one.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::fs;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use tercio_data::{DataError, PackedReaderBatch, Place, Question, ReaderEncoding, Tokenizer, check, draw};

const ENCODING: ReaderEncoding = ReaderEncoding {
    text_maxlength: 12,
    answer_maxlength: None,
    n_context: 2,
    no_title: false,
    passage_eos: false,
};

/// A unigram tokenizer of a few pieces, written as a tokenizer.json that also asks for wild padding.
fn tokenizer_json() -> Value {
    let mut vocab =
        vec![("<pad>".to_string(), 0.0), ("</s>".into(), 0.0), ("<unk>".into(), 0.0), ("▁".into(), -2.0)];
    vocab.extend(('a'..='z').chain([':', '?']).map(|c| (c.to_string(), -4.0)));
    vocab.extend(["▁question", "▁title", "▁context"].map(|w| (w.to_string(), -3.0)));
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 1_000_000_000_000u64}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
        "added_tokens": [special(0, "<pad>"), special(1, "</s>"), special(2, "<unk>")],
        "normalizer": null, "pre_tokenizer": space, "post_processor": null, "decoder": space,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": false}
    })
}

fn load(json: &Value) -> Result<Tokenizer, DataError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::load(dir.path())
}

fn question(text: &str) -> Question {
    Question::from_json(text.as_bytes(), &Place::new("q.jsonl".as_ref(), 3, 4)).unwrap()
}

#[test]
fn ragged_items_are_encoded_and_packed() {
    let tokenizer = load(&tokenizer_json()).unwrap();
    let many = question(
        "{\"question\": \"a\", \"target\": \"b\", \"ctxs\": [{\"text\": \"x\"}, {\"text\": \"y\"}, {\"text\": \"z\"}]}",
    );
    let none = question("{\"question\": \"a\", \"ctxs\": []}");
    let with_eos =
        ReaderEncoding { passage_eos: true, text_maxlength: 4, answer_maxlength: Some(1), ..ENCODING };
    let example = with_eos.encode_for_training(&many, &tokenizer, 0, 0).unwrap();
    assert_eq!((example.passages.len(), example.target.len()), (2, 1));
    assert!(example.passages.iter().all(|p| p.len() == 4 && p[3] == tokenizer.eos_id()));
    let bare = ENCODING.encode_for_answering(&none, &tokenizer).unwrap();
    assert_eq!(bare.passages, [tokenizer.encode("question: a").unwrap()]);
    let batch = PackedReaderBatch::new(&[example, bare]).unwrap();
    assert_eq!(batch.question_sequences, [0, 2, 3]);
    let error = ENCODING.encode_for_training(&none, &tokenizer, 0, 0).unwrap_err().to_string();
    assert!(error.contains("q.jsonl, line 4") && error.contains("add an answer"), "{error}");
    let zero = ReaderEncoding { text_maxlength: 0, ..ENCODING };
    assert!(zero.encode_question(&many, &tokenizer).unwrap_err().to_string().contains("--text_maxlength"));
}

#[test]
fn check_measures_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("q.jsonl");
    let item = "{\"question\": \"a\", \"answers\": [\"b\", \"c\"], \"ctxs\": [{\"title\": \"t\", \"text\": \"abcdef\"}, {\"text\": \"\"}]}";
    fs::write(&path, format!("{item}\n{{\"question\": \"a\"}}\n")).unwrap();
    let tokenizer = load(&tokenizer_json()).unwrap();
    let report =
        check(&path, &dir.path().join("cache"), Some(&tokenizer), &ENCODING, &mut |e| panic!("{e}")).unwrap();
    let tokens = report.tokens.as_ref().unwrap();
    // "question: a title: t context: abcdef" has 4 + 4 + 2 + 7 tokens ("▁" and "a" are two pieces)
    let long = tokenizer.encode("question: a title: t context: abcdef").unwrap().len() as u64;
    let short = tokenizer.encode("question: a title:  context: ").unwrap().len() as u64;
    let bare = tokenizer.encode("question: a").unwrap().len() as u64;
    assert!(long > 12 && short <= 12 && bare < short);
    assert_eq!((tokens.passages.sequences, tokens.passages.max, tokens.tokens), (3, long, 12 + short + bare));
    assert!((tokens.passages.truncated_share - 1.0 / 3.0).abs() < 1e-12);
    assert!((tokens.padding_share - (1.0 - (12 + short + bare) as f64 / 36.0)).abs() < 1e-12);
    let targets = tokens.targets.unwrap();
    assert_eq!((targets.sequences, targets.max, targets.truncated_share), (2, 3, 0.0));
    assert!(report.to_string().contains("33.3 % are cut"), "{report}");
}

#[test]
fn padding_and_truncation_of_the_tokenizer_file_are_off() {
    let tokenizer = load(&tokenizer_json()).unwrap();
    let ids = tokenizer.encode("question: abc").unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "question: abc");
    assert_eq!(ids.len(), 6);
    assert_eq!(tokenizer.decode(&[0, ids[0], 1, 4_000_000_000]).unwrap(), "question");
}

#[test]
fn hostile_tokenizer_files_are_errors() {
    let charsmap = |map: &str| {
        let mut json = tokenizer_json();
        let step = json!({"type": "Precompiled", "precompiled_charsmap": map});
        json["normalizer"] = json!({"type": "Sequence", "normalizers": [step]});
        json
    };
    let with = |pointer: &str, value: Value| {
        let mut json = tokenizer_json();
        *json.pointer_mut(pointer).unwrap() = value;
        json
    };
    for (json, part) in [
        (charsmap("BAAAAP////8="), "character map"),
        (charsmap("AAAA"), "character map"),
        (charsmap("!!"), "base64"),
        (with("/model/vocab/5/0", "x".repeat(100_000).into()), "piece 5"),
        (with("/model/unk_id", 99_999.into()), "vocab"),
        (with("/model/vocab", json!([])), "vocab"),
        (with("/model/type", "Magic".into()), "found an error"),
        (json!([1, 2]), "found an error"),
    ] {
        let error = load(&json).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(part), "{part}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(Tokenizer::load(dir.path()).unwrap_err().to_string().contains("spiece.model"));
    fs::write(dir.path().join("tokenizer.json"), "[".repeat(1_000_000)).unwrap();
    assert!(Tokenizer::load(dir.path()).unwrap_err().to_string().contains("recursion limit"));
}

/// Bytes of a protobuf field with a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    assert!(bytes.len() < 128);
    [&[number << 3 | 2, bytes.len() as u8], bytes].concat()
}

fn piece(text: &str, score: f32) -> Vec<u8> {
    field(1, &[field(1, text.as_bytes()), vec![2 << 3 | 5], score.to_le_bytes().to_vec()].concat())
}

#[test]
fn a_small_spiece_model_works_and_damaged_ones_are_errors() {
    let trainer = |kind: u8, unk: u8| field(2, &[3 << 3, kind, 0xC0, 0x02, unk]);
    let special = [piece("<pad>", 0.0), piece("</s>", 0.0), piece("<unk>", 0.0)].concat();
    let pieces = [special, piece("▁", -2.0), piece("a", -1.0), piece("▁b", -1.0)].concat();
    let dir = tempfile::tempdir().unwrap();
    let load = |bytes: &[u8]| {
        fs::write(dir.path().join("spiece.model"), bytes).unwrap();
        Tokenizer::load(dir.path())
    };
    let whole = [pieces.clone(), trainer(1, 2)].concat();
    let tokenizer = load(&whole).unwrap();
    assert_eq!(tokenizer.encode("aa b  <extra_id_0>").unwrap(), [3, 4, 4, 5, 105]);
    assert_eq!(tokenizer.vocab_size(), 106);
    let wild_map = field(3, &field(2, &[4, 0, 0, 0, 255, 255, 255, 255]));
    for (bytes, part) in [
        (vec![], "unknown piece"),
        (b"not a model".to_vec(), "bad data"),
        (whole[..whole.len() - 3].to_vec(), "bad data"),
        ([pieces.clone(), trainer(2, 2)].concat(), "type 2"),
        ([pieces.clone(), trainer(1, 77)].concat(), "unknown piece"),
        ([pieces.clone(), piece("c", f32::NAN), trainer(1, 2)].concat(), "finite score"),
        ([pieces.clone(), piece("", 0.0), trainer(1, 2)].concat(), "piece 6"),
        ([pieces.clone(), trainer(1, 2), wild_map].concat(), "character map"),
    ] {
        let error = load(&bytes).unwrap_err().to_string();
        assert!(error.contains("spiece.model") && error.contains(part), "{part}: {error}");
    }
}

/// The bytes of a real spiece.model.
fn golden_spiece() -> Vec<u8> {
    let models = fs::read_dir(golden_folder::golden_folder())
        .unwrap()
        .map(|e| e.unwrap().path().join("model/spiece.model"));
    fs::read(models.filter(|p| p.exists()).min().expect("a spiece.model in a golden case")).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_text_gives_ids_and_text_again(text in "\\PC{0,40}|[ \t\u{1}\u{ad}\u{200b}\u{301}a-cｆﬁ½<>/s]{0,30}") {
        static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("spiece.model"), golden_spiece()).unwrap();
            Tokenizer::load(dir.path()).unwrap()
        });
        let ids = TOKENIZER.encode(&text).unwrap();
        prop_assert!(ids.iter().all(|&id| (id as usize) < TOKENIZER.vocab_size()));
        TOKENIZER.decode(&ids).unwrap();
    }
}

#[test]
fn flipped_bytes_of_a_spiece_model_never_stop_the_program() {
    let whole = golden_spiece();
    let dir = tempfile::tempdir().unwrap();
    let mut loaded = 0;
    for k in 0..24u64 {
        let mut bytes = whole.clone();
        for j in 0..4 {
            let at = draw::index(&[k, j], bytes.len()).unwrap();
            bytes[at] = draw::keyed(&[k, j, 1]) as u8;
        }
        fs::write(dir.path().join("spiece.model"), bytes).unwrap();
        if let Ok(tokenizer) = Tokenizer::load(dir.path()) {
            tokenizer.encode("Héllo naïve ﬁsh ½ x² \u{1}東京 \u{200b}a").unwrap();
            loaded += 1;
        }
    }
    assert!(loaded < 24, "some damage must be noticed");
}
