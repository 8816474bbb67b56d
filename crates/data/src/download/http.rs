//! One file over HTTP, attempt after attempt.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use ureq::{Agent, AgentBuilder, ErrorKind, Proxy, Response};

use super::part::{Part, Version, sha256};
use super::proxy::proxy_of;
use super::{DownloadError, DownloadEvent, Downloaded, Patience, Sentence, Source};

/// Longest wait between attempts, whatever a server asks for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Bytes between two events of progress.
const PROGRESS: u64 = 1 << 20;

/// What came of one attempt.
enum Attempt {
    Complete,
    /// It may go on, after the server's own wait if it named one.
    Cut(String, Option<Duration>),
}

/// Fetches a file into a folder, which is made; a file that is there already, and is what it should be, is left as it is.
///
/// # Errors
/// The server has no such file, breaks off again and again, or sends other bytes than announced; the disk is full.
pub fn download(
    source: &Source,
    folder: &Path,
    patience: &Patience,
    tell: &mut dyn FnMut(DownloadEvent<'_>),
) -> Result<Downloaded, DownloadError> {
    check(source)?;
    fs::create_dir_all(folder).map_err(|source| DownloadError::Io {
        path: folder.to_owned(),
        action: "create the folder",
        source,
    })?;
    let expected = source.sha256.as_ref().map(|sum| sum.to_ascii_lowercase());
    if let Some(there) = already_there(source, folder, expected.as_deref())? {
        return Ok(there);
    }
    let target = folder.join(&source.name);
    let mut part = Part::open(folder, &source.name)?;
    if !part.is_current() {
        // Another process finished between the two steps above.
        return download(source, folder, patience, tell);
    }
    if part.version.url != source.url {
        part.restart(Version { url: source.url.clone(), ..Version::default() })?;
    }
    let agent = agent(&source.url, patience)?;
    let mut retried = false;
    loop {
        let resumed = fetch(source, &agent, &mut part, patience, tell)?;
        let found = part.sha256()?;
        match &expected {
            Some(expected) if *expected != found => {
                let (path, url) = (target.clone(), source.url.clone());
                let may_be_cut = resumed || part.version.total.is_none();
                if !may_be_cut || retried {
                    part.discard();
                    return Err(DownloadError::Checksum { path, url, expected: expected.clone(), found });
                }
                tell(DownloadEvent::Note(format!("{}: not what it should be; begins again", source.name)));
                retried = true;
                part.restart(Version { url: source.url.clone(), ..Version::default() })?;
            }
            _ => {
                let bytes = part.done;
                part.keep(&target)?;
                store_sum(folder, &source.name, &found)?;
                return Ok(Downloaded { path: target, bytes, sha256: found, was_there: false });
            }
        }
    }
}

/// Attempts until the part is complete. Whether bytes from before were used.
fn fetch(
    source: &Source,
    agent: &Agent,
    part: &mut Part,
    patience: &Patience,
    tell: &mut dyn FnMut(DownloadEvent<'_>),
) -> Result<bool, DownloadError> {
    let (mut attempts, mut wait, mut best) = (0, patience.first_wait, part.done);
    let mut resumed = part.done > 0;
    loop {
        let before = part.done;
        let (reason, asked) = match attempt(source, agent, part, tell)? {
            Attempt::Complete => return Ok(resumed && before > 0),
            Attempt::Cut(reason, asked) => (reason, asked),
        };
        resumed = true;
        if part.done > best {
            (attempts, wait, best) = (0, patience.first_wait, part.done);
        }
        attempts += 1;
        if attempts >= patience.attempts {
            let (url, done, reason) = (source.url.clone(), part.done, Sentence(reason));
            return Err(DownloadError::GaveUp { url, attempts, done, reason });
        }
        let pause = asked.unwrap_or(wait).min(LONGEST_WAIT);
        tell(DownloadEvent::Note(format!(
            "{}: {reason}; goes on in {:.0} s from byte {}",
            source.name,
            pause.as_secs_f64(),
            part.done
        )));
        std::thread::sleep(pause);
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

fn attempt(
    source: &Source,
    agent: &Agent,
    part: &mut Part,
    tell: &mut dyn FnMut(DownloadEvent<'_>),
) -> Result<Attempt, DownloadError> {
    if part.done > 0 && part.version.total == Some(part.done) {
        return Ok(Attempt::Complete);
    }
    // The bytes as they are stored: a range of an encoded answer means nothing.
    let mut request = agent.get(&source.url).set("Accept-Encoding", "identity");
    let condition = part.version.condition().map(str::to_owned);
    if part.done > 0 && (condition.is_some() || source.sha256.is_some()) {
        request = request.set("Range", &format!("bytes={}-", part.done));
        if let Some(condition) = &condition {
            request = request.set("If-Range", condition);
        }
    }
    let response = match request.call() {
        Ok(response) => response,
        Err(ureq::Error::Status(416, _)) => {
            part.restart(Version { url: source.url.clone(), ..Version::default() })?;
            return Ok(Attempt::Cut("the server has no such range of the file".into(), None));
        }
        Err(ureq::Error::Status(code, response)) => {
            let status = status(&response);
            if matches!(code, 408 | 425 | 429 | 500..=599) {
                let asked = response.header("Retry-After").and_then(|v| v.trim().parse().ok());
                return Ok(Attempt::Cut(
                    format!("the server answered {status}"),
                    asked.map(Duration::from_secs),
                ));
            }
            return Err(DownloadError::Status { url: source.url.clone(), status });
        }
        Err(ureq::Error::Transport(e)) => {
            return match e.kind() {
                ErrorKind::InvalidUrl | ErrorKind::UnknownScheme | ErrorKind::InsecureRequestHttpsOnly => {
                    Err(DownloadError::Unusable(format!(
                        "{}: not an address that can be opened: {e}",
                        source.url
                    )))
                }
                _ => Ok(Attempt::Cut(e.to_string(), None)),
            };
        }
    };
    let total = match response.status() {
        200 => {
            let total = response.header("Content-Length").and_then(|v| v.trim().parse().ok());
            // Where neither is known, a cut answer would pass for a whole one.
            if total.is_none() && source.sha256.is_none() {
                return Err(DownloadError::Unusable(format!(
                    "{}: the server does not say how long the file is; name its SHA-256 in a file for --checksums, or \
                     another server with --mirror",
                    source.url
                )));
            }
            if part.done > 0 {
                tell(DownloadEvent::Note(format!("{}: the server sends it from its beginning", source.name)));
            }
            part.restart(version(&source.url, &response, total))?;
            total
        }
        206 => {
            let range = response.header("Content-Range").and_then(content_range);
            let total = part.version.total;
            let fits = range.is_some_and(|(start, found)| {
                start == part.done && (total.is_none() || found.is_none() || found == total)
            });
            if !fits {
                let found = response.header("Content-Range").unwrap_or("none").to_owned();
                part.restart(Version { url: source.url.clone(), ..Version::default() })?;
                return Ok(Attempt::Cut(
                    format!("the server sent another range than was asked for ({found})"),
                    None,
                ));
            }
            total.or(range.and_then(|(_, found)| found))
        }
        _ => return Err(DownloadError::Status { url: source.url.clone(), status: status(&response) }),
    };
    if let Some(total) = total {
        room(part.folder(), source, total.saturating_sub(part.done))?;
    }
    receive(source, part, response, total, tell)
}

fn receive(
    source: &Source,
    part: &mut Part,
    response: Response,
    total: Option<u64>,
    tell: &mut dyn FnMut(DownloadEvent<'_>),
) -> Result<Attempt, DownloadError> {
    let mut reader = response.into_reader();
    let mut buffer = vec![0; 1 << 17];
    let mut told = None;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => part.append(&buffer[..n])?,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Ok(Attempt::Cut(format!("the connection broke ({e})"), None)),
        }
        if told.is_none_or(|told| part.done >= told + PROGRESS) {
            told = Some(part.done);
            tell(DownloadEvent::Progress { name: &source.name, done: part.done, total });
        }
    }
    match total {
        Some(total) if part.done < total => {
            Ok(Attempt::Cut(format!("the server ended after {} of {total} bytes", part.done), None))
        }
        Some(total) if part.done > total => {
            let what = format!("the server sent {} bytes, and had announced {total}", part.done);
            part.restart(Version { url: source.url.clone(), ..Version::default() })?;
            Ok(Attempt::Cut(what, None))
        }
        _ => {
            tell(DownloadEvent::Progress { name: &source.name, done: part.done, total: Some(part.done) });
            Ok(Attempt::Complete)
        }
    }
}

/// Refuses what could not be fetched or stored.
fn check(source: &Source) -> Result<(), DownloadError> {
    let unusable = |what: String| Err(DownloadError::Unusable(what));
    let name = &source.name;
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return unusable(format!("{name:?} is no name for a file; expected one without slashes"));
    }
    if let Some(sum) = &source.sha256
        && !(sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit()))
    {
        return unusable(format!("{name}: expected 64 hexadecimal digits as its SHA-256, found {sum:?}"));
    }
    match source.url.split_once("://").map(|(scheme, _)| scheme) {
        Some("http") => Ok(()),
        Some("https") if cfg!(feature = "tls") => Ok(()),
        Some("https") => unusable(format!(
            "{}: this build cannot open https; build with the feature `tls`, or name an http server with --mirror",
            source.url
        )),
        _ => unusable(format!("{}: expected an address that begins with http:// or https://", source.url)),
    }
}

fn agent(url: &str, patience: &Patience) -> Result<Agent, DownloadError> {
    let mut builder = AgentBuilder::new()
        .timeout_connect(patience.silence)
        .timeout_read(patience.silence)
        .timeout_write(patience.silence)
        .redirects(10)
        .user_agent(concat!("tercio/", env!("CARGO_PKG_VERSION")));
    if let Some(proxy) = proxy_of(url, |name| std::env::var(name).ok()) {
        // The proxy's address may hold a password: it is not repeated.
        let proxy = Proxy::new(proxy.trim_end_matches('/')).map_err(|e| {
            DownloadError::Unusable(format!(
                "the proxy that the environment names for {url} cannot be used: {e}"
            ))
        })?;
        builder = builder.proxy(proxy);
    }
    Ok(builder.build())
}

/// A file that is there, if it is the one that is wanted.
fn already_there(
    source: &Source,
    folder: &Path,
    expected: Option<&str>,
) -> Result<Option<Downloaded>, DownloadError> {
    let path = folder.join(&source.name);
    let io = |source| DownloadError::Io { path: path.clone(), action: "read the file", source };
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let bytes = file.metadata().map_err(io)?.len();
    let found = sha256(&mut file).map_err(io)?;
    let stored = match fs::read_to_string(folder.join(format!("{}.sha256", source.name))) {
        Ok(text) => text.split_whitespace().next().map(str::to_owned),
        Err(_) => None,
    };
    let wanted = expected.map(str::to_owned).or_else(|| stored.clone());
    if let Some(wanted) = wanted.filter(|wanted| *wanted != found) {
        return Err(DownloadError::Unusable(format!(
            "{}: is there with the SHA-256 {found}, expected {wanted}; move it away to download it again",
            path.display()
        )));
    }
    if stored.is_none() {
        store_sum(folder, &source.name, &found)?;
    }
    Ok(Some(Downloaded { path, bytes, sha256: found, was_there: true }))
}

fn store_sum(folder: &Path, name: &str, sum: &str) -> Result<(), DownloadError> {
    let (temporary, path) =
        (folder.join(format!(".{name}.sha256.tmp")), folder.join(format!("{name}.sha256")));
    let written =
        fs::write(&temporary, format!("{sum}  {name}\n")).and_then(|()| fs::rename(&temporary, &path));
    written.map_err(|source| DownloadError::Io { path, action: "write the file", source })
}

/// Reads a list of checksums as `sha256sum` writes it: name to SHA-256.
///
/// # Errors
/// A file that cannot be read, a line that is none of `sha256sum`.
pub fn read_checksums(path: &Path) -> Result<BTreeMap<String, String>, DownloadError> {
    let text = fs::read_to_string(path).map_err(|source| DownloadError::Io {
        path: path.to_owned(),
        action: "read the file",
        source,
    })?;
    let mut sums = BTreeMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let pair = line.split_once([' ', '\t']).map(|(sum, name)| (sum, name.trim().trim_start_matches('*')));
        match pair {
            Some((sum, name)) if sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit()) => {
                sums.insert(name.to_owned(), sum.to_ascii_lowercase());
            }
            _ => {
                return Err(DownloadError::Unusable(format!(
                    "{}: line {}: expected a SHA-256 and a name as sha256sum writes them, found {line:?}",
                    path.display(),
                    i + 1
                )));
            }
        }
    }
    Ok(sums)
}

fn version(url: &str, response: &Response, total: Option<u64>) -> Version {
    // A weak tag stands for the same meaning, not for the same bytes.
    let etag = response.header("ETag").filter(|tag| !tag.starts_with("W/")).map(str::to_owned);
    let modified = response.header("Last-Modified").map(str::to_owned);
    Version { url: url.to_owned(), etag, modified, total }
}

/// `bytes START-END/TOTAL`.
fn content_range(value: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-')?.0.trim().parse().ok()?;
    let total = if total == "*" { None } else { Some(total.trim().parse().ok()?) };
    Some((start, total))
}

fn status(response: &Response) -> String {
    format!("{} {}", response.status(), response.status_text())
}

fn room(folder: &Path, source: &Source, needed: u64) -> Result<(), DownloadError> {
    let Ok(stat) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if needed > free {
        return Err(DownloadError::NoRoom { path: folder.join(&source.name), needed, free });
    }
    Ok(())
}
