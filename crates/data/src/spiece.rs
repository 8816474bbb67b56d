//! A sentencepiece `spiece.model` as a tokenizers pipeline, the way Hugging Face's T5 converter builds it.
//!
//! Field numbers are those of sentencepiece_model.proto (Apache-2.0, github.com/google/sentencepiece).

use std::collections::BTreeSet;

use prost::Message;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{Precompiled, Replace, Sequence, Strip, replace::ReplacePattern};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, NormalizerWrapper};

use crate::charsmap;
use crate::tokenizer::{MAX_PIECE_BYTES, SpecialNames};

/// Largest spiece.model that is read; the largest in use are near 5 MB.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
const MAX_EXTRA_IDS: usize = 10_000;

#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

const USER_DEFINED: i32 = 4;

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "35")]
    byte_fallback: Option<bool>,
    #[prost(int32, optional, tag = "40")]
    unk_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", optional, tag = "2")]
    charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
}

/// What a model file of the unigram kind holds.
pub(crate) struct Pieces {
    /// Pieces and their scores, by id.
    pub pieces: Vec<(String, f64)>,
    /// Pieces that are found in texts before anything else is.
    pub user_defined: Vec<AddedToken>,
    pub unk_id: usize,
    pub byte_fallback: bool,
    /// The normaliser's character map, not checked yet.
    pub charsmap: Option<Vec<u8>>,
    pub add_dummy_prefix: bool,
}

/// Reads a model file.
pub(crate) fn pieces(bytes: &[u8]) -> Result<Pieces, String> {
    let model = Model::decode(bytes)
        .map_err(|e| format!("expected a sentencepiece model, found bad data ({e}); get the file again"))?;
    let trainer = model.trainer.unwrap_or_default();
    if !matches!(trainer.model_type, None | Some(1)) {
        let kind = trainer.model_type.unwrap_or_default();
        return Err(format!(
            "expected a unigram model (type 1), found type {kind}; convert it to a tokenizer.json with Hugging Face tools"
        ));
    }
    let mut pieces = Vec::with_capacity(model.pieces.len());
    let mut user_defined = Vec::new();
    for (id, piece) in model.pieces.into_iter().enumerate() {
        let text = piece.piece.unwrap_or_default();
        let score = piece.score.unwrap_or_default();
        if text.is_empty() || text.len() > MAX_PIECE_BYTES || !score.is_finite() {
            return Err(format!(
                "expected piece {id} to have 1 to {MAX_PIECE_BYTES} bytes and a finite score, found {} bytes and {score}; get the file again",
                text.len()
            ));
        }
        if piece.kind == Some(USER_DEFINED) {
            user_defined.push(AddedToken::from(text.clone(), false).normalized(false));
        }
        pieces.push((text, f64::from(score)));
    }
    let unk_id = usize::try_from(trainer.unk_id.unwrap_or(0)).ok().filter(|&id| id < pieces.len());
    let Some(unk_id) = unk_id else {
        return Err(format!(
            "expected the unknown piece among {} pieces, found id {:?}; get the file again",
            pieces.len(),
            trainer.unk_id
        ));
    };
    let normalizer = model.normalizer.unwrap_or_default();
    Ok(Pieces {
        pieces,
        user_defined,
        unk_id,
        byte_fallback: trainer.byte_fallback.unwrap_or(false),
        charsmap: normalizer.charsmap.filter(|m| !m.is_empty()),
        add_dummy_prefix: normalizer.add_dummy_prefix.unwrap_or(true),
    })
}

/// Builds the pipeline from the file's bytes; `extra_ids` tokens `<extra_id_N>` follow the pieces, the highest N first.
pub(crate) fn build(
    bytes: &[u8],
    names: &SpecialNames,
    extra_ids: usize,
) -> Result<tokenizers::Tokenizer, String> {
    let Pieces { pieces: mut vocab, user_defined, unk_id, byte_fallback, charsmap, add_dummy_prefix } =
        pieces(bytes)?;
    if extra_ids > MAX_EXTRA_IDS {
        return Err(format!(
            "expected at most {MAX_EXTRA_IDS} extra ids, found {extra_ids}; correct tokenizer_config.json"
        ));
    }
    let own_extra_ids: BTreeSet<String> =
        vocab.iter().filter(|p| p.0.starts_with("<extra_id_")).map(|p| p.0.clone()).collect();
    let mut special: Vec<AddedToken> =
        [&names.pad, &names.eos, &names.unk].map(|n| AddedToken::from(n.clone(), true)).into();
    for n in (0..extra_ids).rev() {
        let name = format!("<extra_id_{n}>");
        special.push(AddedToken::from(name.clone(), true));
        if !own_extra_ids.contains(&name) {
            vocab.push((name, 0.0));
        }
    }

    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if let Some(map) = charsmap {
        charsmap::check(&map)?;
        steps.push(Precompiled::from(&map).map_err(|e| e.to_string())?.into());
    }
    steps.push(Strip::new(false, true).into());
    steps.push(Replace::new(ReplacePattern::Regex(" {2,}".into()), "▁").map_err(|e| e.to_string())?.into());

    let scheme = if add_dummy_prefix { PrependScheme::Always } else { PrependScheme::Never };
    let metaspace = Metaspace::new('▁', scheme, true);
    let unigram = Unigram::from(vocab, Some(unk_id), byte_fallback).map_err(|e| e.to_string())?;
    let mut tokenizer = tokenizers::Tokenizer::new(unigram);
    tokenizer.with_normalizer(Some(Sequence::new(steps)));
    tokenizer.with_pre_tokenizer(Some(metaspace.clone()));
    tokenizer.with_decoder(Some(metaspace));
    tokenizer.add_special_tokens(&special);
    tokenizer.add_tokens(&user_defined);
    if let Some(eos) = tokenizer.token_to_id(&names.eos) {
        // for other programs that read the saved file; here special tokens are never added by the pipeline
        let template = TemplateProcessing::builder()
            .try_single(format!("$A {}", names.eos))
            .and_then(|b| b.try_pair(format!("$A {0} $B {0}", names.eos)))
            .map(|b| b.special_tokens(vec![(names.eos.clone(), eos)]).build());
        match template {
            Ok(Ok(template)) => tokenizer.with_post_processor(Some(template)),
            Ok(Err(e)) => return Err(e.to_string()),
            Err(e) => return Err(e),
        };
    }
    Ok(tokenizer)
}
