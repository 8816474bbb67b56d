//! A `sentencepiece.bpe.model` as a tokenizers pipeline: XLM-RoBERTa's pieces, whose ids are one more than in the file.
//!
//! fairseq, where the model was trained, puts `<s> <pad> </s> <unk>` first and `<mask>` last; the file begins with
//! `<unk> <s> </s>`. Source: Conneau et al. (2020), and what Hugging Face's `XLMRobertaTokenizer` makes of the same file.

use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::Precompiled;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;

use super::frame::template;
use super::names::Names;
use crate::charsmap;
use crate::spiece::{self, Pieces};

/// Builds the pipeline from the file's bytes.
pub(super) fn build(bytes: &[u8], names: &Names) -> Result<tokenizers::Tokenizer, String> {
    if let Some(class) = names.config["tokenizer_class"].as_str() {
        // Relatives such as CamemBERT number the same kind of file in other ways.
        if class.trim_end_matches("Fast") != "XLMRobertaTokenizer" {
            return Err(format!(
                "expected XLM-RoBERTa's pieces, found `tokenizer_class` {class:?} in tokenizer_config.json; \
                 convert it to a tokenizer.json with Hugging Face tools"
            ));
        }
    }
    let Pieces { pieces, unk_id, charsmap, user_defined, .. } = spiece::pieces(bytes)?;
    let first: Vec<&str> = pieces.iter().take(3).map(|p| p.0.as_str()).collect();
    if unk_id != 0 || first != ["<unk>", "<s>", "</s>"] {
        return Err(format!(
            "expected <unk>, <s> and </s> as the first pieces, found {first:?} (unknown piece: {unk_id}); get the file again"
        ));
    }
    let keys = [("bos_token", "<s>"), ("pad_token", "<pad>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
    let mut vocab: Vec<(String, f64)> = keys.iter().map(|(key, name)| (names.or(key, name), 0.0)).collect();
    vocab.extend(pieces.into_iter().skip(3));
    vocab.push((names.or("mask_token", "<mask>"), 0.0));

    let unigram = Unigram::from(vocab, Some(3), false).map_err(|e| e.to_string())?;
    let mut tokenizer = tokenizers::Tokenizer::new(unigram);
    if let Some(map) = charsmap {
        charsmap::check(&map)?;
        tokenizer.with_normalizer(Some(Precompiled::from(&map).map_err(|e| e.to_string())?));
    }
    let metaspace = Metaspace::new('▁', PrependScheme::Always, true);
    let words = Sequence::new(vec![WhitespaceSplit.into(), metaspace.clone().into()]);
    tokenizer.with_pre_tokenizer(Some(words));
    tokenizer.with_decoder(Some(metaspace));
    let mut special: Vec<_> = keys.iter().map(|(key, name)| names.token(key, name)).collect();
    special.extend(
        [("cls_token", "<s>"), ("sep_token", "</s>"), ("mask_token", "<mask>")]
            .map(|(k, n)| names.token(k, n)),
    );
    tokenizer.add_special_tokens(&special);
    tokenizer.add_tokens(&user_defined);
    let (bos, eos) = (names.or("bos_token", "<s>"), names.or("eos_token", "</s>"));
    let frame = template((&bos, 0), (&eos, 2), &format!("{bos} $A {eos} {eos} $B {eos}"))?;
    tokenizer.with_post_processor(Some(frame));
    Ok(tokenizer)
}
