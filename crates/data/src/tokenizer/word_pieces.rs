//! A `vocab.txt` of word pieces as a tokenizers pipeline: BERT's tokenizer, cased or not.
//!
//! Source: Devlin et al. (2019) and what Hugging Face's `BertTokenizer` makes of the same files (tests/golden/tokenizers).

use tokenizers::decoders::wordpiece::WordPiece as Decoder;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;

use super::MAX_PIECE_BYTES;
use super::frame::template;
use super::names::Names;

/// Tokenizer classes whose `vocab.txt` is one of word pieces (and none: then it is believed to be).
const CLASSES: [&str; 5] = ["Bert", "DistilBert", "Electra", "RetriBert", "MobileBert"];

/// Builds the pipeline from the lines of the file: the token of line n has id n, from 0.
pub(super) fn build(bytes: &[u8], names: &Names) -> Result<tokenizers::Tokenizer, String> {
    check_class(names)?;
    let setting = |key: &str| match &names.config[key] {
        serde_json::Value::Null => Ok(None),
        value => value.as_bool().map(Some).ok_or_else(|| {
            format!("expected true or false as `{key}`, found {value}; correct tokenizer_config.json")
        }),
    };
    if setting("do_basic_tokenize")? == Some(false) {
        return Err(
            "expected `do_basic_tokenize` true, found false; texts are always split into words".into()
        );
    }
    let normalizer = BertNormalizer::new(
        true,
        setting("tokenize_chinese_chars")?.unwrap_or(true),
        setting("strip_accents")?,
        setting("do_lower_case")?.unwrap_or(true),
    );

    let vocab = vocabulary(bytes)?;
    let keys = [
        ("pad_token", "[PAD]"),
        ("unk_token", "[UNK]"),
        ("cls_token", "[CLS]"),
        ("sep_token", "[SEP]"),
        ("mask_token", "[MASK]"),
    ];
    let mut special = Vec::new();
    for (key, default) in keys {
        let token = names.token(key, default);
        // A vocabulary without a mask serves: nothing here masks.
        if vocab.contains_key(&token.content) {
            special.push(token);
        } else if key != "mask_token" {
            return Err(format!(
                "expected the token {:?} ({key}) on a line of its own, found none; get the file again, or name it in tokenizer_config.json",
                token.content
            ));
        }
    }
    let id = |name: &str| vocab[name];
    let (unk, cls, sep) =
        (names.or("unk_token", "[UNK]"), names.or("cls_token", "[CLS]"), names.or("sep_token", "[SEP]"));
    let frame = template((&cls, id(&cls)), (&sep, id(&sep)), &format!("{cls} $A {sep} $B:1 {sep}:1"))?;
    let model = WordPiece::builder().vocab(vocab).unk_token(unk).build().map_err(|e| e.to_string())?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_normalizer(Some(normalizer));
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    tokenizer.with_post_processor(Some(frame));
    tokenizer.with_decoder(Some(Decoder::default()));
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

fn check_class(names: &Names) -> Result<(), String> {
    let Some(class) = names.config["tokenizer_class"].as_str() else { return Ok(()) };
    let family = class.trim_end_matches("Fast").trim_end_matches("Tokenizer");
    if CLASSES.contains(&family) {
        return Ok(());
    }
    Err(format!(
        "expected a vocabulary of word pieces, found `tokenizer_class` {class:?} in tokenizer_config.json; \
         convert it to a tokenizer.json with Hugging Face tools"
    ))
}

/// Ids by piece. Where a piece is there twice the later line counts, as in Hugging Face's tokenizer.
fn vocabulary(bytes: &[u8]) -> Result<Vocab, String> {
    let mut vocab = Vocab::new();
    let lines = bytes.strip_suffix(b"\n").unwrap_or(bytes).split(|&b| b == b'\n');
    for (n, line) in lines.enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let at = n + 1;
        let piece = std::str::from_utf8(line)
            .map_err(|_| format!("line {at}: expected UTF-8, found other bytes; get the file again"))?;
        if piece.len() > MAX_PIECE_BYTES {
            return Err(format!(
                "line {at}: expected a piece of at most {MAX_PIECE_BYTES} bytes, found {}; get the file again",
                piece.len()
            ));
        }
        let id =
            u32::try_from(n).map_err(|_| format!("line {at}: expected fewer lines; get the file again"))?;
        vocab.insert(piece.to_string(), id);
    }
    Ok(vocab)
}
