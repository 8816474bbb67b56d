//! Deleting documents.

use std::path::Path;

use super::build::{PlaidReport, commit};
use super::{PlaidIndex, Rows};
use crate::error::SearchError;
use crate::manifest::{IndexFolder, Manifest};

/// Ids that an error names at most.
const NAMED: usize = 5;

impl PlaidIndex {
    /// Deletes the documents of some ids: no search finds them from now on. Their bits stay until the index is built again, and no other row
    /// changes its number. All may be deleted, and others added then. Who is killed meanwhile leaves the index as it was.
    ///
    /// # Errors
    /// No index there; ids that it does not have (nothing is deleted then); a folder that cannot be written.
    pub fn delete<S: AsRef<str>>(dir: &Path, ids: &[S]) -> Result<PlaidReport, SearchError> {
        if Manifest::read_if_there(dir)?.is_none() {
            return Err(SearchError::file(dir, "expected an index to delete from, found none"));
        }
        let (folder, earlier) = IndexFolder::open_earlier(dir)?;
        let index = PlaidIndex::of_manifest(dir, earlier.clone())?;
        let (rows, unknown) = index.ids()?.rows(ids);
        if !unknown.is_empty() {
            let some: Vec<String> = unknown.iter().take(NAMED).map(|id| format!("{id:?}")).collect();
            return Err(SearchError::file(
                dir,
                format!(
                    "expected ids of documents of the index, found {} that it does not have or that were deleted before ({}{}); nothing \
                     was deleted",
                    unknown.len(),
                    some.join(", "),
                    if unknown.len() > NAMED { ", ..." } else { "" }
                ),
            ));
        }
        let mut settings = index.settings.clone();
        if rows.is_empty() {
            return Ok(PlaidReport {
                manifest: earlier,
                settings,
                warnings: vec!["no ids: nothing was deleted".into()],
            });
        }
        let all = Rows::of(index.deleted.iter().chain(rows.iter()));
        let mut file = folder.create("deleted")?;
        for row in all.iter() {
            file.write(&row.to_le_bytes())?;
        }
        let old = format!("v{}-deleted", settings.deleted_version);
        let mut files = earlier.files;
        files.retain(|file| file.name != old);
        files.push(file.finish()?);
        settings.deleted = all.len() as u64;
        settings.deleted_version = folder.version();
        commit(folder, earlier.collection, settings, files, Vec::new())
    }
}
