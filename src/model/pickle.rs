//! Pickles, read without running anything: a stack machine for what `torch.save` writes. A pickle is a program that may call any
//! Python function; here the few that build tensors are understood, and any other is refused by its name.
//!
//! Knows nothing of files or libtorch. Containers live in one arena, so that a hostile pickle can neither nest deep enough to
//! overflow the stack nor claim memory that its own bytes do not pay for.

/// What makes a pickle unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// It asks for a function or class that builds no tensor.
    #[error(
        "it wants to call `{name}`, which builds no tensor; it was not run. Do not load this file in Python either, unless you trust who made it"
    )]
    Refused {
        /// Module and name.
        name: String,
    },
    /// An instruction that torch.save does not write.
    #[error(
        "unknown pickle instruction {opcode:#04x} at byte {at}; expected a file that torch.save wrote of tensors alone"
    )]
    Opcode {
        /// The instruction.
        opcode: u8,
        /// Where.
        at: usize,
    },
    /// The data end inside an instruction.
    #[error("its pickle ends in the middle, at byte {at}; the file is cut off: copy it again")]
    CutOff {
        /// Where.
        at: usize,
    },
    /// An instruction that does not fit what is on the stack.
    #[error("damaged pickle at byte {at}: expected {expected}")]
    Malformed {
        /// Where.
        at: usize,
        /// What the instruction needs.
        expected: &'static str,
    },
}

/// Functions and classes that are understood, beside those of [`storage_of`].
const ORDERED_DICT: &str = "collections.OrderedDict";
const REBUILD_TENSOR: [&str; 2] = ["torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"];
const REBUILD_PARAMETER: &str = "torch._utils._rebuild_parameter";

/// A shape may be used by many tensors: without a limit, a short file would claim much memory.
const MAX_AXES: usize = 8;

/// Classes of storages, in the module `torch`.
pub const STORAGES: [&str; 10] = [
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "BFloat16Storage",
    "LongStorage",
    "IntStorage",
    "ShortStorage",
    "CharStorage",
    "ByteStorage",
    "BoolStorage",
];

fn storage_of(global: &str) -> Option<&'static str> {
    let class = global.strip_prefix("torch.")?;
    STORAGES.into_iter().find(|storage| *storage == class)
}

/// A storage by the key of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageRef<'d> {
    /// Which of [`STORAGES`] it is.
    pub class: &'static str,
    /// Its key in the file.
    pub key: &'d str,
    /// Elements, as the pickle claims.
    pub numel: i64,
}

/// A tensor as a window on a storage, nothing checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef<'d> {
    /// Its memory; tensors that share it are tied.
    pub storage: StorageRef<'d>,
    /// Elements before its first.
    pub offset: i64,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Elements from one index to the next, by axis.
    pub strides: Vec<i64>,
}

/// A value on the stack; containers are numbers of places in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'d> {
    /// `None`, and what nobody reads: floats, attributes.
    Nothing,
    /// A truth value.
    Bool(bool),
    /// A number.
    Int(i64),
    /// An integer beyond 64 bits, little-endian.
    Long(&'d [u8]),
    /// A text.
    Text(&'d str),
    /// A function or class, by its place.
    Global(usize),
    /// A tuple or list, by its place.
    Sequence(usize),
    /// A dictionary, by its place.
    Dict(usize),
    /// A storage, by its place.
    Storage(usize),
    /// A tensor, by its place.
    Tensor(usize),
}

/// What a pickle built.
#[derive(Debug)]
pub struct Pickled<'d> {
    /// The object itself.
    pub value: Value<'d>,
    /// Bytes that it took.
    pub length: usize,
    arena: PickledObjects<'d>,
}

#[derive(Debug, Default)]
struct PickledObjects<'d> {
    globals: Vec<String>,
    sequences: Vec<Vec<Value<'d>>>,
    dicts: Vec<Vec<(Value<'d>, Value<'d>)>>,
    storages: Vec<StorageRef<'d>>,
    tensors: Vec<TensorRef<'d>>,
}

impl<'d> Pickled<'d> {
    /// Runs the first pickle of `data`.
    ///
    /// # Errors
    /// [`PickleError`]; nothing that it names was run.
    pub fn read(data: &'d [u8]) -> Result<Self, PickleError> {
        let mut machine = Machine {
            data,
            at: 0,
            stack: vec![],
            marks: vec![],
            memo: Memo::default(),
            arena: PickledObjects::default(),
        };
        while !machine.step()? {}
        let value = machine.pop()?;
        Ok(Self { value, length: machine.at, arena: machine.arena })
    }

    /// The tensors of a dictionary of names, in its order; `None` where the object is none or holds anything but tensors.
    pub fn tensors(&self) -> Option<Vec<(&'d str, &TensorRef<'d>)>> {
        let Value::Dict(place) = self.value else { return None };
        let entry = |&(key, value): &(Value<'d>, Value<'d>)| match (key, value) {
            (Value::Text(name), Value::Tensor(place)) => Some((name, &self.arena.tensors[place])),
            _ => None,
        };
        self.arena.dicts[place].iter().map(entry).collect()
    }

    /// Every storage that it names.
    pub fn storages(&self) -> &[StorageRef<'d>] {
        &self.arena.storages
    }

    /// Whether it is a dictionary with `true` under `key`.
    pub fn says(&self, key: &str) -> bool {
        let Value::Dict(place) = self.value else { return false };
        self.arena.dicts[place].contains(&(Value::Text(key), Value::Bool(true)))
    }

    /// The texts of a list of texts.
    pub fn texts(&self) -> Option<Vec<&'d str>> {
        let Value::Sequence(place) = self.value else { return None };
        let text = |value: &Value<'d>| if let Value::Text(text) = value { Some(*text) } else { None };
        self.arena.sequences[place].iter().map(text).collect()
    }
}

/// What PUT and MEMOIZE remember.
#[derive(Debug, Default)]
struct Memo<'d> {
    values: std::collections::HashMap<usize, Value<'d>>,
}

struct Machine<'d> {
    data: &'d [u8],
    at: usize,
    stack: Vec<Value<'d>>,
    marks: Vec<usize>,
    memo: Memo<'d>,
    arena: PickledObjects<'d>,
}

/// pickletools' names of the instructions that torch.save writes, in protocols 2 to 5.
mod op {
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const FRAME: u8 = 0x95;
    pub(super) const STOP: u8 = b'.';
    pub(super) const MARK: u8 = b'(';
    pub(super) const POP: u8 = b'0';
    pub(super) const NONE: u8 = b'N';
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const SHORT_BINSTRING: u8 = b'U';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const STACK_GLOBAL: u8 = 0x93;
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const BINPERSID: u8 = b'Q';
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const BUILD: u8 = b'b';
}

impl<'d> Machine<'d> {
    /// One instruction; true at the end.
    fn step(&mut self) -> Result<bool, PickleError> {
        let opcode = self.take(1)?[0];
        match opcode {
            op::STOP => return Ok(true),
            op::PROTO => drop(self.take(1)?),
            op::FRAME => drop(self.take(8)?),
            op::MARK => self.marks.push(self.stack.len()),
            op::POP => drop(self.pop()?),
            op::BINPUT | op::LONG_BINPUT | op::MEMOIZE => self.remember(opcode)?,
            op::BINGET | op::LONG_BINGET => self.recall(opcode)?,
            op::APPEND | op::APPENDS => self.append(opcode)?,
            op::SETITEM | op::SETITEMS => self.set_items(opcode)?,
            op::BUILD => drop(self.pop()?), // attributes of the object below, such as a state dict's versions: nobody reads them
            op::GLOBAL | op::STACK_GLOBAL => self.global(opcode)?,
            op::BINPERSID => self.persistent()?,
            op::REDUCE => self.reduce()?,
            op::EMPTY_TUPLE | op::TUPLE | op::TUPLE1 | op::TUPLE2 | op::TUPLE3 => self.tuple(opcode)?,
            op::EMPTY_LIST => self.push_sequence(vec![]),
            op::EMPTY_DICT => self.push_dict(),
            _ => {
                let value = self.scalar(opcode)?;
                self.stack.push(value);
            }
        }
        Ok(false)
    }

    fn scalar(&mut self, opcode: u8) -> Result<Value<'d>, PickleError> {
        let at = self.at - 1;
        Ok(match opcode {
            op::NONE => Value::Nothing,
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            op::BININT => Value::Int(self.unsigned(4)?.cast_signed() << 32 >> 32),
            op::BININT1 => Value::Int(self.unsigned(1)?.cast_signed()),
            op::BININT2 => Value::Int(self.unsigned(2)?.cast_signed()),
            op::LONG1 => self.long()?,
            op::BINFLOAT => {
                self.take(8)?;
                Value::Nothing
            }
            op::BINUNICODE => self.text(4)?,
            op::SHORT_BINUNICODE | op::SHORT_BINSTRING => self.text(1)?,
            _ => return Err(PickleError::Opcode { opcode, at }),
        })
    }

    fn take(&mut self, bytes: usize) -> Result<&'d [u8], PickleError> {
        let rest = &self.data[self.at..];
        let taken = rest.get(..bytes).ok_or(PickleError::CutOff { at: self.data.len() })?;
        self.at += bytes;
        Ok(taken)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u64, PickleError> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, PickleError> {
        usize::try_from(self.unsigned(bytes)?).map_err(|_| self.malformed("a length"))
    }

    fn long(&mut self) -> Result<Value<'d>, PickleError> {
        let length = self.length(1)?;
        let bytes = self.take(length)?;
        if length > 8 {
            return Ok(Value::Long(bytes));
        }
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let start = if negative { -1 } else { 0 };
        Ok(Value::Int(bytes.iter().rev().fold(start, |number: i64, &byte| number << 8 | i64::from(byte))))
    }

    fn text(&mut self, bytes_of_length: usize) -> Result<Value<'d>, PickleError> {
        let length = self.length(bytes_of_length)?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(Value::Text).map_err(|_| self.malformed("UTF-8"))
    }

    fn line(&mut self) -> Result<&'d str, PickleError> {
        let rest = &self.data[self.at..];
        let end = rest.iter().position(|&byte| byte == b'\n').ok_or(PickleError::CutOff { at: self.data.len() })?;
        let line = &self.take(end + 1)?[..end];
        std::str::from_utf8(line).map_err(|_| self.malformed("UTF-8"))
    }

    fn malformed(&self, expected: &'static str) -> PickleError {
        PickleError::Malformed { at: self.at, expected }
    }

    fn pop(&mut self) -> Result<Value<'d>, PickleError> {
        let above_mark = self.stack.len() > self.marks.last().copied().unwrap_or(0);
        self.stack.pop().filter(|_| above_mark).ok_or_else(|| self.malformed("a value on the stack"))
    }

    /// The values behind the last mark, which is gone then.
    fn pop_to_mark(&mut self) -> Result<Vec<Value<'d>>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.malformed("a mark on the stack"))?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Result<Value<'d>, PickleError> {
        self.stack.last().copied().ok_or_else(|| self.malformed("a value on the stack"))
    }

    fn push_sequence(&mut self, values: Vec<Value<'d>>) {
        self.arena.sequences.push(values);
        self.stack.push(Value::Sequence(self.arena.sequences.len() - 1));
    }

    fn push_dict(&mut self) {
        self.arena.dicts.push(vec![]);
        self.stack.push(Value::Dict(self.arena.dicts.len() - 1));
    }

    fn remember(&mut self, opcode: u8) -> Result<(), PickleError> {
        let key = match opcode {
            op::BINPUT => self.length(1)?,
            op::LONG_BINPUT => self.length(4)?,
            _ => self.memo.values.len(),
        };
        let value = self.top()?;
        self.memo.values.insert(key, value);
        Ok(())
    }

    fn recall(&mut self, opcode: u8) -> Result<(), PickleError> {
        let key = self.length(if opcode == op::BINGET { 1 } else { 4 })?;
        let value = self.memo.values.get(&key).copied().ok_or_else(|| self.malformed("a value put away before"))?;
        self.stack.push(value);
        Ok(())
    }

    fn tuple(&mut self, opcode: u8) -> Result<(), PickleError> {
        let values = match opcode {
            op::EMPTY_TUPLE => vec![],
            op::TUPLE => self.pop_to_mark()?,
            _ => {
                let mut values = (op::TUPLE1..=opcode).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
                values.reverse();
                values
            }
        };
        self.push_sequence(values);
        Ok(())
    }

    fn append(&mut self, opcode: u8) -> Result<(), PickleError> {
        let values = if opcode == op::APPEND { vec![self.pop()?] } else { self.pop_to_mark()? };
        let Value::Sequence(place) = self.top()? else { return Err(self.malformed("a list")) };
        self.arena.sequences[place].extend(values);
        Ok(())
    }

    fn set_items(&mut self, opcode: u8) -> Result<(), PickleError> {
        let values = if opcode == op::SETITEM {
            let value = self.pop()?;
            vec![self.pop()?, value]
        } else {
            self.pop_to_mark()?
        };
        let Value::Dict(place) = self.top()? else { return Err(self.malformed("a dictionary")) };
        let (pairs, rest) = values.as_chunks();
        if !rest.is_empty() {
            return Err(self.malformed("keys with values"));
        }
        self.arena.dicts[place].extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    fn global(&mut self, opcode: u8) -> Result<(), PickleError> {
        let name = if opcode == op::GLOBAL {
            format!("{}.{}", self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            let (Value::Text(module), Value::Text(name)) = (module, name) else {
                return Err(self.malformed("a module and a name"));
            };
            format!("{module}.{name}")
        };
        let known =
            [ORDERED_DICT, REBUILD_PARAMETER].contains(&name.as_str()) || REBUILD_TENSOR.contains(&name.as_str());
        if !known && storage_of(&name).is_none() {
            return Err(PickleError::Refused { name });
        }
        self.arena.globals.push(name);
        self.stack.push(Value::Global(self.arena.globals.len() - 1));
        Ok(())
    }

    /// `("storage", torch.FloatStorage, key, device, numel)`, and a view of it in files of before 1.6.
    fn persistent(&mut self) -> Result<(), PickleError> {
        let Value::Sequence(place) = self.pop()? else { return Err(self.malformed("the facts of a storage")) };
        let [Value::Text("storage"), Value::Global(class), Value::Text(key), _, Value::Int(numel), ref view @ ..] =
            self.arena.sequences[place][..]
        else {
            return Err(self.malformed("the facts of a storage"));
        };
        if !matches!(view, [] | [Value::Nothing]) {
            return Err(self.malformed("a storage that is no view of another"));
        }
        let class = storage_of(&self.arena.globals[class]).ok_or_else(|| self.malformed("a class of storages"))?;
        self.arena.storages.push(StorageRef { class, key, numel });
        self.stack.push(Value::Storage(self.arena.storages.len() - 1));
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), PickleError> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Value::Sequence(place), Value::Global(function)) = (arguments, function) else {
            return Err(self.malformed("a function and its arguments"));
        };
        // Looked at where they are: a short call may name a long list, many times.
        let arguments = &self.arena.sequences[place];
        match self.arena.globals[function].as_str() {
            ORDERED_DICT if arguments.is_empty() => self.push_dict(),
            REBUILD_PARAMETER => {
                let data = arguments.first().copied().filter(|data| matches!(data, Value::Tensor(_)));
                self.stack.push(data.ok_or_else(|| self.malformed("a tensor to be a parameter"))?);
            }
            name if REBUILD_TENSOR.contains(&name) => {
                let tensor =
                    self.tensor(arguments).ok_or_else(|| self.malformed("storage, offset, shape and strides"))?;
                self.arena.tensors.push(tensor);
                self.stack.push(Value::Tensor(self.arena.tensors.len() - 1));
            }
            _ => return Err(self.malformed("a function that builds a tensor")),
        }
        Ok(())
    }

    fn tensor(&self, arguments: &[Value<'d>]) -> Option<TensorRef<'d>> {
        let [Value::Storage(storage), Value::Int(offset), Value::Sequence(shape), Value::Sequence(strides), ..] =
            *arguments
        else {
            return None;
        };
        let numbers = |place: usize| {
            let number = |value: &Value<'_>| if let Value::Int(number) = value { Some(*number) } else { None };
            let all = Some(&self.arena.sequences[place]).filter(|all| all.len() <= MAX_AXES)?;
            all.iter().map(number).collect::<Option<Vec<i64>>>()
        };
        let storage = self.arena.storages[storage];
        Some(TensorRef { storage, offset, shape: numbers(shape)?, strides: numbers(strides)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `{"w": a tensor [2] on storage "0"}`, as protocol 2.
    const ONE_TENSOR: &[u8] =
        b"\x80\x02}q\x00X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage\
        ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQK\x00K\x02\x85K\x01\x85\x89}tRs.";

    #[test]
    fn a_tensor_is_a_window_on_a_storage() {
        let pickled = Pickled::read(ONE_TENSOR).unwrap();
        let storage = StorageRef { class: "FloatStorage", key: "0", numel: 2 };
        let expected = TensorRef { storage, offset: 0, shape: vec![2], strides: vec![1] };
        assert_eq!(pickled.tensors().unwrap(), [("w", &expected)]);
        assert_eq!(pickled.length, ONE_TENSOR.len());
    }

    #[test]
    fn a_call_is_refused_by_its_name_in_every_protocol() {
        let refused = |data: &[u8]| match Pickled::read(data) {
            Err(PickleError::Refused { name }) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."), "os.system");
        assert_eq!(refused(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93."), "posix.system");
        assert_eq!(refused(b"\x80\x02c__builtin__\neval\n."), "__builtin__.eval");
    }

    #[test]
    fn other_instructions_are_refused() {
        let opcode = |data: &[u8]| matches!(Pickled::read(data), Err(PickleError::Opcode { .. }));
        assert!(opcode(b"\x80\x02ios\nsystem\n.") && opcode(b"\x80\x02\x81.") && opcode(b"\x80\x02\x82\x01."));
    }

    #[test]
    fn integers_keep_their_sign() {
        let value = |data: &'static [u8]| Pickled::read(data).unwrap().value;
        assert_eq!(value(b"J\xff\xff\xff\xff."), Value::Int(-1));
        assert_eq!(value(b"\x8a\x02\x00\xff."), Value::Int(-256));
        assert_eq!(value(b"\x8a\x00."), Value::Int(0));
        assert_eq!(value(b"M\xff\xff."), Value::Int(65535));
    }

    #[test]
    fn every_cut_of_a_pickle_is_an_error() {
        for length in 0..ONE_TENSOR.len() {
            assert!(Pickled::read(&ONE_TENSOR[..length]).is_err(), "{length}");
        }
    }

    /// 7,000,000 bytes that copied 1,000,000,000,000 values, hours long, when every call copied its arguments.
    #[test]
    fn a_call_costs_no_more_than_its_own_bytes() {
        let dict_end = ONE_TENSOR.len() - 2;
        let tensor = &ONE_TENSOR[..dict_end]; // up to the tensor on the stack
        let parameter = b"ctorch._utils\n_rebuild_parameter\nq\x01";
        let arguments = [b"(h\x02".as_slice(), &vec![b'N'; 1_000_000], b"tq\x03"].concat();
        let calls = b"h\x01h\x03R0".repeat(1_000_000);
        let data = [tensor, b"q\x02", parameter, &arguments, &calls, b"00s."].concat();
        let pickled = Pickled::read(&data).unwrap();
        assert_eq!(pickled.tensors().unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0..ONE_TENSOR.len()) {
            drop(Pickled::read(&bytes));
            let spoilt: Vec<u8> = ONE_TENSOR.iter().enumerate()
                .map(|(i, &byte)| if i >= at && i < at + 2 { *bytes.first().unwrap_or(&0) } else { byte }).collect();
            drop(Pickled::read(&spoilt));
        }
    }
}
