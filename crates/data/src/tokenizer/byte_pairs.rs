//! `vocab.json` and `merges.txt` as a tokenizers pipeline: RoBERTa's byte-level byte pairs.
//!
//! Source: Liu et al. (2019), Radford et al. (2019), and what Hugging Face's `RobertaTokenizer` makes of the same files.

use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::roberta::RobertaProcessing;

use super::names::Names;

/// Builds the pipeline from the files' bytes.
pub(super) fn build(vocab: &[u8], merges: &[u8], names: &Names) -> Result<tokenizers::Tokenizer, String> {
    let vocab: HashMap<String, u32> = serde_json::from_slice(vocab).map_err(|e| {
        format!("expected an object of pieces and ids, found an error ({e}); get the file again")
    })?;
    let merges = merges_of(merges)?;
    let space = match &names.config["add_prefix_space"] {
        serde_json::Value::Null => false,
        value => value.as_bool().ok_or_else(|| {
            format!(
                "expected true or false as `add_prefix_space`, found {value}; correct tokenizer_config.json"
            )
        })?,
    };
    let keys = [
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
        ("unk_token", "<unk>"),
        ("sep_token", "</s>"),
        ("pad_token", "<pad>"),
        ("cls_token", "<s>"),
        ("mask_token", "<mask>"),
    ];
    let special: Vec<_> = keys.iter().map(|(key, default)| names.token(key, default)).collect();
    let id = |key: &str, default: &str| {
        let name = names.or(key, default);
        match vocab.get(&name) {
            Some(&id) => Ok((name, id)),
            None => Err(format!(
                "expected the token {name:?} ({key}) in the vocabulary, found none; get the file again, or name it in tokenizer_config.json"
            )),
        }
    };
    let (sep, cls) = (id("sep_token", "</s>")?, id("cls_token", "<s>")?);
    id("pad_token", "<pad>")?;
    let model =
        BPE::builder().vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges).build().map_err(
            |e| format!("expected merges of pieces in vocab.json, found an error ({e}); get the files again"),
        )?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(space, true, true)));
    tokenizer.with_post_processor(Some(RobertaProcessing::new(sep, cls).add_prefix_space(space)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

/// Pairs in the order of the file.
fn merges_of(bytes: &[u8]) -> Result<Vec<(String, String)>, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        format!("merges.txt: expected UTF-8, found other bytes at {}; get the file again", e.valid_up_to())
    })?;
    let mut merges = Vec::new();
    for (n, line) in text.lines().enumerate() {
        if line.starts_with("#version") || line.is_empty() {
            continue;
        }
        match line.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                merges.push((left.to_string(), right.to_string()));
            }
            _ => {
                return Err(format!(
                    "merges.txt, line {}: expected two pieces and a space between them, found {line:?}; get the file again",
                    n + 1
                ));
            }
        }
    }
    Ok(merges)
}
