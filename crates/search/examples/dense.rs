//! Dense search as a process that takes turns with another one: `bench/dense.py` times it beside faiss.
//!
//!     cargo run --release -p tercio-search --example dense -- VECTORS QUERIES DEPTH THREADS [INDEX LISTS CODE_BYTES]
//!
//! QUERIES: a folder of vectors, or a file of little-endian f32. With INDEX a compressed index is built there, if there is none.
//! Commands come on the standard input, one a line, and each is answered by a line of JSON with `seconds` and `processor_seconds`: `disk`, `batch`, `single N`
//! (exact search), `hits FILE` (rows that the exact search finds, as i64), `compressed PROBES RESCORE` (with `recall`).

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tercio_data::Vectors;
use tercio_engine::Cpu;
use tercio_search::Hit;
use tercio_search::compressed::{CompressedIndex, CompressedOptions, CompressedSearch};
use tercio_search::flat::{FlatIndex, Metric, Resident, read_all};
use tercio_search::manifest::Collection;

type Failure = Box<dyn std::error::Error>;

const GO_ON: &dyn Fn() -> bool = &|| false;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [vectors, queries, depth, threads, index @ ..] = args.as_slice() else {
        return Err("expected: VECTORS QUERIES DEPTH THREADS [INDEX LISTS CODE_BYTES]".into());
    };
    let cpu = Cpu::new(threads.parse()?)?;
    let queries = match Path::new(queries).is_dir() {
        true => read_all(&Vectors::open(Path::new(queries))?)?,
        false => std::fs::read(queries)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    };
    let vectors = Path::new(vectors);
    let (disk, start) = (FlatIndex::open(vectors, Metric::Inner)?, Instant::now());
    let resident = FlatIndex::open(vectors, Metric::Inner)?.load(&cpu, &|| false)?;
    let mut ready = json!({
        "arithmetic": tercio_engine::Device::arithmetic(&cpu), "load_seconds": start.elapsed().as_secs_f64(),
        "resident_bytes": resident.bytes(), "rows": resident.vectors().len(),
    });
    let compressed = match index {
        [dir, lists, code_bytes] => {
            let start = Instant::now();
            if !Path::new(dir).join("manifest.json").exists() {
                let options = CompressedOptions {
                    lists: lists.parse()?,
                    code_bytes: code_bytes.parse()?,
                    queries: Some(queries.clone()),
                    ..Default::default()
                };
                let of = Vectors::open(vectors)?;
                let collection = Collection { path: of.dir().into(), fingerprint: None, count: of.len() };
                let report = CompressedIndex::build(
                    &cpu,
                    &of,
                    collection,
                    Path::new(dir),
                    &options,
                    GO_ON,
                    &mut |_| {},
                )?;
                report.warnings.iter().for_each(|warning| eprintln!("{warning}"));
            }
            ready["build_seconds"] = json!(start.elapsed().as_secs_f64());
            let mut index = CompressedIndex::open(&cpu, Path::new(dir), true)?;
            index.keep_vectors(&cpu)?;
            ready["index_bytes"] = json!(index.bytes());
            ready["settings"] = json!(index.settings());
            Some(index)
        }
        _ => None,
    };
    println!("{ready}");
    let work = Work { cpu, disk, resident, compressed, queries, depth: depth.parse()? };
    let mut exact = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        if words == ["quit"] {
            break;
        }
        if words[0] == "compressed" && exact.is_none() {
            exact = Some(work.resident.search(&work.cpu, &work.queries, work.depth, GO_ON)?);
        }
        let (start, used) = (Instant::now(), processor_seconds());
        let found = work.answer(&words)?;
        let mut answer = json!({"seconds": start.elapsed().as_secs_f64()});
        answer["processor_seconds"] = json!(processor_seconds() - used);
        if let (Some(exact), "compressed") = (&exact, words[0]) {
            answer["recall"] = json!(recall(&found, exact));
            answer["recall_10"] = json!(recall(&first(&found), &first(exact)));
        }
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

struct Work {
    cpu: Cpu,
    disk: FlatIndex,
    resident: Resident,
    compressed: Option<CompressedIndex>,
    queries: Vec<f32>,
    depth: usize,
}

impl Work {
    fn answer(&self, words: &[&str]) -> Result<Vec<Vec<Hit>>, Failure> {
        let Work { cpu, queries, depth, .. } = self;
        let depth = *depth;
        match *words {
            ["batch"] => Ok(self.resident.search(cpu, queries, depth, GO_ON)?),
            ["disk"] => Ok(self.disk.search(cpu, queries, depth, GO_ON, &mut |_| {})?),
            ["single", n] => {
                let one = |query| self.resident.search(cpu, query, depth, GO_ON);
                let dimension = self.disk.vectors().dimension();
                for query in queries.chunks(dimension).take(n.parse()?) {
                    one(query)?;
                }
                Ok(Vec::new())
            }
            ["hits", path] => {
                let found = self.resident.search(cpu, queries, depth, GO_ON)?;
                let rows = found.iter().flatten().flat_map(|hit| (hit.row as i64).to_le_bytes());
                std::fs::write(path, rows.collect::<Vec<u8>>())?;
                Ok(found)
            }
            ["compressed", probes, rescore] => {
                let index = self.compressed.as_ref().ok_or("no compressed index was named")?;
                let how = CompressedSearch { depth, probes: probes.parse()?, rescore: rescore.parse()? };
                Ok(index.search(cpu, queries, how, GO_ON)?)
            }
            _ => Err(format!("no such command: {words:?}").into()),
        }
    }
}

/// Seconds of all processors that this process has used; in hundredths, as Linux counts.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // `utime` and `stime` (proc(5)) are fields 14 and 15, of which the name in brackets is the second.
    fields.skip(11).take(2).filter_map(|f| f.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn first(hits: &[Vec<Hit>]) -> Vec<Vec<Hit>> {
    hits.iter().map(|hits| hits.iter().take(10).copied().collect()).collect()
}

fn recall(found: &[Vec<Hit>], exact: &[Vec<Hit>]) -> f64 {
    let (mut hits, mut all) = (0, 0);
    for (found, exact) in found.iter().zip(exact) {
        let found: HashSet<u64> = found.iter().map(|hit| hit.row).collect();
        all += exact.len();
        hits += exact.iter().filter(|hit| found.contains(&hit.row)).count();
    }
    hits as f64 / (all as f64).max(1.0)
}
