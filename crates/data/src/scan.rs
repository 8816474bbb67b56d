//! Finds where the items of a data file lie, in one pass over chunks of bytes and in constant memory.
//!
//! The scanner knows strings, brackets, quotes and line ends only; whether an item is valid JSON is decided when
//! it is read, so that one bad item does not hide the others.

use crate::convert::tsv;

/// Where one item lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte.
    pub offset: u64,
    /// Bytes, without the line end.
    pub length: u64,
    /// Line of the first byte, from 1.
    pub line: u64,
}

/// How the items are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One JSON list.
    List,
    /// One object per line.
    Lines,
    /// One row of fields per line, whatever is in it.
    Rows,
    /// Rows of fields between separators as Python's csv module writes them: a quoted field may hold line ends.
    Records(u8),
}

/// A fault of the file as a whole: the line, and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub line: u64,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the list's `[`.
    Start,
    /// After `[`: an item or `]`.
    FirstItem,
    /// After `,`: an item.
    NextItem,
    /// Inside an item that is an object, a list or a string; `depth` brackets are open.
    Nested { depth: u64, string: bool, escape: bool },
    /// Inside an item that is a bare word or a number.
    Bare,
    /// After an item: `,` or `]`.
    AfterItem,
    /// After the list's `]`.
    End,
    /// Between or inside lines (layout `Lines`); `blank` while only white space was seen.
    Line { blank: bool },
    /// Between or inside rows; `open` once a byte of the row was seen, `blank` while only white space was; `field` of a row
    /// whose fields may be quoted.
    Row { open: bool, blank: bool, field: Option<tsv::State> },
    /// After a fault nothing more is looked at.
    Failed,
}

/// The scanner: feed it all bytes in order, then call [`Scanner::finish`].
pub(crate) struct Scanner {
    state: State,
    /// Offset of the next byte.
    offset: u64,
    line: u64,
    start: u64,
    start_line: u64,
    items: u64,
    /// What parts the fields of a row.
    separator: u8,
    /// How many part those of the row at hand.
    separators: u64,
    /// Fewest and most fields of a row.
    fields: Option<(u64, u64)>,
    fault: Option<Fault>,
}

impl Scanner {
    pub fn new(layout: Layout) -> Scanner {
        let state = match layout {
            Layout::List => State::Start,
            Layout::Lines => State::Line { blank: true },
            Layout::Rows => State::Row { open: false, blank: true, field: None },
            Layout::Records(_) => State::Row { open: false, blank: true, field: Some(tsv::State::Start) },
        };
        let separator = if let Layout::Records(separator) = layout { separator } else { b'\t' };
        Scanner {
            state,
            offset: 0,
            line: 1,
            start: 0,
            start_line: 1,
            items: 0,
            separator,
            separators: 0,
            fields: None,
            fault: None,
        }
    }

    /// Looks at the next bytes of the file and hands every item that ends in them to `emit`.
    pub fn feed<E>(&mut self, bytes: &[u8], mut emit: impl FnMut(Span) -> Result<(), E>) -> Result<(), E> {
        for &byte in bytes {
            if let Some(span) = self.step(byte) {
                self.items += 1;
                emit(span)?;
            }
            self.offset += 1;
            self.line += u64::from(byte == b'\n');
        }
        Ok(())
    }

    /// Call after the last byte: the last item of a file without a final line end, the file's fault if it has one, and the fewest
    /// and most fields of its rows where it has rows.
    pub fn finish(mut self) -> (Option<Span>, u64, Option<Fault>, Option<(u64, u64)>) {
        let mut last = None;
        match self.state {
            State::Row { field: Some(tsv::State::Quoted), .. } => {
                self.line = self.start_line;
                self.fail_end("the quote that opens in this record is not closed before the file ends; the file was cut short, or a quote is missing");
            }
            State::Line { blank: false } | State::Row { blank: false, .. } => {
                if let State::Row { .. } = self.state {
                    self.count_fields();
                }
                last = Some(self.span());
                self.items += 1;
            }
            State::Line { .. } | State::Row { .. } | State::End | State::Failed => {}
            State::Start => self.fail_end("expected a JSON list '[' of questions, found an empty file"),
            State::FirstItem | State::NextItem | State::AfterItem => {
                self.fail_end("expected the list's closing ']', found the end of the file; the file was cut short, get it again");
            }
            State::Nested { .. } | State::Bare => {
                self.line = self.start_line;
                self.fail_end(&format!(
                    "item {} starts here and does not end before the file does; the file was cut short, or the item lacks a bracket or a quote",
                    self.items
                ));
            }
        }
        (last, self.items, self.fault, self.fields)
    }

    /// The row at hand is over.
    fn count_fields(&mut self) {
        let n = std::mem::take(&mut self.separators) + 1;
        self.fields = Some(self.fields.map_or((n, n), |(least, most)| (least.min(n), most.max(n))));
    }

    fn span(&self) -> Span {
        Span { offset: self.start, length: self.offset - self.start, line: self.start_line }
    }

    fn fail_end(&mut self, message: &str) {
        self.fault = Some(Fault { line: self.line, message: message.to_string() });
    }

    fn fail(&mut self, message: String) -> Option<Span> {
        self.fault = Some(Fault { line: self.line, message });
        self.state = State::Failed;
        None
    }

    fn begin(&mut self, byte: u8) {
        self.start = self.offset;
        self.start_line = self.line;
        self.state = match byte {
            b'{' | b'[' => State::Nested { depth: 1, string: false, escape: false },
            b'"' => State::Nested { depth: 0, string: true, escape: false },
            _ => State::Bare,
        };
    }

    fn step(&mut self, byte: u8) -> Option<Span> {
        let space = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        match self.state {
            State::Failed => None,
            State::Line { blank } => {
                if byte == b'\n' {
                    let span = (!blank).then(|| self.span());
                    self.state = State::Line { blank: true };
                    return span;
                }
                // a byte order mark is no content
                let mark = self.offset < 3 && [0xEF, 0xBB, 0xBF][self.offset as usize] == byte;
                if blank && !space && !mark {
                    if self.items == 0 && byte == b'[' {
                        return self.fail(
                            "expected an object '{' on every line, found a list '['; a file that is one list must be named .json".into(),
                        );
                    }
                    self.start = self.offset;
                    self.start_line = self.line;
                    self.state = State::Line { blank: false };
                }
                None
            }
            State::Row { open, blank, field } => {
                if !open {
                    self.start = self.offset;
                    self.start_line = self.line;
                    self.separators = 0;
                }
                let field = field.map(|f| f.next(byte, self.separator).0);
                let quoted = field == Some(tsv::State::Quoted);
                self.separators += u64::from(byte == self.separator && !quoted);
                if byte == b'\n' && !quoted {
                    if !blank {
                        self.count_fields();
                    }
                    self.state =
                        State::Row { open: false, blank: true, field: field.map(|_| tsv::State::Start) };
                    return (!blank).then(|| self.span());
                }
                if quoted && self.offset - self.start > tsv::MAX_RECORD {
                    self.line = self.start_line;
                    return self.fail(format!(
                        "expected a record of at most {} bytes, found more; look for a quote that is not closed",
                        tsv::MAX_RECORD
                    ));
                }
                self.state = State::Row { open: true, blank: blank && byte.is_ascii_whitespace(), field };
                None
            }
            State::Nested { depth, string, escape } => {
                let (depth, string, escape) = match (string, byte) {
                    (true, _) if escape => (depth, true, false),
                    (true, b'\\') => (depth, true, true),
                    (true, b'"') => (depth, false, false),
                    (true, _) => (depth, true, false),
                    (false, b'"') => (depth, true, false),
                    (false, b'{' | b'[') => (depth + 1, false, false),
                    (false, b'}' | b']') => (depth - 1, false, false),
                    (false, _) => (depth, false, false),
                };
                if depth == 0 && !string {
                    let mut span = self.span();
                    span.length += 1;
                    self.state = State::AfterItem;
                    return Some(span);
                }
                self.state = State::Nested { depth, string, escape };
                None
            }
            State::Bare if space || byte == b',' || byte == b']' => {
                let span = self.span();
                self.state = match byte {
                    b',' => State::NextItem,
                    b']' => State::End,
                    _ => State::AfterItem,
                };
                Some(span)
            }
            State::Bare => None,
            _ if space => None,
            State::Start if self.offset < 3 && [0xEF, 0xBB, 0xBF][self.offset as usize] == byte => None,
            State::Start if byte == b'[' => {
                self.state = State::FirstItem;
                None
            }
            State::Start if byte == b'{' => self.fail(
                "expected a JSON list '[' of questions, found an object '{'; a file with one question per line must be named .jsonl".into(),
            ),
            State::Start => self.fail(format!("expected a JSON list '[' of questions, found {}", shown(byte))),
            State::FirstItem if byte == b']' => {
                self.state = State::End;
                None
            }
            State::FirstItem | State::NextItem if matches!(byte, b',' | b']' | b'}') => {
                self.fail(format!("expected item {} of the list, found {}", self.items, shown(byte)))
            }
            State::FirstItem | State::NextItem => {
                self.begin(byte);
                None
            }
            State::AfterItem if byte == b',' => {
                self.state = State::NextItem;
                None
            }
            State::AfterItem if byte == b']' => {
                self.state = State::End;
                None
            }
            State::AfterItem => self.fail(format!("expected ',' or ']' after item {}, found {}", self.items.saturating_sub(1), shown(byte))),
            State::End => self.fail(format!("expected nothing after the list's ']', found {}", shown(byte))),
        }
    }
}

fn shown(byte: u8) -> String {
    if byte.is_ascii_graphic() { format!("'{}'", byte as char) } else { format!("the byte 0x{byte:02x}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(layout: Layout, text: &[u8], chunk: usize) -> (Vec<Span>, Option<Fault>) {
        let mut scanner = Scanner::new(layout);
        let mut spans = Vec::new();
        for part in text.chunks(chunk) {
            scanner
                .feed(part, |s| -> Result<(), ()> {
                    spans.push(s);
                    Ok(())
                })
                .unwrap();
        }
        let (last, items, fault, _) = scanner.finish();
        spans.extend(last);
        assert_eq!(items as usize, spans.len());
        (spans, fault)
    }

    fn texts<'a>(text: &'a [u8], spans: &[Span]) -> Vec<&'a str> {
        spans
            .iter()
            .map(|s| std::str::from_utf8(&text[s.offset as usize..(s.offset + s.length) as usize]).unwrap())
            .collect()
    }

    #[test]
    fn list_items_with_their_lines() {
        let text = b"[\n {\"a\": \"]}\\\"\"},\n\n  {\"b\":\n [1,{}]} , 7\n,\"x,\"]\n";
        for chunk in 1..8 {
            let (spans, fault) = scan(Layout::List, text, chunk);
            assert_eq!(fault, None);
            assert_eq!(texts(text, &spans), ["{\"a\": \"]}\\\"\"}", "{\"b\":\n [1,{}]}", "7", "\"x,\""]);
            assert_eq!(spans.iter().map(|s| s.line).collect::<Vec<_>>(), [2, 4, 5, 6]);
        }
    }

    #[test]
    fn lines_skip_blanks_and_the_mark() {
        let text = b"\xEF\xBB\xBF{\"a\":1}\r\n\n  \n {bad\n7";
        let (spans, fault) = scan(Layout::Lines, text, 2);
        assert_eq!(fault, None);
        assert_eq!(texts(text, &spans), ["{\"a\":1}\r", "{bad", "7"]);
        assert_eq!(spans.iter().map(|s| s.line).collect::<Vec<_>>(), [1, 4, 5]);
    }

    #[test]
    fn rows_keep_leading_tabs_and_records_their_quoted_line_ends() {
        let text = b"1\t\"a\n\"\"b\"\tc\r\n\n \n\tno id\t\"\n\"\nlast\t\"x\"";
        for chunk in 1..5 {
            let (spans, fault) = scan(Layout::Records(b'\t'), text, chunk);
            assert_eq!(fault, None);
            assert_eq!(texts(text, &spans), ["1\t\"a\n\"\"b\"\tc\r", "\tno id\t\"\n\"", "last\t\"x\""]);
            assert_eq!(spans.iter().map(|s| s.line).collect::<Vec<_>>(), [1, 5, 7]);
            let (spans, fault) = scan(Layout::Rows, text, chunk);
            assert_eq!(fault, None);
            assert_eq!(spans.iter().map(|s| s.line).collect::<Vec<_>>(), [1, 2, 5, 6, 7]);
        }
        let (spans, fault) = scan(Layout::Records(b'\t'), b"a\tb\n\"c\td\n", 3);
        let fault = fault.unwrap();
        assert_eq!((spans.len(), fault.line), (1, 2));
        assert!(fault.message.contains("quote"), "{}", fault.message);
        let long = [b"1\t\"".as_slice(), &vec![b'a'; 17 << 20]].concat();
        let fault = scan(Layout::Records(b'\t'), &long, 1 << 16).1.unwrap();
        assert!(fault.line == 1 && fault.message.contains("at most"), "{}", fault.message);
    }

    #[test]
    fn faults_name_their_line() {
        for (text, line, part) in [
            (&b"{\"question\": 1}"[..], 1, ".jsonl"),
            (b"\n hello", 2, "found 'h'"),
            (b"", 1, "empty file"),
            (b"[\n{},\n{\"a\": \"", 3, "item 1 starts here"),
            (b"[{}\n", 2, "closing ']'"),
            (b"[{}\n{}]", 2, "after item 0, found '{'"),
            (b"[{},]", 1, "expected item 1"),
            (b"[{}]\n\nx", 3, "expected nothing"),
        ] {
            let fault = scan(Layout::List, text, 3).1.expect("a fault");
            assert_eq!(fault.line, line, "{}", fault.message);
            assert!(fault.message.contains(part), "{}", fault.message);
        }
    }
}
