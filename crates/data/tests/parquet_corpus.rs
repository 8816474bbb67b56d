//! Corpora of Parquet: the same documents as those of JSON lines, labels as texts, numbers and lists.
#![cfg(feature = "parquet")]

use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use tercio_data::corpus::{Columns, CorpusSettings};
use tercio_data::{Corpus, Documents};

/// A file of a column of texts, and one of labels of type `L`, nullable both.
fn written<L: DataType>(path: &Path, schema: &str, texts: &[&str], labels: &[Option<L::T>]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = std::fs::File::create(path).unwrap();
    let mut file = SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let values: Vec<ByteArray> = texts.iter().map(|text| text.as_bytes().to_vec().into()).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&values, Some(&vec![1; texts.len()]), None).unwrap();
    column.close().unwrap();
    let levels: Vec<i16> = labels.iter().map(|label| i16::from(label.is_some())).collect();
    let values: Vec<L::T> = labels.iter().flatten().cloned().collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<L>().write_batch(&values, Some(&levels), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
}

#[test]
fn documents_are_those_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let (texts, cache) = (["one", "naïve 東京", "three"], dir.path().join("cache"));
    let words = dir.path().join("words.parquet");
    let schema = "message m { optional binary text (UTF8); optional binary label (UTF8); }";
    let label = |l: &str| Some(ByteArray::from(l.as_bytes().to_vec()));
    written::<ByteArrayType>(&words, schema, &texts, &[label("a"), label("b"), label("a")]);
    let documents = Documents::open(&words, &cache).unwrap();
    let found: Vec<_> = (0..3).map(|i| documents.get(i).unwrap()).map(|d| (d.text, d.labels)).collect();
    let want = [("one", "a"), ("naïve 東京", "b"), ("three", "a")];
    assert_eq!(found, want.map(|(t, l)| (t.to_owned(), vec![l.to_owned()])));

    // Columns that only this file has.
    let reviews = dir.path().join("reviews.parquet");
    let schema = "message m { optional binary review (UTF8); optional int64 stars; }";
    written::<Int64Type>(&reviews, schema, &texts, &[Some(5), Some(1), Some(5)]);
    let columns = Columns { text: vec!["review".into()], labels: vec!["stars".into()], ..Columns::default() };
    let documents = Documents::open(&reviews, &cache).unwrap().with_columns(columns).unwrap();
    let second = documents.get(1).unwrap();
    assert_eq!((second.text, second.labels), ("naïve 東京".to_owned(), vec!["1".to_owned()]));

    // As GLUE has it: a column of another name, numbers as labels, one of them missing.
    let numbers = dir.path().join("numbers.parquet");
    let schema = "message m { optional binary sentence (UTF8); optional int64 label; }";
    written::<Int64Type>(&numbers, schema, &texts, &[Some(1), None, Some(0)]);
    let columns = Columns { text: vec!["sentence".into()], ..Columns::default() };
    let documents = Documents::open(&numbers, &cache).unwrap().with_columns(columns).unwrap();
    let settings =
        CorpusSettings { skip_bad: true, cut_dev: false, cut_test: false, ..CorpusSettings::default() };
    let mut faults = Vec::new();
    let corpus = Corpus::new(documents, None, None, &settings, &mut |e| faults.push(e.to_string())).unwrap();
    assert_eq!((corpus.train.len(), corpus.labels.names()), (2, &["1".to_owned(), "0".to_owned()][..]));
    assert!(
        faults[0].contains("numbers.parquet, line 2") && faults[0].contains("expected a label"),
        "{faults:?}"
    );
}
