//! The machine's operations: stack, marks, memo, lists and dicts.

use std::collections::BTreeMap;

use super::{Content, Id, PickleError, Value};

/// A pickle that is being run.
pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    /// Next byte.
    pub at: usize,
    /// First byte of the current operation.
    pub start: usize,
    pub values: Vec<Value<'a>>,
    pub content: Content,
    stack: Vec<Id>,
    /// Heights of the stack at open marks.
    marks: Vec<usize>,
    memo: BTreeMap<u64, Id>,
    /// Elements that calls have copied out of lists and tuples. Those may be named again and again, so that the length
    /// of the pickle does not bound the copies.
    copied: usize,
}

/// What one operation gives.
pub(super) type Step<T> = Result<T, PickleError>;

impl<'a> Machine<'a> {
    pub fn new(bytes: &'a [u8], content: Content) -> Self {
        let (values, stack, marks, memo) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        Self { bytes, at: 0, start: 0, values, content, stack, marks, memo, copied: 0 }
    }

    pub fn invalid<T>(&self, what: impl Into<String>) -> Step<T> {
        Err(PickleError::Invalid { what: what.into(), position: self.start })
    }

    fn take(&mut self, n: u64) -> Step<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if n > left as u64 {
            return self.invalid(format!("{n} more bytes expected, found {left}; the file is cut off"));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    /// An unsigned little-endian integer of `n` <= 8 bytes.
    fn uint(&mut self, n: u64) -> Step<u64> {
        Ok(self.take(n)?.iter().rev().fold(0, |value, &b| value << 8 | u64::from(b)))
    }

    fn line(&mut self) -> Step<&'a str> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else {
            return self.invalid("a line without its end");
        };
        self.at += end + 1;
        self.text(&rest[..end])
    }

    fn text(&self, bytes: &'a [u8]) -> Step<&'a str> {
        std::str::from_utf8(bytes).or_else(|_| self.invalid("text that is not UTF-8"))
    }

    pub fn push(&mut self, value: Value<'a>) -> Step<()> {
        if self.values.len() >= self.content.most_values() {
            return self.invalid(format!("more than {} values", self.content.most_values()));
        }
        self.values.push(value);
        self.stack.push(self.values.len() - 1);
        Ok(())
    }

    /// Counts elements that a call is about to copy.
    pub fn copy(&mut self, n: usize) -> Step<()> {
        self.copied = self.copied.saturating_add(n);
        if self.copied > self.content.most_values() {
            return self.invalid(format!("calls that copy more than {} values", self.content.most_values()));
        }
        Ok(())
    }

    pub fn pop(&mut self) -> Step<Id> {
        if self.stack.len() <= self.marks.last().copied().unwrap_or(0) {
            return self.invalid("a value is taken that was never put");
        }
        match self.stack.pop() {
            Some(id) => Ok(id),
            None => self.invalid("a value is taken that was never put"),
        }
    }

    fn top(&self) -> Step<Id> {
        match self.stack.last() {
            Some(&id) if self.stack.len() > self.marks.last().copied().unwrap_or(0) => Ok(id),
            _ => self.invalid("a value is used that was never put"),
        }
    }

    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        match self.marks.pop() {
            Some(height) if height <= self.stack.len() => Ok(self.stack.split_off(height)),
            _ => self.invalid("a mark is used that was never put"),
        }
    }

    pub fn run(&mut self) -> Step<Id> {
        loop {
            self.start = self.at;
            let op = self.take(1)?[0];
            match op {
                b'.' => return self.pop(),
                // PROTO, FRAME: nothing to do; the frame only says how much to read ahead.
                0x80 => {
                    let protocol = self.uint(1)?;
                    if protocol > 5 {
                        return self.invalid(format!("pickle protocol {protocol}; expected at most 5"));
                    }
                }
                0x95 => drop(self.uint(8)?),
                b'(' => {
                    if self.marks.len() >= self.content.most_values() {
                        return self.invalid(format!("more than {} marks", self.content.most_values()));
                    }
                    self.marks.push(self.stack.len());
                }
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_mark()?),
                b'2' => {
                    let id = self.top()?;
                    self.stack.push(id);
                }
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Bool(true))?,
                0x89 => self.push(Value::Bool(false))?,
                b'J' => {
                    let value = self.uint(4)? as u32 as i32;
                    self.push(Value::Int(value.into()))?;
                }
                b'K' => {
                    let value = self.uint(1)?;
                    self.push(Value::Int(value as i64))?;
                }
                b'M' => {
                    let value = self.uint(2)?;
                    self.push(Value::Int(value as i64))?;
                }
                0x8a | 0x8b => {
                    let n = self.uint(if op == 0x8a { 1 } else { 4 })?;
                    let bytes = self.take(n)?;
                    self.push(long(bytes))?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Float)?;
                }
                // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, and Python 2's SHORT_BINSTRING, BINSTRING.
                0x8c | b'X' | 0x8d | b'U' | b'T' => {
                    let n = self.uint(match op {
                        0x8c | b'U' => 1,
                        0x8d => 8,
                        _ => 4,
                    })?;
                    let bytes = self.take(n)?;
                    let text = self.text(bytes)?;
                    self.push(Value::Str(text))?;
                }
                // Also BYTEARRAY8.
                b'C' | b'B' | 0x8e | 0x96 => {
                    let n = self.uint(match op {
                        b'C' => 1,
                        b'B' => 4,
                        _ => 8,
                    })?;
                    let bytes = self.take(n)?;
                    self.push(Value::Bytes(bytes))?;
                }
                b')' => self.push(Value::Tuple(Vec::new()))?,
                b']' => self.push(Value::List(Vec::new()))?,
                b'}' => self.push(Value::Dict(Vec::new()))?,
                b't' => {
                    let items = self.pop_mark()?;
                    self.push(Value::Tuple(items))?;
                }
                b'l' => {
                    let items = self.pop_mark()?;
                    self.push(Value::List(items))?;
                }
                b'd' => {
                    let items = self.pop_mark()?;
                    let pairs = self.pairs(&items)?;
                    self.push(Value::Dict(pairs))?;
                }
                // TUPLE1, TUPLE2, TUPLE3
                0x85..=0x87 => {
                    let mut items = Vec::new();
                    for _ in 0..op - 0x84 {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.push(Value::Tuple(items))?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(&[item])?;
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.extend_list(&items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.extend_dict(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.extend_dict(&items)?;
                }
                // BINPUT, LONG_BINPUT, MEMOIZE
                b'q' | b'r' | 0x94 => {
                    let key = match op {
                        b'q' => self.uint(1)?,
                        b'r' => self.uint(4)?,
                        _ => self.memo.len() as u64,
                    };
                    let id = self.top()?;
                    if self.memo.len() >= self.content.most_values() {
                        return self
                            .invalid(format!("more than {} stored values", self.content.most_values()));
                    }
                    self.memo.insert(key, id);
                }
                b'h' | b'j' => {
                    let key = self.uint(if op == b'h' { 1 } else { 4 })?;
                    match self.memo.get(&key) {
                        Some(&id) => self.stack.push(id),
                        None => {
                            return self.invalid(format!("stored value {key} is used and was never stored"));
                        }
                    }
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    let global = self.global(module, name)?;
                    self.push(Value::Global(global))?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let (Value::Str(module), Value::Str(name)) = (&self.values[module], &self.values[name])
                    else {
                        return self.invalid("a global whose name is not a string");
                    };
                    let global = self.global(module, name)?;
                    self.push(Value::Global(global))?;
                }
                b'R' => self.reduce()?,
                // A state dict carries `_metadata` (versions of its modules) as its state: not needed.
                b'b' => {
                    let state = self.pop()?;
                    let target = self.top()?;
                    if self.content == Content::Arrays {
                        self.build_array(target, state)?;
                        continue;
                    }
                    let (target, state) = (&self.values[target], &self.values[state]);
                    if !matches!((target, state), (Value::Dict(_), Value::Dict(_))) {
                        return self.invalid(format!(
                            "the state of {} is set from {}",
                            target.kind(),
                            state.kind()
                        ));
                    }
                }
                b'Q' => {
                    let id = self.pop()?;
                    let storage = self.storage(id)?;
                    self.push(Value::Storage(storage))?;
                }
                // INST, and the extension registry: the others only use what was named before.
                b'i' => {
                    let (module, name) = (self.line()?, self.line()?);
                    return self.refuse(format!("{module}.{name}"));
                }
                _ => {
                    let shown = if op.is_ascii_graphic() {
                        format!("'{}'", op as char)
                    } else {
                        format!("{op:#04x}")
                    };
                    return self.invalid(format!(
                        "operation {shown}, which no {} needs; refused",
                        self.content.name()
                    ));
                }
            }
        }
    }

    fn pairs(&self, items: &[Id]) -> Step<Vec<(Id, Id)>> {
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return self.invalid("a dict's key without its value");
        }
        Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
    }

    fn extend_list(&mut self, items: &[Id]) -> Step<()> {
        let id = self.top()?;
        match &mut self.values[id] {
            Value::List(list) => list.extend_from_slice(items),
            other => {
                let kind = other.kind();
                return self.invalid(format!("values are appended to {kind}"));
            }
        }
        Ok(())
    }

    fn extend_dict(&mut self, items: &[Id]) -> Step<()> {
        let pairs = self.pairs(items)?;
        let id = self.top()?;
        match &mut self.values[id] {
            Value::Dict(dict) => dict.extend(pairs),
            other => {
                let kind = other.kind();
                return self.invalid(format!("keys are set in {kind}"));
            }
        }
        Ok(())
    }
}

/// An integer from little-endian two's complement.
fn long(bytes: &[u8]) -> Value<'_> {
    if bytes.len() > 8 {
        return Value::Long(bytes);
    }
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut wide = if negative { [0xff; 8] } else { [0; 8] };
    wide[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(wide))
}
