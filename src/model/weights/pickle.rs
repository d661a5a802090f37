//! Pickles, read without running anything: a stack machine for what `torch.save` writes. A pickle is a program that may call any
//! Python function; here the few that build tensors are understood, and any other is refused by its name.
//!
//! Knows nothing of files. Containers live in one arena, so that a hostile pickle can neither nest deep enough to
//! overflow the stack nor claim memory that its own bytes do not pay for.

use std::collections::HashMap;

use tch::Kind;

use super::tensor_file::kind_of_storage;
use crate::bounds::PICKLE_AXES;

/// Why a pickle cannot be used.
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
    Opcode { opcode: u8, at: usize },
    /// The data end inside an instruction.
    #[error("its pickle ends in the middle, at byte {at}; the file is cut off: copy it again")]
    CutOff { at: usize },
    /// An instruction that does not fit what is on the stack.
    #[error("damaged pickle at byte {at}: expected {expected}")]
    Malformed {
        at: usize,
        /// What the instruction needs.
        expected: &'static str,
    },
}

/// Functions and classes that are understood, beside those of [`storage_of`].
const ORDERED_DICT: &str = "collections.OrderedDict";
const REBUILD_TENSOR: [&str; 2] = ["torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"];
const REBUILD_PARAMETER: &str = "torch._utils._rebuild_parameter";

/// The dtype of a class of storages.
fn storage_of(global: &str) -> Option<Kind> {
    kind_of_storage(global.strip_prefix("torch.")?)
}

/// A storage by the key of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageRef<'d> {
    /// The dtype of its elements.
    pub kind: Kind,
    /// Its key in the file.
    pub key: &'d str,
}

/// A tensor as a window on a storage, nothing checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef<'d> {
    /// Its memory; tensors that share it are tied.
    pub storage: StorageRef<'d>,
    /// Elements before its first.
    pub offset: i64,
    pub shape: Vec<i64>,
    /// Elements from one index to the next, by axis.
    pub strides: Vec<i64>,
}

/// A value on the stack; containers are numbers of places in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'d> {
    /// `None`, and what nobody reads: floats, attributes.
    Nothing,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, little-endian.
    Long(&'d [u8]),
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
            memo: HashMap::new(),
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

struct Machine<'d> {
    data: &'d [u8],
    at: usize,
    stack: Vec<Value<'d>>,
    marks: Vec<usize>,
    /// What PUT and MEMOIZE remember.
    memo: HashMap<usize, Value<'d>>,
    arena: PickledObjects<'d>,
}

impl<'d> Machine<'d> {
    /// One instruction of those that torch.save writes, in protocols 2 to 5, with pickletools' name of each; true at the end.
    fn step(&mut self) -> Result<bool, PickleError> {
        let opcode = self.take(1)?[0];
        match opcode {
            b'.' => return Ok(true),                   // STOP
            0x80 => drop(self.take(1)?),               // PROTO
            0x95 => drop(self.take(8)?),               // FRAME
            b'(' => self.marks.push(self.stack.len()), // MARK
            b'0' => drop(self.pop()?),                 // POP
            b'q' => self.remember(Some(1))?,           // BINPUT
            b'r' => self.remember(Some(4))?,           // LONG_BINPUT
            0x94 => self.remember(None)?,              // MEMOIZE
            b'h' => self.recall(1)?,                   // BINGET
            b'j' => self.recall(4)?,                   // LONG_BINGET
            b'a' => self.append(Some(1))?,             // APPEND
            b'e' => self.append(None)?,                // APPENDS
            b's' => self.set_items(Some(2))?,          // SETITEM
            b'u' => self.set_items(None)?,             // SETITEMS
            b'b' => drop(self.pop()?), // BUILD: attributes of the object below, such as a state dict's versions: nobody reads them
            b'c' => self.global_of_lines()?, // GLOBAL
            0x93 => self.global_of_stack()?, // STACK_GLOBAL
            b'Q' => self.persistent()?, // BINPERSID
            b'R' => self.reduce()?,    // REDUCE
            b')' => self.tuple(Some(0))?, // EMPTY_TUPLE
            0x85 => self.tuple(Some(1))?, // TUPLE1
            0x86 => self.tuple(Some(2))?, // TUPLE2
            0x87 => self.tuple(Some(3))?, // TUPLE3
            b't' => self.tuple(None)?, // TUPLE
            b']' => self.push_sequence(vec![]), // EMPTY_LIST
            b'}' => self.push_dict(),  // EMPTY_DICT
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
            b'N' => Value::Nothing,                                          // NONE
            0x88 => Value::Bool(true),                                       // NEWTRUE
            0x89 => Value::Bool(false),                                      // NEWFALSE
            b'J' => Value::Int(self.unsigned(4)?.cast_signed() << 32 >> 32), // BININT
            b'K' => Value::Int(self.unsigned(1)?.cast_signed()),             // BININT1
            b'M' => Value::Int(self.unsigned(2)?.cast_signed()),             // BININT2
            0x8a => self.long()?,                                            // LONG1
            b'G' => self.take(8).map(|_| Value::Nothing)?,                   // BINFLOAT
            b'X' => self.text(4)?,                                           // BINUNICODE
            0x8c | b'U' => self.text(1)?,                                    // SHORT_BINUNICODE, SHORT_BINSTRING
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

    /// The topmost `count` values in the order they came; without one, those behind the last mark, which is gone then.
    fn pop_values(&mut self, count: Option<usize>) -> Result<Vec<Value<'d>>, PickleError> {
        let Some(count) = count else {
            let mark = self.marks.pop().ok_or_else(|| self.malformed("a mark on the stack"))?;
            return Ok(self.stack.split_off(mark));
        };
        let mut values = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        values.reverse();
        Ok(values)
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

    /// Under a key of so many bytes that follows, or under the next number.
    fn remember(&mut self, bytes_of_key: Option<usize>) -> Result<(), PickleError> {
        let next = self.memo.len();
        let key = bytes_of_key.map_or(Ok(next), |bytes| self.length(bytes))?;
        let value = self.top()?;
        self.memo.insert(key, value);
        Ok(())
    }

    fn recall(&mut self, bytes_of_key: usize) -> Result<(), PickleError> {
        let key = self.length(bytes_of_key)?;
        let value = self.memo.get(&key).copied().ok_or_else(|| self.malformed("a value put away before"))?;
        self.stack.push(value);
        Ok(())
    }

    fn tuple(&mut self, count: Option<usize>) -> Result<(), PickleError> {
        let values = self.pop_values(count)?;
        self.push_sequence(values);
        Ok(())
    }

    fn append(&mut self, count: Option<usize>) -> Result<(), PickleError> {
        let values = self.pop_values(count)?;
        let Value::Sequence(place) = self.top()? else { return Err(self.malformed("a list")) };
        self.arena.sequences[place].extend(values);
        Ok(())
    }

    fn set_items(&mut self, count: Option<usize>) -> Result<(), PickleError> {
        let values = self.pop_values(count)?;
        let Value::Dict(place) = self.top()? else { return Err(self.malformed("a dictionary")) };
        let (pairs, rest) = values.as_chunks();
        if !rest.is_empty() {
            return Err(self.malformed("keys with values"));
        }
        self.arena.dicts[place].extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    fn global_of_lines(&mut self) -> Result<(), PickleError> {
        let (module, name) = (self.line()?, self.line()?);
        self.global(module, name)
    }

    fn global_of_stack(&mut self) -> Result<(), PickleError> {
        let [Value::Text(module), Value::Text(name)] = self.pop_values(Some(2))?[..] else {
            return Err(self.malformed("a module and a name"));
        };
        self.global(module, name)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        let name = format!("{module}.{name}");
        let known =
            [ORDERED_DICT, REBUILD_PARAMETER].contains(&name.as_str()) || REBUILD_TENSOR.contains(&name.as_str());
        if !known && storage_of(&name).is_none() {
            return Err(PickleError::Refused { name });
        }
        self.arena.globals.push(name);
        self.stack.push(Value::Global(self.arena.globals.len() - 1));
        Ok(())
    }

    /// `("storage", torch.FloatStorage, key, device, numel)`, and a view of it in files of PyTorch before 1.6.
    fn persistent(&mut self) -> Result<(), PickleError> {
        let Value::Sequence(place) = self.pop()? else { return Err(self.malformed("the facts of a storage")) };
        let [Value::Text("storage"), Value::Global(class), Value::Text(key), _, Value::Int(_), ref view @ ..] =
            self.arena.sequences[place][..]
        else {
            return Err(self.malformed("the facts of a storage"));
        };
        if !matches!(view, [] | [Value::Nothing]) {
            return Err(self.malformed("a storage that is no view of another"));
        }
        let kind = storage_of(&self.arena.globals[class]).ok_or_else(|| self.malformed("a class of storages"))?;
        self.arena.storages.push(StorageRef { kind, key });
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
            let all = Some(&self.arena.sequences[place]).filter(|all| all.len() <= PICKLE_AXES)?;
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
        let storage = StorageRef { kind: Kind::Float, key: "0" };
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
