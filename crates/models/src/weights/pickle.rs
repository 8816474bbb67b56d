//! A pickle machine that can build tensors and nothing else.
//!
//! A Python pickle is a program; the real machine may import and call anything. This one knows the operations that
//! `torch.save` emits for a dict of tensors and the few globals in [`Global`]; anything else is refused before it could
//! mean something. Values live in one flat list and refer to each other by index, so deep nesting cannot exhaust the
//! stack, and one operation adds at most one value, so memory is bounded by the length of the pickle.

use std::collections::BTreeMap;

use super::file::Dtype;

/// No dict of tensors comes near this many bytes of pickle.
pub(super) const MAX_PICKLE: u64 = 16 << 20;

/// Bounds the memory of a pickle that is made of one-byte operations.
const MAX_VALUES: usize = 1 << 22;

/// Why a pickle was not read, and at which byte of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// It names an object that is not needed for tensors.
    Refused { global: String, position: usize },
    /// It is cut off, damaged, or says something that a dict of tensors never says.
    Invalid { what: String, position: usize },
}

/// The Python objects that may be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Global {
    RebuildTensor,
    RebuildParameter,
    OrderedDict,
    /// `torch.FloatStorage` and so on; index into [`STORAGES`].
    Storage(usize),
}

/// Class names of `torch` storages, and safetensors' name of the format.
const STORAGES: [(&str, &str); 10] = [
    ("FloatStorage", "F32"),
    ("DoubleStorage", "F64"),
    ("HalfStorage", "F16"),
    ("BFloat16Storage", "BF16"),
    ("LongStorage", "I64"),
    ("IntStorage", "I32"),
    ("ShortStorage", "I16"),
    ("CharStorage", "I8"),
    ("ByteStorage", "U8"),
    ("BoolStorage", "BOOL"),
];

/// Index of a value.
type Id = usize;

/// A value of the machine. Text stays in the pickle.
#[derive(Debug, Clone)]
enum Value<'a> {
    None,
    Bool(#[allow(dead_code)] bool),
    Int(i64),
    /// An integer beyond 64 bits, little-endian two's complement.
    Long(&'a [u8]),
    Float,
    Str(&'a str),
    Bytes,
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(StorageRef<'a>),
    Tensor(TensorRef<'a>),
}

/// A storage that the archive holds under `key`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StorageRef<'a> {
    pub key: &'a str,
    pub dtype: Dtype,
    /// Elements.
    pub numel: usize,
}

/// A view of a storage. Nothing is checked against the storage's size yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorRef<'a> {
    pub storage: StorageRef<'a>,
    /// Elements before the first.
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// What one pickle builds, and how many bytes it took.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    top: Id,
    pub consumed: usize,
}

impl<'a> Pickle<'a> {
    /// Runs the pickle at the start of `bytes`.
    pub fn load(bytes: &'a [u8]) -> Result<Self, PickleError> {
        let mut machine =
            Machine { bytes, at: 0, start: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: BTreeMap::new() };
        let top = machine.run()?;
        Ok(Self { values: machine.values, top, consumed: machine.at })
    }

    /// The whole pickle as an integer of 64 bits.
    pub fn as_int(&self) -> Option<i64> {
        match self.values[self.top] {
            Value::Int(i) => Some(i),
            _ => None,
        }
    }

    /// The whole pickle as a longer integer, little-endian.
    pub fn as_long(&self) -> Option<&'a [u8]> {
        match self.values[self.top] {
            Value::Long(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The whole pickle as a list of strings.
    pub fn as_strings(&self) -> Option<Vec<&'a str>> {
        let Value::List(items) = &self.values[self.top] else { return None };
        items.iter().map(|&id| if let Value::Str(s) = self.values[id] { Some(s) } else { None }).collect()
    }

    /// Looks up a boolean-free entry of a dict by its name: used for `little_endian` of old archives.
    pub fn dict_bool(&self, name: &str) -> Option<bool> {
        let Value::Dict(pairs) = &self.values[self.top] else { return None };
        pairs.iter().find_map(|&(key, value)| match (&self.values[key], &self.values[value]) {
            (Value::Str(key), Value::Bool(value)) if *key == name => Some(*value),
            _ => None,
        })
    }

    /// The whole pickle as a dict of tensors, in file order.
    ///
    /// # Errors
    /// A sentence on what is not a tensor.
    pub fn tensors(&self) -> Result<Vec<(&'a str, &TensorRef<'a>)>, String> {
        let Value::Dict(pairs) = &self.values[self.top] else {
            return Err(format!("expected a dict of tensors, found {}", self.values[self.top].kind()));
        };
        let mut tensors = Vec::with_capacity(pairs.len());
        for &(key, value) in pairs {
            match (&self.values[key], &self.values[value]) {
                (Value::Str(name), Value::Tensor(tensor)) => tensors.push((*name, tensor)),
                (Value::Str(name), Value::Dict(_)) => {
                    return Err(format!(
                        "expected a flat dict of tensors, found a dict inside it under `{name}`; \
                         save that part alone"
                    ));
                }
                (Value::Str(name), other) => return Err(format!("expected a tensor under `{name}`, found {}", other.kind())),
                (other, _) => return Err(format!("expected names of tensors, found {} as a key", other.kind())),
            }
        }
        Ok(tensors)
    }
}

impl Value<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Long(_) => "an integer",
            Value::Float => "a float",
            Value::Str(_) => "a string",
            Value::Bytes => "bytes",
            Value::Tuple(_) => "a tuple",
            Value::List(_) => "a list",
            Value::Dict(_) => "a dict",
            Value::Global(_) => "a class or function",
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    /// Next byte.
    at: usize,
    /// First byte of the current operation.
    start: usize,
    values: Vec<Value<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack at open marks.
    marks: Vec<usize>,
    memo: BTreeMap<u64, Id>,
}

type Step<T> = Result<T, PickleError>;

impl<'a> Machine<'a> {
    fn invalid<T>(&self, what: impl Into<String>) -> Step<T> {
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
        let Some(end) = rest.iter().position(|&b| b == b'\n') else { return self.invalid("a line without its end") };
        self.at += end + 1;
        self.text(&rest[..end])
    }

    fn text(&self, bytes: &'a [u8]) -> Step<&'a str> {
        std::str::from_utf8(bytes).or_else(|_| self.invalid("text that is not UTF-8"))
    }

    fn push(&mut self, value: Value<'a>) -> Step<()> {
        if self.values.len() >= MAX_VALUES {
            return self.invalid(format!("more than {MAX_VALUES} values"));
        }
        self.values.push(value);
        self.stack.push(self.values.len() - 1);
        Ok(())
    }

    fn pop(&mut self) -> Step<Id> {
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

    fn run(&mut self) -> Step<Id> {
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
                    if self.marks.len() >= MAX_VALUES {
                        return self.invalid(format!("more than {MAX_VALUES} marks"));
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
                b'C' | b'B' | 0x8e => {
                    let n = self.uint(match op {
                        b'C' => 1,
                        b'B' => 4,
                        _ => 8,
                    })?;
                    self.take(n)?;
                    self.push(Value::Bytes)?;
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
                    self.memo.insert(key, id);
                }
                b'h' | b'j' => {
                    let key = self.uint(if op == b'h' { 1 } else { 4 })?;
                    match self.memo.get(&key) {
                        Some(&id) => self.stack.push(id),
                        None => return self.invalid(format!("stored value {key} is used and was never stored")),
                    }
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    let global = self.global(module, name)?;
                    self.push(Value::Global(global))?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let (Value::Str(module), Value::Str(name)) = (&self.values[module], &self.values[name]) else {
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
                    let (target, state) = (&self.values[target], &self.values[state]);
                    if !matches!((target, state), (Value::Dict(_), Value::Dict(_))) {
                        return self.invalid(format!("the state of {} is set from {}", target.kind(), state.kind()));
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
                    let shown = if op.is_ascii_graphic() { format!("'{}'", op as char) } else { format!("{op:#04x}") };
                    return self.invalid(format!("operation {shown}, which no dict of tensors needs; refused"));
                }
            }
        }
    }

    fn refuse<T>(&self, global: String) -> Step<T> {
        Err(PickleError::Refused { global, position: self.start })
    }

    fn global(&self, module: &str, name: &str) -> Step<Global> {
        match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Ok(Global::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Ok(Global::RebuildParameter),
            ("collections", "OrderedDict") => Ok(Global::OrderedDict),
            ("torch", name) if let Some(i) = STORAGES.iter().position(|(class, _)| *class == name) => {
                Ok(Global::Storage(i))
            }
            _ => self.refuse(format!("{module}.{name}")),
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

    /// Calls one of the known globals.
    fn reduce(&mut self) -> Step<()> {
        let (args, callee) = (self.pop()?, self.pop()?);
        let Value::Tuple(args) = &self.values[args] else { return self.invalid("a call whose arguments are no tuple") };
        let args: Vec<&Value> = args.iter().map(|&id| &self.values[id]).collect();
        let result = match &self.values[callee] {
            Value::Global(Global::OrderedDict) => match args.as_slice() {
                [] => Value::Dict(Vec::new()),
                [Value::List(items)] => {
                    let mut pairs = Vec::new();
                    for &item in items {
                        match &self.values[item] {
                            Value::Tuple(pair) | Value::List(pair) if let [key, value] = pair[..] => {
                                pairs.push((key, value));
                            }
                            other => return self.invalid(format!("an OrderedDict of {}", other.kind())),
                        }
                    }
                    Value::Dict(pairs)
                }
                _ => return self.invalid("an OrderedDict of something else than pairs"),
            },
            Value::Global(Global::RebuildTensor) => match args.as_slice() {
                [Value::Storage(storage), Value::Int(offset), Value::Tuple(shape), Value::Tuple(strides), ..]
                    if (5..=7).contains(&args.len()) =>
                {
                    let (offset, shape) = (self.count(*offset, "offset")?, self.counts(shape, "shape")?);
                    let strides = self.counts(strides, "strides")?;
                    if shape.len() != strides.len() {
                        return self.invalid(format!("shape {shape:?} with strides {strides:?}"));
                    }
                    Value::Tensor(TensorRef { storage: storage.clone(), offset, shape, strides })
                }
                _ => return self.invalid("a tensor built from other arguments than storage, offset, shape, strides, ..."),
            },
            Value::Global(Global::RebuildParameter) => match args.as_slice() {
                [Value::Tensor(tensor), ..] if args.len() == 3 => Value::Tensor(tensor.clone()),
                _ => return self.invalid("a parameter built from something else than a tensor"),
            },
            Value::Global(Global::Storage(i)) => return self.invalid(format!("a call of torch.{}", STORAGES[*i].0)),
            other => return self.invalid(format!("a call of {}", other.kind())),
        };
        self.push(result)
    }

    fn count(&self, value: i64, what: &str) -> Step<usize> {
        usize::try_from(value).or_else(|_| self.invalid(format!("{what} {value}; expected 0 or more")))
    }

    fn counts(&self, ids: &[Id], what: &str) -> Step<Vec<usize>> {
        // Torch itself stops at 64 axes; the bound keeps a shape that is memoised and used a million times cheap.
        if ids.len() > 64 {
            return self.invalid(format!("{what} of {} axes; expected at most 64", ids.len()));
        }
        ids.iter()
            .map(|&id| match self.values[id] {
                Value::Int(value) => self.count(value, what),
                ref other => self.invalid(format!("{what} of {}; expected integers", other.kind())),
            })
            .collect()
    }

    /// Reads torch's persistent id: `("storage", class, key, device, elements)`; old archives add a view, or None.
    fn storage(&self, id: Id) -> Step<StorageRef<'a>> {
        let Value::Tuple(parts) = &self.values[id] else { return self.invalid("a persistent id that is no tuple") };
        let parts: Vec<&Value> = parts.iter().take(7).map(|&id| &self.values[id]).collect();
        match parts[..] {
            [Value::Str("storage"), Value::Global(Global::Storage(class)), Value::Str(key), Value::Str(_), Value::Int(numel)]
            | [
                Value::Str("storage"),
                Value::Global(Global::Storage(class)),
                Value::Str(key),
                Value::Str(_),
                Value::Int(numel),
                Value::None,
            ] => {
                let dtype = Dtype::from_safetensors(STORAGES[*class].1);
                Ok(StorageRef { key, dtype, numel: self.count(*numel, "size of a storage")? })
            }
            _ => self.invalid("a persistent id other than (\"storage\", class, key, device, size)"),
        }
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

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
