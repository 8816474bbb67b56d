//! Some documents of a file: its good ones, or a part of them.

use std::sync::Arc;

use super::cut::{Chooser, Purpose, Quota, quotas, share_of};
use super::documents::is_of_item;
use super::rows::Marked;
use super::{CorpusSettings, Document, Documents, Rows, UnknownLabels};
use crate::error::DataError;
use crate::labels::Labels;

/// Some documents of a file, in their order.
#[derive(Debug)]
pub struct Split {
    /// Shared with the parts that were cut off.
    documents: Arc<Documents>,
    pub(super) rows: Rows,
}

/// What [`Split::survey`] found.
#[derive(Debug)]
pub struct Survey {
    /// The good documents.
    pub split: Split,
    /// Their labels, in the order of their first appearance, with their counts.
    pub labels: Labels,
    /// Faulty documents, which the split does not have.
    pub bad: u64,
    /// Good documents that name a label twice.
    pub repeated: u64,
    /// Good documents with several labels.
    pub several: u64,
}

impl Split {
    /// All documents, good or bad.
    pub fn all(documents: Documents) -> Split {
        let rows = Rows::All(documents.len());
        Split { documents: Arc::new(documents), rows }
    }

    /// Reads all documents and keeps the good ones: each has a text and a label, and one label only unless `multi_label`. A fault is
    /// an error, or goes to `on_fault` with `skip_bad`.
    ///
    /// # Errors
    /// A fault without `skip_bad`, a file that cannot be read.
    pub fn survey(
        documents: Documents,
        multi_label: bool,
        skip_bad: bool,
        on_fault: &mut dyn FnMut(&DataError),
    ) -> Result<Survey, DataError> {
        let (mut good, mut labels) = (Marked::default(), Labels::new());
        let (mut bad, mut repeated, mut several) = (0, 0, 0);
        documents.each(
            &mut |_, document| match document.and_then(|document| judged(document, multi_label)) {
                Ok(document) => {
                    good.push(true);
                    repeated += u64::from(document.repeated > 0);
                    several += u64::from(document.labels.len() > 1);
                    document.labels.iter().try_for_each(|label| labels.count(label).map(drop))
                }
                Err(e) if skip_bad && is_of_item(&e) => {
                    good.push(false);
                    bad += 1;
                    on_fault(&e);
                    Ok(())
                }
                Err(e) => Err(with_way_out(e)),
            },
        )?;
        let split = Split { documents: Arc::new(documents), rows: Rows::of(good) };
        Ok(Survey { split, labels, bad, repeated, several })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file that they are of.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// The row in the file of the document at position `k`, which is below `len()`.
    pub fn row(&self, k: usize) -> usize {
        self.rows.get(k)
    }

    /// Reads the document at position `k`; its `place.row` is the row in the file.
    ///
    /// # Errors
    /// If `k` is not below `len()`; as [`Documents::get`].
    pub fn get(&self, k: usize) -> Result<Document, DataError> {
        if k >= self.len() {
            let what = format!("has {} documents here, document {k} was asked for", self.len());
            return Err(DataError::file(self.documents.path(), what));
        }
        self.documents.get(self.row(k))
    }

    /// Reads all in order, several at a time.
    ///
    /// # Errors
    /// As [`Documents::get`]; what `take` returns.
    pub fn each(&self, take: &mut dyn FnMut(Document) -> Result<(), DataError>) -> Result<(), DataError> {
        self.documents.each_of(&|row| self.rows.contains(row), &mut |_, document| take(document?))
    }

    /// Their labels in the order of their first appearance, with their counts.
    ///
    /// # Errors
    /// As [`Split::each`].
    pub fn labels(&self) -> Result<Labels, DataError> {
        let mut labels = Labels::new();
        self.each(&mut |d| d.labels.iter().try_for_each(|label| labels.count(label).map(drop)))?;
        Ok(labels)
    }

    /// How many documents have a label that `known` lacks.
    ///
    /// # Errors
    /// The first such document, where the policy refuses it; as [`Split::each`].
    pub fn unknown(&self, known: &Labels, policy: UnknownLabels) -> Result<u64, DataError> {
        let mut unknown = 0;
        self.each(&mut |document| {
            let Some(label) = document.labels.iter().find(|label| known.id(label).is_none()) else {
                return Ok(());
            };
            unknown += 1;
            match policy {
                UnknownLabels::Count => Ok(()),
                UnknownLabels::Refuse => Err(document.place.error(
                    "a label that the classifier learns or knows",
                    format!("{label:?}"),
                    "correct it, or let such documents count as missed with --unknown_labels count",
                )),
            }
        })?;
        Ok(unknown)
    }

    /// A share of these, chosen at random; of every label with `stratified`.
    pub(super) fn choose(
        &self,
        share: f64,
        settings: &CorpusSettings,
        purpose: Purpose,
    ) -> Result<Rows, DataError> {
        let wanted = share_of(self.len(), share);
        if !settings.stratified {
            let one = vec![Quota { left: self.len(), wanted }];
            let mut chooser = Chooser::new(settings.seed, purpose, one);
            (0..self.len()).for_each(|k| chooser.take(self.row(k), 0));
            return Ok(chooser.finish(self.documents.len()));
        }
        let mut strata = Labels::new();
        let of = |document: &Document| document.labels.first().cloned().unwrap_or_default();
        self.each(&mut |document| strata.count(&of(&document)).map(drop))?;
        let sizes: Vec<usize> = strata.counts().iter().map(|&n| n as usize).collect();
        let mut chooser = Chooser::new(settings.seed, purpose, quotas(&sizes, wanted));
        self.each(&mut |document| {
            if let Some(stratum) = strata.id(&of(&document)) {
                chooser.take(document.place.row, stratum as usize);
            }
            Ok(())
        })?;
        Ok(chooser.finish(self.documents.len()))
    }

    /// Takes these rows away into a split of their own.
    pub(super) fn cut_off(&mut self, chosen: Rows) -> Split {
        self.rows = self.rows.without(&chosen);
        Split { documents: Arc::clone(&self.documents), rows: chosen }
    }
}

/// A document that can be learnt from and measured.
pub(super) fn judged(document: Document, multi_label: bool) -> Result<Document, DataError> {
    let fault = |expected: &str, found: &str, hint: &str| document.place.error(expected, found, hint);
    if document.labels.is_empty() {
        return Err(fault(
            "a label",
            "none",
            "begin a line with __label__NAME, or name the column of labels",
        ));
    }
    if document.text.is_empty() {
        return Err(fault("a text", "none", ""));
    }
    if document.labels.len() > 1 && !multi_label {
        let named: Vec<&str> = document.labels.iter().take(5).map(String::as_str).collect();
        let found = format!("{}: {}", document.labels.len(), named.join(", "));
        return Err(fault("one label", &found, "keep one, or train with --multi_label"));
    }
    Ok(document)
}

/// The error with what else can be done.
fn with_way_out(error: DataError) -> DataError {
    match error {
        DataError::Item { path, row, line, item_line, expected, found, hint } => {
            let or = if hint.is_empty() { "" } else { "; or " };
            let hint = format!("{hint}{or}leave such documents out with --skip_bad");
            DataError::Item { path, row, line, item_line, expected, found, hint }
        }
        other => other,
    }
}
