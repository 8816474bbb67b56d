//! Tokenizers of the BERT families against ids that Hugging Face's gave (tools/make_tokenizer_cases.py), from `tokenizer.json` and
//! from vocabulary files alone; and files that are cut off, wrong or hostile.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use tercio_data::Tokenizer;

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
    let mut cases: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    cases
}

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(name)
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// Compares all stored values of a case.
fn compare(tokenizer: &Tokenizer, case: &Path) {
    let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
    let id = |key: &str| expected[key].as_u64().map(|id| id as u32);
    assert_eq!(tokenizer.vocab_size() as u64, expected["size"].as_u64().unwrap(), "{case:?}");
    let found = (Some(tokenizer.pad_id()), tokenizer.cls_id(), tokenizer.sep_id());
    assert_eq!(found, (id("pad"), id("cls"), id("sep")), "{case:?}");
    assert_eq!((tokenizer.unk_id(), tokenizer.mask_id()), (id("unk"), id("mask")), "{case:?}");
    assert_eq!(Some(tokenizer.eos_id()), id("sep"), "{case:?}");
    let cases = expected["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for stored in cases {
        let text = stored["text"].as_str().unwrap();
        let whole = ids(&stored["ids"]);
        assert_eq!(tokenizer.encode_framed(text, 10_000).unwrap(), whole, "{case:?}: {text:?}");
        assert_eq!(tokenizer.encode_framed(text, 7).unwrap(), ids(&stored["cut"]), "{case:?}: {text:?}");
        assert_eq!(tokenizer.encode(text).unwrap(), whole[1..whole.len() - 1], "{case:?}: {text:?}");
        tokenizer.decode(&whole).unwrap();
    }
    assert_eq!(tokenizer.encode_framed("lighthouse", 2).unwrap().len(), 2, "{case:?}");
    let error = tokenizer.encode_framed("lighthouse", 1).unwrap_err().to_string();
    assert!(error.contains("at least 2 tokens") && error.contains("found 1"), "{error}");
}

#[test]
fn ids_are_those_of_hugging_face() {
    let cases = cases();
    assert_eq!(cases.len(), 13, "{cases:?}");
    for case in cases {
        let tokenizer = Tokenizer::load(&case).unwrap();
        compare(&tokenizer, &case);
        // what goes into a saved model is the same tokenizer again, also from its tokenizer.json alone
        let saved = tempfile::tempdir().unwrap();
        tokenizer.copy_to(saved.path()).unwrap();
        compare(&Tokenizer::load(saved.path()).unwrap(), &case);
        for file in fs::read_dir(saved.path()).unwrap().map(|e| e.unwrap().path()) {
            if file.file_name().unwrap() != "tokenizer.json" {
                fs::remove_file(file).unwrap();
            }
        }
        compare(&Tokenizer::load(saved.path()).unwrap(), &case);
    }
}

#[test]
fn the_longest_text_is_told_where_it_is_known() {
    let longest = |name: &str| Tokenizer::load(&case(name)).unwrap().max_length();
    assert_eq!(longest("bert_cased"), Some(512));
    assert_eq!(longest("modernbert_json"), Some(8192));
    assert_eq!((longest("bert_uncased"), longest("bert_uncased_json")), (None, None));
}

fn load(files: &[(&str, &[u8])]) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    Tokenizer::load(dir.path()).map_err(|e| e.to_string())
}

#[test]
fn damaged_word_pieces_are_errors() {
    let vocab = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n##re\n";
    let small = load(&[("vocab.txt", vocab)]).unwrap();
    assert_eq!(small.encode_framed("The there zzz", 9).unwrap(), [2, 4, 4, 5, 1, 3]);
    assert_eq!((small.mask_id(), small.vocab_size()), (None, 6));
    // Windows' line ends, no end of the last line, a piece that is there twice
    let odd = load(&[("vocab.txt", b"[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\nthe\r\nthe")]).unwrap();
    assert_eq!(odd.encode("the").unwrap(), [5]);
    let long = [&vocab[..], &[b'x'; 5000]].concat();
    for (bytes, part) in [
        (&b""[..], "\"[PAD]\""),
        (b"[PAD]\n[UNK]\n[CLS]\nthe\n", "\"[SEP]\" (sep_token)"),
        (b"[PAD]\n[UNK]\n\xff\n", "line 3: expected UTF-8"),
        (&long, "line 7: expected a piece of at most 4096 bytes, found 5000"),
    ] {
        let error = load(&[("vocab.txt", bytes)]).unwrap_err();
        assert!(error.contains("vocab.txt") && error.contains(part), "{part}: {error}");
    }
    for (config, part) in [
        (json!({"tokenizer_class": "BertweetTokenizer"}), "BertweetTokenizer"),
        (json!({"do_lower_case": "no"}), "`do_lower_case`, found \"no\""),
        (json!({"do_basic_tokenize": false}), "do_basic_tokenize"),
        (json!({"cls_token": "<s>"}), "\"<s>\" (cls_token)"),
    ] {
        let error = load(&[("vocab.txt", vocab), ("tokenizer_config.json", config.to_string().as_bytes())])
            .unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    let config = [("vocab.txt", &vocab[..]), ("special_tokens_map.json", b"{")];
    assert!(load(&config).unwrap_err().contains("special_tokens_map.json: expected JSON"));
}

#[test]
fn damaged_byte_pairs_are_errors() {
    let vocab = br#"{"<s>":0,"<pad>":1,"</s>":2,"<unk>":3,"a":4,"b":5,"ab":6}"#;
    let small = load(&[("vocab.json", vocab), ("merges.txt", b"#version: 0.2\na b\n")]).unwrap();
    assert_eq!(small.encode_framed("ab", 9).unwrap(), [0, 6, 2]);
    for (vocab, merges, part) in [
        (&vocab[..], &b"a b\nab\n"[..], "merges.txt, line 2"),
        (vocab, b"a b c\n", "merges.txt, line 1"),
        (vocab, b"a \xff\n", "merges.txt: expected UTF-8"),
        (vocab, b"a c\n", "merges of pieces"),
        (vocab, b"b a\n", "merges of pieces"),
        (b"[]", b"", "expected an object"),
        (br#"{"a": -1}"#, b"", "expected an object"),
        (br#"{"<s>":0,"</s>":2,"a":1}"#, b"", "\"<pad>\" (pad_token)"),
        (br#"{"<s>":0,"<pad>":1,"</s>":2,"a":4000000000}"#, b"", "expected ids below"),
    ] {
        let error = load(&[("vocab.json", vocab), ("merges.txt", merges)]).unwrap_err();
        assert!(error.contains("vocab.json") && error.contains(part), "{part}: {error}");
    }
    assert!(load(&[("vocab.json", vocab)]).unwrap_err().contains("expected merges.txt beside it"));
}

#[test]
fn damaged_pieces_of_xlm_roberta_are_errors() {
    let whole = fs::read(case("xlm_roberta").join("sentencepiece.bpe.model")).unwrap();
    let file = "sentencepiece.bpe.model";
    for (bytes, config, part) in [
        (&whole[..], r#"{"tokenizer_class": "CamembertTokenizer"}"#, "CamembertTokenizer"),
        (&whole[..whole.len() / 2], "{}", "bad data"),
        (b"", "{}", "unknown piece"),
        // the first piece, <unk>, left out: its field has 2 bytes of head
        (&whole[2 + usize::from(whole[1])..], "{}", "as the first pieces"),
    ] {
        let error = load(&[(file, bytes), ("tokenizer_config.json", config.as_bytes())]).unwrap_err();
        assert!(error.contains(file) && error.contains(part), "{part}: {error}");
    }
}

#[test]
fn hostile_pipelines_of_encoders_are_errors() {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(case(name).join("tokenizer.json")).unwrap()).unwrap()
    };
    let with = |name: &str, pointer: &str, value: Value| {
        let mut json = read(name);
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[key] = value;
        load(&[("tokenizer.json", json.to_string().as_bytes())])
    };
    for (result, part) in [
        (
            with("bert_cased_json", "/model/max_input_chars_per_word", 1_000_000.into()),
            "max_input_chars_per_word",
        ),
        (with("roberta_json", "/model/dropout", 0.1.into()), "no `dropout`"),
        (with("bert_cased_json", "/model/unk_token", "[NONE]".into()), "\"[NONE]\""),
        (with("roberta_json", "/model/merges", json!([["a", "zzzz"]])), "found an error"),
        (
            with(
                "bert_cased_json",
                "/post_processor/single",
                json!([{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]),
            ),
            "post_processor",
        ),
    ] {
        let error = result.unwrap_err();
        assert!(error.contains("tokenizer.json") && error.contains(part), "{part}: {error}");
    }
    // no step that adds special tokens: the folder's own names do
    let mut json = read("bert_cased_json");
    json["post_processor"] = Value::Null;
    let names = json!({"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}}).to_string();
    let files = [("tokenizer.json", json.to_string()), ("special_tokens_map.json", names)];
    let tokenizer = load(&files.each_ref().map(|(name, text)| (*name, text.as_bytes()))).unwrap();
    compare(&tokenizer, &case("bert_cased_json"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_text_is_framed_and_never_too_long(
        text in "\\PC{0,60}|[ \t\r\n\u{1}\u{ad}\u{200b}\u{301}\u{fffd}a-cﬁ½<>\\[\\]/sCLS]{0,40}", most in 2..30usize,
    ) {
        static TOKENIZERS: LazyLock<Vec<Tokenizer>> =
            LazyLock::new(|| cases().iter().map(|case| Tokenizer::load(case).unwrap()).collect());
        for tokenizer in &*TOKENIZERS {
            let ids = tokenizer.encode_framed(&text, most).unwrap();
            prop_assert!(ids.len() <= most && ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            prop_assert_eq!((ids.first().copied(), ids.last().copied()), (tokenizer.cls_id(), tokenizer.sep_id()));
            let whole = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(ids.len(), most.min(whole.len() + 2));
            prop_assert_eq!(&ids[1..ids.len() - 1], &whole[..ids.len() - 2]);
            tokenizer.decode(&whole).unwrap();
        }
    }
}
