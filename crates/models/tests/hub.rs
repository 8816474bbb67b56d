//! Models of the hub, fetched from a small server in this process that answers as the hub does: what is fetched and what is
//! not, a cut connection, no network, names that are not there.
//!
//! Needs the feature `hub`. The address and the cache are environment variables, so every opening is a process of its own:
//! this program again, told by [`NAME`] to be nothing but that.
#![cfg(feature = "hub")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tercio_models::folder::ModelFolder;

/// The model that a child process is to open.
const NAME: &str = "TEST_HUB_MODEL";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const MODEL: &str = "house/tiny-t5";

type Files = BTreeMap<&'static str, Vec<u8>>;

struct Hub {
    port: u16,
    /// Method-less lines: address and range of every request.
    requests: Arc<Mutex<Vec<(String, Option<String>)>>>,
    /// Bytes of a body after which the connection is cut, once; 0: none is.
    cut: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hub {
    fn of(files: Files) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (requests, cut) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, cuts, end) = (requests.clone(), cut.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if end.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let (address, range) = read_request(&mut stream);
                let (head, mut body) = answer(&files, &address, range.as_deref());
                let cut = cuts.load(Ordering::SeqCst);
                if cut > 0 && body.len() > cut {
                    cuts.store(0, Ordering::SeqCst);
                    body.truncate(cut);
                }
                seen.lock().unwrap().push((address, range));
                let _ = stream.write_all(&[head.as_bytes(), &body].concat());
            }
        });
        Hub { port, requests, cut, stop, thread: Some(thread) }
    }
    /// Opens the model in a process of its own: its folder, or what it complained of.
    fn open(&self, name: &str, cache: &Path, variables: &[(&str, &str)]) -> Result<PathBuf, String> {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "one_opening", "--nocapture", "--test-threads", "1"]);
        for proxy in ["http_proxy", "https_proxy", "all_proxy"] {
            child.env_remove(proxy).env_remove(proxy.to_uppercase());
        }
        child.env_remove("HF_HUB_OFFLINE").env(NAME, name).env("HF_HUB_CACHE", cache);
        child.env("HF_ENDPOINT", format!("http://127.0.0.1:{}", self.port)).envs(variables.iter().copied());
        let output = child.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let line = |start: &str| said.lines().find_map(|l| l.strip_prefix(start)).map(str::to_owned);
        match (line("opened: "), line("refused: ")) {
            (Some(path), None) => Ok(path.into()),
            (None, Some(error)) => Err(error),
            _ => panic!("{said}{}", String::from_utf8_lossy(&output.stderr)),
        }
    }
    /// Requests since the last call: of files their names, in order, each once.
    fn fetched(&self) -> Vec<String> {
        let mut names = Vec::new();
        for (address, _) in self.requests.lock().unwrap().drain(..) {
            let name = address.rsplit_once("/main/").map_or(address.clone(), |(_, name)| name.to_owned());
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.thread.take().unwrap().join();
    }
}

fn read_request(stream: &mut TcpStream) -> (String, Option<String>) {
    let (mut request, mut byte) = (Vec::new(), [0]);
    while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
        request.push(byte[0]);
    }
    let request = String::from_utf8(request).unwrap();
    let address = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let is_range = |line: &&str| line.to_ascii_lowercase().starts_with("range: bytes=");
    let range = request.lines().find(is_range).map(|line| line["range: bytes=".len()..].to_owned());
    (address, range)
}

/// What the hub answers: the list of a model's files, a file or a part of it with its commit and checksum, or "not found".
fn answer(files: &Files, address: &str, range: Option<&str>) -> (String, Vec<u8>) {
    let head = |status: &str, more: &str, length: usize| {
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n")
    };
    if address == format!("/api/models/{MODEL}/revision/main") || address == format!("/api/models/{MODEL}") {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string().into_bytes();
        return (head("200 OK", "Content-Type: application/json\r\n", body.len()), body);
    }
    let name = address.strip_prefix(&format!("/{MODEL}/resolve/main/")).unwrap_or_default();
    let Some(body) = files.get(name) else { return (head("404 Not Found", "", 0), Vec::new()) };
    let (first, last) = range.and_then(|r| r.split_once('-')).unwrap_or(("0", ""));
    let (first, end) = (first.parse().unwrap(), last.parse().map_or(body.len(), |last: usize| last + 1));
    let part = body[first..end.min(body.len())].to_vec();
    let more = format!(
        "ETag: \"{name}-1\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {first}-{}/{}\r\n",
        end.min(body.len()) - 1,
        body.len()
    );
    (head("206 Partial Content", &more, part.len()), part)
}

/// The stored model's files, and others that nobody needs.
fn files(weights: &[(&'static str, Vec<u8>)]) -> Files {
    let stored = |name: &str| std::fs::read(stored_model().join(name)).unwrap();
    let mut files: Files = weights.iter().cloned().collect();
    for name in ["config.json", "tokenizer.json", "spiece.model"] {
        files.insert(name, stored(name));
    }
    for other in ["README.md", "tf_model.h5", "onnx/model.onnx"] {
        files.insert(other, b"not needed".to_vec());
    }
    files
}

fn stored_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/fid_reader_t5v10/model")
}

fn weights() -> Vec<u8> {
    std::fs::read(stored_model().join("model.safetensors")).unwrap()
}

/// Not a test of its own: the process that [`Hub::open`] starts.
#[test]
fn one_opening() {
    let Ok(name) = std::env::var(NAME) else { return };
    // On a line of its own, whatever the test's harness has begun to write.
    match ModelFolder::open(&name) {
        Ok(folder) => println!("\nopened: {}", folder.path().display()),
        Err(error) => println!("\nrefused: {error}"),
    }
}

#[test]
fn what_a_model_needs_is_fetched_once() {
    let old = ("pytorch_model.bin", b"the older file".to_vec());
    let hub = Hub::of(files(&[("model.safetensors", weights()), old]));
    let cache = tempfile::tempdir().unwrap();
    let folder = hub.open(MODEL, cache.path(), &[]).unwrap();
    assert!(folder.ends_with(format!("models--house--tiny-t5/snapshots/{COMMIT}")), "{folder:?}");
    let mut fetched = hub.fetched();
    assert_eq!(fetched.pop().unwrap(), "config.json", "last, so that half a model is none");
    assert!(fetched.remove(0).starts_with("/api/models/"));
    assert_eq!(fetched, ["tokenizer.json", "spiece.model", "model.safetensors"]);
    let model = ModelFolder::open(folder.to_str().unwrap()).unwrap();
    assert!(model.weights().is_ok());
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights());
    // From now on the network is not asked, and need not be there.
    assert_eq!(hub.open(MODEL, cache.path(), &[("HF_HUB_OFFLINE", "1")]).unwrap(), folder);
    assert_eq!(hub.open(MODEL, cache.path(), &[]).unwrap(), folder);
    assert!(hub.fetched().is_empty());
}

#[test]
fn shards_are_fetched_by_their_index() {
    let index = serde_json::json!({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}});
    let hub = Hub::of(files(&[
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("model-1.safetensors", b"one".to_vec()),
        ("model-2.safetensors", b"two".to_vec()),
        ("model-3.safetensors", b"of another model".to_vec()),
    ]));
    let cache = tempfile::tempdir().unwrap();
    let folder = hub.open(MODEL, cache.path(), &[]).unwrap();
    assert_eq!(std::fs::read(folder.join("model-2.safetensors")).unwrap(), b"two");
    assert!(folder.join("model-1.safetensors").is_file() && !folder.join("model-3.safetensors").exists());
}

#[test]
fn a_cut_download_is_an_error_and_goes_on_where_it_was_cut() {
    let hub = Hub::of(files(&[("model.safetensors", weights())]));
    let cache = tempfile::tempdir().unwrap();
    let sent = weights().len() / 2;
    // Only the weights are that long.
    assert!(
        ["tokenizer.json", "spiece.model"]
            .iter()
            .all(|f| stored_model().join(f).metadata().unwrap().len() < sent as u64)
    );
    hub.cut.store(sent, Ordering::SeqCst);
    let error = hub.open(MODEL, cache.path(), &[]).unwrap_err();
    assert!(error.contains(MODEL) && error.contains("the download failed"), "{error}");
    hub.requests.lock().unwrap().clear();
    let folder = hub.open(MODEL, cache.path(), &[]).unwrap();
    let ranges: Vec<_> = hub.requests.lock().unwrap().iter().filter_map(|r| r.1.clone()).collect();
    let resumed =
        |r: &String| r.strip_suffix('-').is_some_and(|start| start.parse().is_ok_and(|n: usize| n > 0));
    assert!(ranges.iter().any(resumed), "{ranges:?}");
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn what_cannot_be_fetched_is_said() {
    let hub = Hub::of(files(&[]));
    let cache = tempfile::tempdir().unwrap();
    let error = |name: &str, more: &[(&str, &str)]| hub.open(name, cache.path(), more).unwrap_err();
    let offline = error(MODEL, &[("HF_HUB_OFFLINE", "1")]);
    assert!(offline.contains("HF_HUB_OFFLINE is set") && hub.fetched().is_empty(), "{offline}");
    let none = error(MODEL, &[]);
    assert!(none.contains("on the hub it has none of model.safetensors"), "{none}");
    let unknown = error("house/other", &[]);
    assert!(unknown.contains("`house/other`") && unknown.contains("404"), "{unknown}");
}
