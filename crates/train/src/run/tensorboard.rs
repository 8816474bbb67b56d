//! `RUN/tensorboard/`: event files that TensorBoard opens.
//!
//! An event file is a row of TFRecords (length, masked CRC-32C of the length, data, masked CRC-32C of the data), each a protobuf
//! `Event`. Layout and field numbers: TensorFlow `core/lib/io/record_writer.h`, `core/util/event.proto`, `core/framework/summary.proto`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::{Context, RunError};
use super::files;

/// One record: a scalar's value at a step, or a note on the file or session.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `SessionLog.SessionStatus.START`: TensorBoard hides earlier events of this step and later ones.
const SESSION_START: i32 = 1;

/// An open event file; every event is handed to the system at once.
#[derive(Debug)]
pub struct TensorboardWriter {
    path: PathBuf,
    file: File,
}

impl TensorboardWriter {
    /// Starts a new event file in `run_dir/tensorboard`. With `resume_step` N the file tells TensorBoard to forget what earlier
    /// files say of steps after N, which the run will write again.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn open(run_dir: &Path, resume_step: Option<u64>) -> Result<Self, RunError> {
        let dir = run_dir.join("tensorboard");
        std::fs::create_dir_all(&dir).context("create the folder", &dir)?;
        // TensorBoard reads a folder's files in the order of their names: the time comes first, then what makes it unique.
        let (time, host) = (files::unix_time() as u64, files::host_name());
        let name =
            format!("events.out.tfevents.{time:010}.{host}.{}.{}", std::process::id(), files::random_hex(4));
        let path = dir.join(name);
        let file = File::options().create_new(true).append(true).open(&path).context("create", &path)?;
        let mut writer = Self { path, file };
        writer.write(0, What::FileVersion("brain.Event:2".into()))?;
        if let Some(step) = resume_step {
            writer.write(step.saturating_add(1), What::SessionLog(SessionLog { status: SESSION_START }))?;
        }
        Ok(writer)
    }

    /// Writes scalars (tag, value) of one step; tags such as `train/loss` make groups.
    ///
    /// # Errors
    /// When the record cannot be written, for one because the disk is full.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), RunError> {
        let value =
            |&(tag, value): &(&str, f64)| SummaryValue { tag: tag.into(), simple_value: Some(value as f32) };
        self.write(step, What::Summary(Summary { value: scalars.iter().map(value).collect() }))
    }

    fn write(&mut self, step: u64, what: What) -> Result<(), RunError> {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let record = frame(&Event { wall_time: files::unix_time(), step, what: Some(what) }.encode_to_vec());
        let needed = Some(record.len() as u64);
        self.file.write_all(&record).map_err(|error| RunError::from_io("write", &self.path, needed, error))
    }
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

/// A CRC of data that holds CRCs is weak, so TFRecords rotate it and add a constant.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), RFC 3720 appendix B.4; reflected polynomial 0x82f63b78. Events are too small to need more than a table.
fn crc32c(data: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0u32; 256];
        let mut index = 0;
        while index < 256 {
            let mut crc = index as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[index] = crc;
            index += 1;
        }
        table
    };
    !data.iter().fold(!0u32, |crc, &byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(crc(8), masked_crc(&bytes[..8]));
            let data = &bytes[12..12 + length];
            assert_eq!(crc(12 + length), masked_crc(data));
            events.push(Event::decode(data).unwrap());
            bytes = &bytes[16 + length..];
        }
        events
    }

    #[test]
    fn crc32c_has_the_check_values() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // RFC 3720, B.4: 32 bytes of zeros, and of ones.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn events_have_the_bytes_of_the_format() {
        // By hand from event.proto: wall_time 1.0, step 3, summary { value { tag "a", simple_value 0.5 } }.
        let summary = Summary { value: vec![SummaryValue { tag: "a".into(), simple_value: Some(0.5) }] };
        let event = Event { wall_time: 1.0, step: 3, what: Some(What::Summary(summary)) };
        let expected = [
            0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x10, 3, 0x2a, 10, 0x0a, 8, 0x0a, 1, b'a', 0x15, 0, 0, 0,
            0x3f,
        ];
        assert_eq!(event.encode_to_vec(), expected);
    }

    #[test]
    fn a_resumed_run_starts_a_file_that_hides_repeated_steps() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = TensorboardWriter::open(dir.path(), None).unwrap();
        first.scalars(1, &[("train/loss", 2.0), ("train/lr", 0.0)]).unwrap();
        let events = parse(&std::fs::read(&first.path).unwrap());
        assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".into())));
        let Some(What::Summary(summary)) = &events[1].what else { panic!("{events:?}") };
        assert_eq!((events[1].step, summary.value.len()), (1, 2));
        assert_eq!(summary.value[1].simple_value, Some(0.0), "a zero is written, not left out");

        let second = TensorboardWriter::open(dir.path(), Some(1)).unwrap();
        assert_ne!(first.path, second.path);
        let events = parse(&std::fs::read(&second.path).unwrap());
        assert_eq!(events.len(), 2);
        assert_eq!(
            (events[1].step, events[1].what.clone()),
            (2, Some(What::SessionLog(SessionLog { status: 1 })))
        );
    }
}
