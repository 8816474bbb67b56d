//! A folder of documents: a folder for each label, in which every file is a document.

use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::documents::Document;
use crate::error::DataError;
use crate::index::hex;
use crate::items::MAX_ITEM_BYTES;
use crate::question::{Place, utf8};

/// The names of a folder's files, by label, in the order of their bytes. Files beside the folders, folders within them and
/// names that begin with a dot are passed over.
pub(super) struct Folder {
    path: PathBuf,
    labels: Vec<String>,
    files: Vec<(u32, OsString)>,
    sha256: String,
}

impl Folder {
    /// Lists a folder and reads every file once.
    pub fn open(path: &Path) -> Result<Folder, DataError> {
        let mut folder =
            Folder { path: path.to_owned(), labels: Vec::new(), files: Vec::new(), sha256: String::new() };
        for (name, is_dir) in entries(path)? {
            if !is_dir {
                continue;
            }
            let dir = path.join(&name);
            let label = name.into_string().map_err(|_| {
                DataError::file(&dir, "expected the name of a label in UTF-8; rename the folder")
            })?;
            let id = folder.labels.len() as u32;
            folder.files.extend(entries(&dir)?.into_iter().filter(|(_, d)| !d).map(|(name, _)| (id, name)));
            folder.labels.push(label);
        }
        if folder.files.is_empty() {
            return Err(DataError::file(
                path,
                "expected a folder for each label with a file for each document, found none; name a file, or another folder",
            ));
        }
        let mut sum = Sha256::new();
        for i in 0..folder.len() {
            let bytes = folder.raw(i)?;
            sum.update((bytes.len() as u64).to_le_bytes());
            sum.update(bytes);
        }
        folder.sha256 = hex(&sum.finalize());
        Ok(folder)
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn fingerprint(&self) -> &str {
        &self.sha256
    }

    pub fn get(&self, i: usize) -> Result<Document, DataError> {
        let (label, file) = self.file(i)?;
        let place = Place { path: Arc::new(file.clone()), row: i, line: 1 };
        let bytes = content(&file, &place)?;
        let text = utf8(&bytes, &place)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim().to_owned();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let id = format!("{label}/{name}").into();
        Ok(Document { id, text, labels: vec![label.to_owned()], repeated: 0, place })
    }

    pub fn raw(&self, i: usize) -> Result<Vec<u8>, DataError> {
        let (label, file) = self.file(i)?;
        let place = Place { path: Arc::new(file.clone()), row: i, line: 1 };
        let name = file.file_name().unwrap_or_default().as_encoded_bytes();
        Ok([label.as_bytes(), b"/", name, b"\n", &content(&file, &place)?].concat())
    }

    fn file(&self, i: usize) -> Result<(&str, PathBuf), DataError> {
        let (label, name) = self.files.get(i).ok_or_else(|| {
            let what = format!("has {} documents, document {i} was asked for", self.len());
            DataError::file(&self.path, what)
        })?;
        let label = &self.labels[*label as usize];
        Ok((label, self.path.join(label).join(name)))
    }
}

fn content(file: &Path, place: &Place) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    let open = fs::File::open(file).map_err(DataError::io(file, "open the file"))?;
    open.take(MAX_ITEM_BYTES + 1).read_to_end(&mut bytes).map_err(DataError::io(file, "read the file"))?;
    if bytes.len() as u64 > MAX_ITEM_BYTES {
        let expected = format!("a document of at most {MAX_ITEM_BYTES} bytes");
        return Err(place.error(expected, "more", "cut it into several"));
    }
    Ok(bytes)
}

/// The files and folders in a folder, links followed, by name, and whether each is a folder; nothing else, and no hidden ones.
fn entries(dir: &Path) -> Result<Vec<(OsString, bool)>, DataError> {
    let list = || -> std::io::Result<Vec<(OsString, bool)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir)? {
            let name = entry?.file_name();
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let meta = fs::metadata(dir.join(&name))?;
            if meta.is_dir() || meta.is_file() {
                found.push((name, meta.is_dir()));
            }
        }
        found.sort_unstable();
        Ok(found)
    };
    list().map_err(DataError::io(dir, "read the folder"))
}
