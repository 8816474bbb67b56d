//! Downloads against a small server in this process: cut connections, wrong lengths, wrong bytes, no ranges, errors, a full
//! disk; and archives that should not be unpacked.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tercio_data::download::{
    DownloadError, DownloadEvent, Downloaded, Patience, Source, download, gunzip, read_checksums, unpack,
};

/// What the server does with one connection, given the request's text: the bytes that it answers before it hangs up.
type Act = Box<dyn FnMut(&str) -> Vec<u8> + Send>;

struct Server {
    port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn new(mut act: Act) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (requests, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (seen, end) = (requests.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if end.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                    request.push(byte[0]);
                }
                let request = String::from_utf8(request).unwrap();
                let answer = act(&request);
                seen.lock().unwrap().push(request);
                // The client may have gone, as on a full disk.
                let _ = stream.write_all(&answer);
            }
        });
        Server { port, requests, stop, thread: Some(thread) }
    }
    /// A server that gives each connection the next of some answers, and after them the last one again.
    fn of(answers: Vec<Vec<u8>>) -> Server {
        let mut next = 0;
        Server::new(Box::new(move |_| {
            next += 1;
            answers[(next - 1).min(answers.len() - 1)].clone()
        }))
    }
    fn source(&self, sha256: Option<String>) -> Source {
        Source { url: format!("http://127.0.0.1:{}/dir/file.gz", self.port), name: "file.gz".into(), sha256 }
    }
    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.thread.take().unwrap().join();
    }
}

fn body() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn answer(head: &str, body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n").as_bytes(), body].concat()
}

fn whole(body: &[u8], extra: &str) -> Vec<u8> {
    answer(&format!("200 OK\r\nContent-Length: {}{extra}", body.len()), body)
}

/// The answer to a request as a server with ranges gives it, of which only `sent` bytes get through.
fn ranged(request: &str, body: &[u8], etag: &str, sent: usize) -> Vec<u8> {
    let header = |name: &str| request.lines().find_map(|l| l.strip_prefix(&format!("{name}: ")));
    let start =
        header("Range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let start = start.filter(|_| header("If-Range").is_none_or(|tag| tag == etag));
    let (head, rest) = match start {
        None => (format!("200 OK\r\nContent-Length: {}", body.len()), body),
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", body.len() - 1, body.len());
            let length = body.len() - start;
            (
                format!("206 Partial Content\r\nContent-Range: {range}\r\nContent-Length: {length}"),
                &body[start..],
            )
        }
    };
    answer(&format!("{head}\r\nETag: {etag}"), &rest[..sent.min(rest.len())])
}

fn quick() -> Patience {
    Patience { attempts: 3, first_wait: Duration::from_millis(1), silence: Duration::from_secs(60) }
}

fn fetch(source: &Source, folder: &Path) -> Result<Downloaded, DownloadError> {
    download(source, folder, &quick(), &mut |_| {})
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_file_is_fetched_checked_and_not_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = &folder.path().join("new/folder");
    let server = Server::of(vec![whole(&body(), "")]);
    let mut seen = Vec::new();
    let mut tell = |event: DownloadEvent<'_>| {
        if let DownloadEvent::Progress { done, total, .. } = event {
            seen.push((done, total));
        }
    };
    let source = server.source(Some(sum(&body()).to_uppercase()));
    let done = download(&source, folder, &quick(), &mut tell).unwrap();
    assert_eq!((done.bytes, done.was_there, &done.sha256), (300_000, false, &sum(&body())));
    assert_eq!(seen.last(), Some(&(300_000, Some(300_000))));
    assert_eq!(fs::read(folder.join("file.gz")).unwrap(), body());
    assert_eq!(names(folder), ["file.gz", "file.gz.sha256"]);
    assert_eq!(
        fs::read_to_string(folder.join("file.gz.sha256")).unwrap(),
        format!("{}  file.gz\n", sum(&body()))
    );
    assert_eq!(read_checksums(&folder.join("file.gz.sha256")).unwrap()["file.gz"], sum(&body()));
    assert!(fetch(&server.source(None), folder).unwrap().was_there);
    assert_eq!(server.count(), 1);
    // What is there and is something else is not overwritten.
    fs::write(folder.join("file.gz"), "mine").unwrap();
    let error = fetch(&server.source(None), folder).unwrap_err().to_string();
    assert!(error.contains("move it away"), "{error}");
    assert_eq!(fs::read(folder.join("file.gz")).unwrap(), b"mine");
}

#[test]
fn cut_connections_go_on_where_they_broke() {
    let folder = tempfile::tempdir().unwrap();
    // A new part each time: attempts are counted only where nothing came.
    let server = Server::new(Box::new(|request| ranged(request, &body(), "\"v1\"", 40_000)));
    let done = fetch(&server.source(Some(sum(&body()))), folder.path()).unwrap();
    assert_eq!((done.bytes, server.count()), (300_000, 8));
    let requests = server.requests.lock().unwrap();
    assert!(!requests[0].contains("Range:"));
    assert!(requests[7].contains("Range: bytes=280000-\r\n") && requests[7].contains("If-Range: \"v1\"\r\n"));
}

#[test]
fn another_process_goes_on_and_a_changed_file_begins_again() {
    let folder = tempfile::tempdir().unwrap();
    let dead = Server::new(Box::new(|request| {
        ranged(request, &body(), "\"v1\"", if request.contains("Range:") { 0 } else { 1000 })
    }));
    let source = dead.source(None);
    let error = fetch(&source, folder.path()).unwrap_err().to_string();
    assert!(error.contains("3 attempts") && error.contains("1000 bytes are kept"), "{error}");
    assert_eq!(names(folder.path()), [".file.gz.part", ".file.gz.part.json"]);
    let port = dead.port;
    drop(dead);
    // The same address with another version of the file: `If-Range` makes the server send all of it.
    let notes = folder.path().join(".file.gz.part.json");
    let other: Vec<u8> = body().into_iter().rev().collect();
    let sent = other.clone();
    let server = Server::new(Box::new(move |request| ranged(request, &sent, "\"v2\"", usize::MAX)));
    let text = fs::read_to_string(&notes).unwrap().replace(&port.to_string(), &server.port.to_string());
    fs::write(&notes, text).unwrap();
    let done = fetch(&server.source(None), folder.path()).unwrap();
    assert_eq!((done.sha256, server.count()), (sum(&other), 1));
    assert!(server.requests.lock().unwrap()[0].contains("Range: bytes=1000-"));
}

#[test]
fn a_server_without_ranges_is_asked_from_the_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let cut = answer(&format!("200 OK\r\nContent-Length: {}", 300_000), &body()[..5000]);
    let server = Server::of(vec![cut.clone(), cut, whole(&body(), "")]);
    assert_eq!(fetch(&server.source(None), folder.path()).unwrap().sha256, sum(&body()));
    assert!(!server.requests.lock().unwrap()[2].contains("Range:"), "nothing says that it is the same file");
    // With a known checksum a range is worth a try; a server that does not know ranges sends all.
    let folder = tempfile::tempdir().unwrap();
    let server =
        Server::of(vec![answer("200 OK\r\nContent-Length: 300000", &body()[..5000]), whole(&body(), "")]);
    assert_eq!(fetch(&server.source(Some(sum(&body()))), folder.path()).unwrap().bytes, 300_000);
    assert!(server.requests.lock().unwrap()[1].contains("Range: bytes=5000-"));
}

#[test]
fn wrong_ranges_and_lengths_are_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let first = answer("200 OK\r\nETag: \"a\"\r\nContent-Length: 300000", &body()[..1000]);
    let shifted = answer("206 Partial Content\r\nContent-Range: bytes 5-299999/300000", &body()[5..]);
    let larger = answer("206 Partial Content\r\nContent-Range: bytes 1000-399999/400000", &body()[1000..]);
    let server = Server::of(vec![first.clone(), shifted, whole(&body(), "")]);
    assert_eq!(fetch(&server.source(None), folder.path()).unwrap().sha256, sum(&body()));
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![first.clone(), larger, whole(&body(), "")]);
    assert_eq!(fetch(&server.source(None), folder.path()).unwrap().sha256, sum(&body()));
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![first, answer("416 Range Not Satisfiable", b""), whole(&body(), "")]);
    assert_eq!(fetch(&server.source(None), folder.path()).unwrap().sha256, sum(&body()));
    // Always one byte too few.
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![answer("200 OK\r\nContent-Length: 300001", &body())]);
    let error = fetch(&server.source(None), folder.path()).unwrap_err().to_string();
    assert!(error.contains("gave up after 3 attempts") && error.contains("broke"), "{error}");
    assert!(!folder.path().join("file.gz").exists());
}

#[test]
fn a_wrong_checksum_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![whole(&body()[1..], "")]);
    let error = fetch(&server.source(Some(sum(&body()))), folder.path()).unwrap_err();
    assert!(
        matches!(&error, DownloadError::Checksum { found, .. } if *found == sum(&body()[1..])),
        "{error}"
    );
    assert_eq!((server.count(), names(folder.path()).len()), (1, 0));
    // Where it was resumed the parts may not belong together: once more from the beginning.
    let (mut bad, good) = (body(), body());
    bad[10] ^= 1;
    let first = answer("200 OK\r\nETag: \"a\"\r\nContent-Length: 300000", &bad[..1000]);
    let rest = answer(
        "206 Partial Content\r\nContent-Range: bytes 1000-299999/300000\r\nContent-Length: 299000",
        &good[1000..],
    );
    let server = Server::of(vec![first, rest, whole(&good, "")]);
    assert_eq!(fetch(&server.source(Some(sum(&good))), folder.path()).unwrap().sha256, sum(&good));
    assert_eq!(server.count(), 3);
}

#[test]
fn answers_that_are_final_and_answers_that_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![answer("404 Not Found\r\nContent-Length: 2", b"no")]);
    let error = fetch(&server.source(None), folder.path()).unwrap_err().to_string();
    assert!(error.contains("404 Not Found") && error.contains("--mirror"), "{error}");
    assert_eq!(server.count(), 1);
    let busy = answer("503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 0", b"");
    let moved = answer("302 Found\r\nLocation: /other\r\nContent-Length: 0", b"");
    let server = Server::of(vec![busy.clone(), moved, whole(&body(), "")]);
    assert_eq!(fetch(&server.source(None), folder.path()).unwrap().bytes, 300_000);
    let server = Server::of(vec![busy]);
    let other = tempfile::tempdir().unwrap();
    let error = fetch(&server.source(None), other.path()).unwrap_err().to_string();
    assert!(error.contains("gave up after 3 attempts") && error.contains("503"), "{error}");
    // Nobody listens.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let source = Source { url: format!("http://127.0.0.1:{port}/x"), name: "x".into(), sha256: None };
    assert!(matches!(fetch(&source, other.path()).unwrap_err(), DownloadError::GaveUp { .. }));
    // An answer without a length may be a part: a checksum must tell.
    let chunks = answer("200 OK\r\nTransfer-Encoding: chunked", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
    let server =
        Server::of(vec![answer("200 OK\r\nTransfer-Encoding: chunked", b"3\r\nabc\r\n2\r\nd"), chunks]);
    let third = tempfile::tempdir().unwrap();
    assert_eq!(fetch(&server.source(Some(sum(b"abcde"))), third.path()).unwrap().bytes, 5);
    let error = fetch(&server.source(None), other.path()).unwrap_err().to_string();
    assert!(
        error.contains("does not say how long") && names(other.path()).iter().all(|n| n.starts_with('.')),
        "{error}"
    );
}

#[test]
fn a_full_disk_is_said_before_or_while_it_fills() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::of(vec![answer("200 OK\r\nContent-Length: 9000000000000000000", b"abc")]);
    let error = fetch(&server.source(None), folder.path()).unwrap_err().to_string();
    assert!(error.contains("needs 9000000000000000000 more bytes"), "{error}");
    if !Path::new("/dev/full").exists() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path().join(".file.gz.part")).unwrap();
    let server = Server::of(vec![whole(&body(), "")]);
    let error = fetch(&server.source(None), folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot write the file") && error.contains("free some space"), "{error}");
    assert!(!folder.path().join("file.gz").exists());
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = |url: &str, name: &str, sum: Option<&str>| {
        let source = Source { url: url.into(), name: name.into(), sha256: sum.map(str::to_owned) };
        fetch(&source, folder.path()).unwrap_err().to_string()
    };
    assert!(source("http://a/x", "../x", None).contains("no name for a file"));
    assert!(source("http://a/x", ".x", None).contains("no name for a file"));
    assert!(source("ftp://a/x", "x", None).contains("begins with http"));
    assert!(source("http://a/x", "x", Some("12")).contains("64 hexadecimal digits"));
    if !cfg!(feature = "tls") {
        assert!(source("https://a/x", "x", None).contains("feature `tls`"));
    }
    let list = folder.path().join("list");
    fs::write(&list, "zz  x\n").unwrap();
    assert!(read_checksums(&list).unwrap_err().to_string().contains("line 1: expected a SHA-256"));
}

#[test]
fn archives_are_unpacked_below_their_folder_only() {
    use flate2::{Compression, write::GzEncoder};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tar.gz");
    let make = |entries: &[(&str, tar::EntryType, &[u8])]| {
        let mut builder = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (name, kind, bytes) in entries {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(bytes.len() as u64);
            header.set_cksum();
            builder.append(&header, *bytes).unwrap();
        }
        fs::write(&path, builder.into_inner().unwrap().finish().unwrap()).unwrap();
    };
    let file = tar::EntryType::Regular;
    let out = folder.path().join("out");
    make(&[
        ("./", tar::EntryType::Directory, b""),
        ("./nq/train.json", file, b"{}"),
        ("NQ.idx", file, b"[]"),
    ]);
    assert_eq!(unpack(&path, &out).unwrap(), [out.join("nq/train.json"), out.join("NQ.idx")]);
    assert_eq!(fs::read(out.join("nq/train.json")).unwrap(), b"{}");
    let bytes = fs::read(&path).unwrap();
    for (name, kind, part) in [
        ("../x", file, "would leave"),
        ("/x", file, "would leave"),
        ("a\\..\\x", file, "would leave"),
        ("x", tar::EntryType::Symlink, "neither a file nor a folder"),
        ("x", tar::EntryType::Fifo, "neither a file nor a folder"),
    ] {
        make(&[(name, kind, b"")]);
        let error = unpack(&path, &out).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    std::os::unix::fs::symlink(folder.path(), out.join("link")).unwrap();
    make(&[("link/x", file, b"x")]);
    assert!(unpack(&path, &out).unwrap_err().to_string().contains("through a link"));
    assert!(!folder.path().join("x").exists());
    make(&[]);
    assert!(unpack(&path, &out).unwrap_err().to_string().contains("found none"));
    fs::write(&path, &bytes[..bytes.len() - 30]).unwrap();
    assert!(unpack(&path, &out).unwrap_err().to_string().contains("cut off or damaged"));
    let zipped = folder.path().join("t.gz");
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(b"text").unwrap();
    let gz = encoder.finish().unwrap();
    fs::write(&zipped, &gz).unwrap();
    assert_eq!(gunzip(&zipped, &out.join("t")).unwrap(), 4);
    fs::write(&zipped, &gz[..gz.len() - 4]).unwrap();
    assert!(gunzip(&zipped, &out.join("u")).unwrap_err().to_string().contains("cut off"));
    assert!(!out.join("u").exists() && names(&out).iter().all(|name| !name.ends_with(".tmp")));
}
